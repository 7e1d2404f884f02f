"""Drafting rounds for a part of the batch, for drafters that draft token by token (MTP, EAGLE-3).

Their first pass runs over the rows that the target verified, for every request: it keeps the
drafter's cache, and makes everybody's first draft token. The passes after it run for the requests
that the planner named, moved to the front of the speculator's buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_decode_inputs

from vllm_ascend_spec.budget.survival import Ints


@torch.inference_mode()
def draft_on(speculator: Any, given: dict[str, Any], chosen: Ints, length: int) -> torch.Tensor:
    """Go on after a first pass: draft tokens 2 to `length` for the batch rows `chosen` (ascending).

    given: arguments of upstream's `propose`. Returns int64 [R, K] in batch order; entries of other
    rows and past `length` mean nothing, and their confidences are 0.
    """
    batch, requests = given["input_batch"], len(chosen)
    drafts = speculator.draft_tokens[: batch.num_reqs]
    confidence = speculator.draft_token_confidence_probs[: batch.num_reqs]
    rows = async_tensor_h2d(chosen, device=speculator.device)
    first = confidence[rows, 0]
    if length > 1:
        _to_the_front(speculator, given, rows, drafts[rows, 0])
        bounds = batch.seq_lens_cpu_upper_bound[torch.from_numpy(chosen)]
        _recur(speculator, requests, bounds, length)
    made = drafts[:requests, 1:length].clone(), confidence[:requests, 1:length].clone()
    drafts[rows, 1:length] = made[0]
    confidence.zero_()
    confidence[rows, 0] = first
    confidence[rows, 1:length] = made[1]
    return drafts


def capture_lengths(graphs: Any, lengths: tuple[int, ...]) -> None:
    """Have the fused passes after the first captured once for each draft length.

    graphs: vLLM's manager of them, before its capture. One graph runs all K passes, and would run
    them whatever length is asked for. Read in vLLM 0.32 and 0.33, not run on a GPU yet.
    """
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
        SpeculatorBatchDescriptor,
    )

    graphs._capture_descs = {
        mode: [
            SpeculatorBatchDescriptor(**vars(shape), num_speculative_tokens=length)
            for shape in shapes
            if not isinstance(shape, SpeculatorBatchDescriptor)  # of an earlier capture
            for length in sorted(set(lengths) - {1}, reverse=True)
        ]
        or shapes
        for mode, shapes in graphs._capture_descs.items()
    }


def _to_the_front(
    speculator: Any, given: dict[str, Any], rows: torch.Tensor, first_tokens: torch.Tensor
) -> None:
    """Inputs of the second pass, of the requests `rows` alone."""
    requests, batch, buffers = len(rows), given["input_batch"], speculator.input_buffers
    for buffer in (
        speculator.hidden_states,
        buffers.positions,
        speculator.sample_src_positions,
        speculator.idx_mapping,
    ):
        buffer[:requests] = buffer[rows]
    speculator.idx_mapping[requests:].fill_(-1)
    # The target's forward pass is over; its next step gathers the tables anew.
    speculator.block_tables.gather_block_tables(speculator.idx_mapping[:requests], requests)
    prepare_decode_inputs(
        first_tokens,
        batch.seq_lens[rows],
        given["num_rejected"][rows],
        buffers,
        speculator.sample_src_positions,
        speculator.max_model_len,
        speculator.max_num_reqs,
        advance_draft_positions=speculator.advance_draft_positions,
    )


def _recur(speculator: Any, requests: int, longest: torch.Tensor, depth: int) -> None:
    """All passes but the first. longest: bounds of the requests' lengths, on the host."""
    speculator.draft_max_seq_len = min(int(longest.max()) + depth, speculator.max_model_len)
    shape, _ = dispatch_cg_and_sync_dp(
        speculator.decode_cudagraph_manager,
        requests,
        requests,
        uniform_token_count=1,
        dp_size=speculator.dp_size,
        dp_rank=speculator.dp_rank,
        need_eager=speculator.decode_cudagraph_manager is None,
    )
    if shape.cg_mode == CUDAGraphMode.FULL:
        shape = speculator.decode_cudagraph_manager.specialize_spec_tokens(shape, depth)
    speculator.on_multi_step_decode_begin(requests)
    fused = speculator.supports_decode_metadata_update
    passes = speculator._fused_multi_step_decode if fused else speculator._multi_step_decode
    passes(requests, False, shape, None, longest, depth)
    speculator.on_multi_step_decode_end(requests)
