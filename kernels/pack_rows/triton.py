"""`pack_rows` in one launch of one program, for CUDA and Ascend.

No sort: the n-th best level is found by bisection over the integer grid, then the last position
that ties at that level reach. Each step is a count over values that stay on chip. The tile is
[positions, requests], so that a CUDA thread holds whole requests (the lengths need no exchange) and
an Ascend vector runs along requests. Counts are sums of signs of differences: Ascend compares int32
element by element, but subtracts and shifts in vectors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import GRID_BITS, Batch, PackedRows, ScoreKind, check_shapes

WARPS = 8
ASCEND_ROWS = 8192  # requests x positions, powers of two: what lowers within 192 KB


@triton.jit
def _to_grid(probability, GRID_BITS: tl.constexpr):
    """int32 in units of 2**-GRID_BITS, halves to even; 0 for NaN and for what is outside [0, 1]."""
    clean = tl.where((probability >= 0.0) & (probability <= 1.0), probability, 0.0)
    # Adding 1.5 * 2**23 leaves fp32 no fraction bits: round to nearest even on every device.
    rounded = (clean * (1 << GRID_BITS) + 12582912.0) - 12582912.0
    return tl.minimum(rounded.to(tl.int32), (1 << GRID_BITS) - 1)


@triton.jit
def _survival_levels(
    scores, row, stride, held, limit, position, K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, GRID_BITS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """int32 [BLOCK_K, BLOCK_R]: level of each draft row, -1 where it is not eligible."""
    levels = tl.full([BLOCK_K, BLOCK_R], -1, tl.int32)
    # Read row by row, as the scores lie, and turned once: Ascend moves whole rows, not columns.
    at = scores + row[:, None] * stride + position[None, :]
    tile = tl.load(at, mask=held[:, None] & (position < K)[None, :], other=0.0).to(tl.float32)
    tile = tl.trans(tile)
    running = tl.full([BLOCK_R], 1 << GRID_BITS, tl.int32)
    for i in range(K):
        score = tl.sum(tl.where((position == i)[:, None], tile, 0.0), axis=0)
        chance = _to_grid(score, GRID_BITS)
        if PRODUCT:
            # (running * chance) >> 16 with products below 2**24: Ascend has no uint32
            low = (running * (chance & 255)) >> 8
            running = (running * (chance >> 8) + low) >> 8
        else:
            running = tl.minimum(running, chance)
        level = tl.where(i < limit, running, -1)
        levels = tl.where(position[:, None] == i, level[None, :], levels)
    return levels


@triton.jit
def _below(values, bound):
    """int32 [BLOCK_R]: values of each request that are less than `bound`, counted by their sign."""
    return tl.sum((bound - 1 - values) >> 31, axis=0) + values.shape[0]


@triton.jit
def _admitted_lengths(
    levels, position, budget, GRID_BITS: tl.constexpr, POSITION_BITS: tl.constexpr
):
    """int32 [BLOCK_R]: rows of each request among the `budget` best, ties by position, request."""
    places = levels.shape[0] * levels.shape[1] - budget
    threshold = 0  # the highest level with at least `budget` rows at or above it
    for bit in tl.static_range(GRID_BITS):
        trial = threshold + (1 << (GRID_BITS - 1 - bit))
        threshold = tl.where(tl.sum(_below(levels, trial), axis=0) <= places, trial, threshold)
    lengths = levels.shape[0] - _below(levels, threshold + 1)
    places = budget - tl.sum(lengths, axis=0)

    ties = tl.where(levels == threshold, position[:, None], 1 << POSITION_BITS)
    column = 0  # ties left of it have places, ties in it have the rest
    for bit in tl.static_range(POSITION_BITS):
        trial = column + (1 << (POSITION_BITS - 1 - bit))
        column = tl.where(tl.sum(_below(ties, trial), axis=0) <= places, trial, column)
    before = _below(ties, column)
    lengths += before
    places -= tl.sum(before, axis=0)
    tied = _below(ties, column + 1) - before

    # ascend: at most 1024 requests once a step; on CUDA it saves ten more exchanges of counts
    rank = tl.cumsum(tied, axis=0)
    return lengths + tl.where(rank <= places, tied, 0)


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
    GRID_BITS: tl.constexpr, POSITION_BITS: tl.constexpr, PRODUCT: tl.constexpr,
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
        row = tl.load(score_rows + request, mask=limit > 0, other=0)

    levels = _survival_levels(
        scores, row, score_stride, held, limit, position, K, BLOCK_R, BLOCK_K, GRID_BITS, PRODUCT
    )
    lengths = _admitted_lengths(levels, position, tl.maximum(budget, 0), GRID_BITS, POSITION_BITS)

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

    scores: fp32, fp16 or bf16 [rows, K], rows contiguous. budget: draft rows to verify in the whole
    batch, a host int or a device scalar. bonus_tokens: logits rows of a request besides its drafts.
    Capturable in a graph: with device scalars for `budget` and `batch.num_requests` a replay may
    change both.
    """
    requests, positions = check_shapes(scores, batch, out)
    if scores.dtype == torch.float64:
        raise ValueError("scores: float64 is for the naive oracle, pass float32")
    if positions > 1 and scores.stride(1) != 1:
        raise ValueError(f"scores must have contiguous rows, got strides {scores.stride()}")
    block_r = triton.next_power_of_2(max(requests, 16))
    block_k = triton.next_power_of_2(positions)
    score_rows = batch.score_rows
    if scores.device.type == "npu":
        if block_r * block_k > ASCEND_ROWS:
            raise ValueError(
                f"scores: {block_r} requests x {block_k} positions (rounded up) do not fit the "
                f"{ASCEND_ROWS} draft rows that one NPU core holds: lower max_num_seqs"
            )
        if score_rows is not None:  # the kernel would fetch row after row
            scores, score_rows = scores.index_select(0, score_rows.clamp(min=0)), None
    count = requests if batch.num_requests is None else batch.num_requests
    _pack_rows[(1,)](
        scores, scores.stride(0), score_rows, batch.draft_counts, batch.caps,
        batch.base_rows, budget, count, out.draft_lengths, out.query_start_loc,
        out.cu_num_logits, out.query_start_loc.shape[0], out.cu_num_logits.shape[0], bonus_tokens,
        requests, K=positions, BLOCK_R=block_r, BLOCK_K=block_k,
        GRID_BITS=GRID_BITS, POSITION_BITS=block_k.bit_length(),
        PRODUCT=kind == "confidence", DEVICE_BUDGET=isinstance(budget, torch.Tensor),
        DEVICE_COUNT=isinstance(count, torch.Tensor), num_warps=num_warps,
    )  # fmt: skip
    return out
