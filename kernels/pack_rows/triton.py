"""`pack_rows` in one launch of one program, for CUDA and Ascend.

No sort: the n-th best level is found by bisection over the SURVIVAL_LEVELS grid, then the ties at
that level by bisection over (position, request) order. Both count over a tile that stays on chip.
The tile is [positions, requests], so that a CUDA thread holds whole requests (the prefix product
and the lengths need no exchange) and an Ascend vector runs along requests. Levels and orders are
exact in fp32, and are compared as fp32 because Ascend compares int32 element by element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import SURVIVAL_LEVELS, Batch, PackedRows, ScoreKind, check_shapes

WARPS = 8


@triton.jit
def _survival_level(
    scores, row, stride, limit, position, K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, LEVELS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_K, BLOCK_R]: level of each draft row, -1 where it is not eligible."""
    survival = tl.full([BLOCK_K, BLOCK_R], 1.0, tl.float32)
    for i in tl.static_range(K):
        score = tl.load(scores + row * stride + i, mask=i < limit, other=0.0).to(tl.float32)
        score = tl.where((score >= 0.0) & (score <= 1.0), score, 0.0)
        factor = tl.where(i <= position[:, None], score[None, :], 1.0)
        survival = survival * factor if PRODUCT else tl.minimum(survival, factor)
    level = tl.minimum(tl.floor(survival * LEVELS), LEVELS - 1.0)
    return tl.where(position[:, None] < limit[None, :], level, -1.0)


@triton.jit
def _count(condition):
    return tl.sum(tl.sum(tl.where(condition, 1, 0), axis=0), axis=0)


@triton.jit
def _admit(level, order, budget, LEVEL_BITS: tl.constexpr, ORDER_BITS: tl.constexpr):
    """Rows of the `budget` best by (level, falling; order, rising); order is unique."""
    threshold = 0.0
    for bit in tl.static_range(LEVEL_BITS):
        trial = threshold + (1 << (LEVEL_BITS - 1 - bit))
        threshold = tl.where(_count(level >= trial) >= budget, trial, threshold)
    above = level > threshold
    tied_order = tl.where(level == threshold, order, 1.0 * (1 << ORDER_BITS))
    open_places = budget - _count(above)
    cut = 0.0
    for bit in tl.static_range(ORDER_BITS):
        trial = cut + (1 << (ORDER_BITS - 1 - bit))
        cut = tl.where(_count(tied_order < trial) <= open_places, trial, cut)
    return above | (tied_order < cut)


@triton.jit
def _write_offsets(buffer, size, lengths, BLOCK_R: tl.constexpr):
    """0, then the running sums of `lengths`, then the total up to `size` entries."""
    index = 1 + tl.arange(0, BLOCK_R)
    # ascend: the sums feed addresses of the same launch, once a step over at most 1024 entries
    ends = tl.cumsum(lengths, axis=0)
    total = tl.sum(lengths, axis=0)
    tl.store(buffer, 0)
    tl.store(buffer + index, ends, mask=index < size)
    for start in range(BLOCK_R, size, BLOCK_R):
        tail = start + index
        tl.store(buffer + tail, tl.zeros_like(lengths) + total, mask=tail < size)


@triton.jit(do_not_specialize=["budget", "num_requests"])
def _pack_rows(
    scores, score_stride, score_rows, draft_counts, caps, base_rows, budget, num_requests,
    draft_lengths, query_start_loc, cu_num_logits, start_loc_size, logits_size, bonus_tokens,
    max_requests, K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    ORDER_BITS: tl.constexpr, LEVEL_BITS: tl.constexpr, PRODUCT: tl.constexpr,
    DEVICE_BUDGET: tl.constexpr, DEVICE_COUNT: tl.constexpr,
):  # fmt: skip
    if DEVICE_BUDGET:
        budget = tl.load(budget).to(tl.int32)
    if DEVICE_COUNT:
        num_requests = tl.load(num_requests).to(tl.int32)
    request = tl.arange(0, BLOCK_R)
    position = tl.arange(0, BLOCK_K)
    held = request < max_requests
    real = held & (request < num_requests)
    base = tl.load(base_rows + request, mask=real, other=0)
    limit = tl.load(draft_counts + request, mask=real, other=0)
    if caps is not None:
        limit = tl.minimum(limit, tl.load(caps + request, mask=real, other=0))
    limit = tl.maximum(tl.minimum(limit, K), 0)
    row = request
    if score_rows is not None:
        row = tl.load(score_rows + request, mask=real, other=0)

    level = _survival_level(
        scores, row, score_stride, limit, position, K, BLOCK_R, BLOCK_K, 1 << LEVEL_BITS, PRODUCT
    )
    order = (position[:, None] * BLOCK_R + request[None, :]).to(tl.float32)
    admitted = _admit(level, order, tl.maximum(budget, 0), LEVEL_BITS, ORDER_BITS)
    lengths = tl.sum(tl.where(admitted, 1, 0), axis=0)

    tl.store(draft_lengths + request, lengths, mask=held)
    _write_offsets(query_start_loc, start_loc_size, base + lengths, BLOCK_R)
    logits = lengths + tl.where(base > 0, bonus_tokens, 0)
    _write_offsets(cu_num_logits, logits_size, logits, BLOCK_R)


def pack_rows(
    scores: torch.Tensor,
    budget: int | torch.Tensor,
    batch: Batch,
    out: PackedRows,
    *,
    kind: ScoreKind = "confidence",
    bonus_tokens: int = 1,
    num_warps: int = WARPS,
) -> PackedRows:
    """Fill `out` with the layout of the step (contract: `vllm_ascend_spec.kernels.pack_rows`).

    scores: fp32, fp16 or bf16 [rows, K]. budget: draft rows to verify in the whole batch, a host
    int or a device scalar. bonus_tokens: logits rows of a request besides its drafts. Capturable
    in a graph: with device scalars for `budget` and `batch.num_requests` a replay may change both.
    """
    requests, positions = check_shapes(scores, batch, out)
    if scores.dtype == torch.float64:
        raise ValueError("scores: float64 is for the naive oracle, pass float32")
    block_r = triton.next_power_of_2(max(requests, 16))
    block_k = triton.next_power_of_2(positions)
    count = requests if batch.num_requests is None else batch.num_requests
    _pack_rows[(1,)](
        scores, scores.stride(0), batch.score_rows, batch.draft_counts, batch.caps,
        batch.base_rows, budget, count, out.draft_lengths, out.query_start_loc,
        out.cu_num_logits, out.query_start_loc.shape[0], out.cu_num_logits.shape[0], bonus_tokens,
        requests, K=positions, BLOCK_R=block_r, BLOCK_K=block_k,
        ORDER_BITS=(block_r * block_k).bit_length(), LEVEL_BITS=SURVIVAL_LEVELS.bit_length() - 1,
        PRODUCT=kind == "confidence", DEVICE_BUDGET=isinstance(budget, torch.Tensor),
        DEVICE_COUNT=isinstance(count, torch.Tensor), num_warps=num_warps,
    )  # fmt: skip
    return out
