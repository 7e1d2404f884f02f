"""The benchmark's acceptance model: requests differ, and confidences know it, with noise.

vLLM's synthetic acceptance has one rate for all requests, and confidences of dummy weights mean
nothing. Here every other request is easy, in the order of their coming. Draft tokens that the model
rejects reach rejection sampling as the placeholder -1, which it refuses; all others are accepted by
vLLM's own synthetic mode at rate 1. A confidence is the request's true chance with normal noise on
its logit. Switched on by the benchmark alone; no arm runs without it but the one without
speculation.

Whether a draft token is accepted is drawn by request and place in the sequence: arms see the same
luck, and those that draft alike emit the same tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ascend_spec.engine.patching import Replacement, declare

EASY = (0.90, 0.80, 0.72, 0.65, 0.59, 0.54, 0.49)
HARD = (0.55, 0.30, 0.17, 0.09, 0.05, 0.03, 0.02)
NOISE = 0.5  # standard deviation of a confidence's logit around the true one

SLOTS = 1024

_TARGET = "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify"


def conditional(unconditional: tuple[float, ...]) -> list[float]:
    """Chance of each position given that every one before it was accepted."""
    before = (1.0, *unconditional)
    return [p / q for p, q in zip(unconditional, before, strict=False)]


def emitted(draft_tokens: int) -> float:
    """Tokens a request and step if so many are drafted and verified, mean of easy and hard ones."""
    return 1 + sum(EASY[:draft_tokens] + HARD[:draft_tokens]) / 2


def chances(device: torch.device | str) -> torch.Tensor:
    """float32 [2, 7]: conditional acceptance of easy (row 0) and hard (row 1) requests."""
    return torch.tensor([conditional(EASY), conditional(HARD)], device=device)


@dataclass
class Draws:
    """seed: other draws for every turn, the same ones in all arms.

    numbers: int32 [SLOTS] on the device, the number of the request in each slot; which slot a
    request gets depends on what the engine served before.
    """

    seed: int = 0
    numbers: torch.Tensor | None = None

    def on(self, device: torch.device) -> torch.Tensor:
        """The numbers; until there are requests to speak of, those of the slots."""
        if self.numbers is None:
            self.numbers = torch.arange(SLOTS, dtype=torch.int32, device=device)
        return self.numbers

    def follow(self, slots: dict[int, int]) -> None:
        """slots: the number of the request in each slot that has one."""
        if self.numbers is not None:  # else nothing is drawn in this arm
            host = torch.arange(SLOTS, dtype=torch.int32)
            host[list(slots)] = torch.tensor(list(slots.values()), dtype=torch.int32)
            self.numbers = host.to(self.numbers.device)


draws = Draws()


def install() -> None:
    """Declare the replacement; before the engine is built."""
    declare(
        Replacement(
            target=_TARGET,
            reason="benchmark: acceptance differs from request to request",
            make=_with_coins,
        )
    )


def speculative_options(draft_tokens: int) -> dict[str, Any]:
    """What an arm's speculative config says about acceptance."""
    return {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0] * draft_tokens,
    }


def noisy_confidences(manager: Any) -> None:
    """Let this adaptive manager see the model's confidences instead of the drafter's."""
    # The CPU engine must be enabled before Triton is imported.
    from benchmarks.engine import acceptance_kernels

    record: Callable[[torch.Tensor, Any], None] = manager.record_confidences
    table = torch.logit(chances(manager.req_states.device))
    rounds = itertools.count(1)

    def record_noisy(confidence: torch.Tensor, input_batch: Any) -> None:
        drafted = confidence[: input_batch.num_reqs]
        noisy = acceptance_kernels.noisy(
            drafted, input_batch.idx_mapping, draws.on(drafted.device), table, NOISE, next(rounds)
        )
        record(noisy, input_batch)

    manager.record_confidences = record_noisy


def _with_coins(original: Any) -> Any:
    from benchmarks.engine import acceptance_kernels

    tables: dict[torch.device, torch.Tensor] = {}

    def _verify(self: Any, *args: Any, **named: Any) -> Any:
        values = dict(zip(_NAMES, args, strict=False)) | named
        drafts = values["verify_draft_sampled"]
        if drafts.device not in tables:  # making it waits for the device
            tables[drafts.device] = chances(drafts.device)
        values["verify_draft_sampled"] = acceptance_kernels.judged(
            drafts,
            values["expanded_local_pos"],
            values["pos"],
            values["expanded_idx_mapping"],
            draws.on(drafts.device),
            tables[drafts.device],
            draws.seed,
        )
        return original(self, **values)

    return _verify


_NAMES = (
    "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping",
    "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos", "seq_lens_upper_bound_np",
    "verify_draft_sampled",
)  # fmt: skip
