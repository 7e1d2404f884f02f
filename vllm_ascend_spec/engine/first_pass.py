"""The first pass of drafters that draft token by token (MTP, EAGLE-3), where verification varies.

It runs over the rows that the target verified, with the target's attention metadata. vLLM records
it in full graphs of equal rows a request, but an adaptive target's metadata are those of a graph
for rows of any length: padded to as many requests as it has rows. FlashAttention 3 lays its
schedule out by the number of requests and reads it from one buffer, so a full graph of the first
pass finds another one's. That is read from the code of 0.32, and 0.33 reads alike. Seen on an H200
with 0.32, with 1 to 3 requests running where there was room for 32: drafts whose logits are NaN,
and where draft tokens are drawn vLLM's rejection sampler answers those with token 0
(`benchmarks/results/engine/first_pass_fault.txt`). That they are gone without these graphs is for
`tests/gpu/test_drawn_drafts.py` to show.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_ascend_spec.engine.patching import Replacement, in_place_of

logger = logging.getLogger("vllm.ascend_spec.adaptive")


def replacements() -> tuple[Replacement, ...]:
    """Keeps the first pass out of full graphs, for either planner."""
    return (
        Replacement(
            target="vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:"
            "TargetDependentARSpeculator.init_cudagraph_manager",
            reason="a full graph of a drafter's first pass misreads an adaptive target's metadata",
            make=_without_full_graphs,
        ),
    )


def _without_full_graphs(original: Any) -> Any:
    @in_place_of(original)
    def init_cudagraph_manager(self: Any, cudagraph_mode: Any) -> None:
        original(self, cudagraph_mode)
        if not self.enable_adaptive_verification:
            return
        full = self.prefill_cudagraph_manager
        self.prefill_cudagraph_manager = type(full)(
            self.vllm_config, self.device, piecewise_part(cudagraph_mode), full.decode_query_len
        )
        logger.info("The drafter's first pass runs outside of full graphs")

    return init_cudagraph_manager


def piecewise_part(mode: Any) -> Any:
    """What is left of a `CUDAGraphMode` without full graphs: PIECEWISE or NONE."""
    return type(mode).PIECEWISE if mode.has_piecewise_cudagraphs() else type(mode).NONE
