"""`draft_inputs` in one launch, for CUDA and Ascend.

Two kinds of work items: a group of requests writes its block rows as one [requests, rows] tile; a
chunk of the target's rows writes their context positions and slots. A target row finds its request
by counting the ends of requests at or before it, so rows of long prefill chunks, decode rows and
padding rows are all one vector, with no loop over requests and no serial padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._launch import grid
from . import PADDING_SLOT, BlockShape, DraftBuffers, TargetStep, check_shapes

REQUESTS_PER_ITEM = 16
COUNTED_TILE = 8192  # target rows x requests compared at once: what Ascend's compiler takes quickly
_PADDING = tl.constexpr(PADDING_SLOT)


@triton.jit
def _owned_columns(allocated_blocks, columns, request, mask):
    """Columns of the block table that hold pages of the request."""
    owned = tl.where(mask, columns, 0)
    if allocated_blocks is not None:
        owned = tl.minimum(owned, tl.load(allocated_blocks + request, mask=mask, other=0))
    return owned


@triton.jit
def _slots(table_row, owned, index, live, BLOCK_SIZE: tl.constexpr, NULL_BLOCK: tl.constexpr):
    """Cache slot of each token index, padding where the request owns no page for it."""
    column = index // BLOCK_SIZE
    live = live & (column < owned)
    # ascend: a block table look-up is a gather, for pages are scattered
    block = tl.load(table_row + column, mask=live, other=NULL_BLOCK)
    slot = block * BLOCK_SIZE + (index - column * BLOCK_SIZE)
    return tl.where(live & (block != NULL_BLOCK), slot, _PADDING)


@triton.jit
def _store_positions(positions, stride, at, value, mask, MROPE: tl.constexpr):
    tl.store(positions + at, value, mask=mask)
    if MROPE:
        tl.store(positions + stride + at, value, mask=mask)
        tl.store(positions + 2 * stride + at, value, mask=mask)


@triton.jit
def _block_rows(
    request, num_requests, max_requests,
    start_loc, target_positions, num_sampled, num_rejected, idx_mapping, last_sampled,
    next_prefill_tokens, block_table, table_stride, columns, allocated_blocks, mrope_delta,
    input_ids, positions, position_stride, slots, out_start_loc, seq_lens, draft_counts,
    sample_rows, sample_positions, sample_requests, mask_token, max_model_len,
    K: tl.constexpr, Q: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NULL_BLOCK: tl.constexpr,
):  # fmt: skip
    held = request < max_requests
    # Loads are masked by what the buffers hold, so that they do not wait for num_requests.
    state = tl.load(idx_mapping + request, mask=held, other=-1).to(tl.int32)
    first = tl.load(start_loc + request, mask=held, other=0)
    end = tl.load(start_loc + request + 1, mask=held, other=0)
    kept = end - tl.load(num_rejected + request, mask=held, other=0)
    sampled = tl.load(num_sampled + request, mask=held, other=0)
    drafting = held & (request < num_requests) & (state >= 0) & (kept > first)
    anchor = tl.load(target_positions + kept - 1, mask=drafting, other=-1).to(tl.int32) + 1
    newest = tl.load(last_sampled + state, mask=drafting & (sampled > 0), other=0).to(tl.int32)
    prompt = tl.load(next_prefill_tokens + state, mask=drafting & (sampled <= 0), other=0)
    token = tl.where(sampled > 0, newest, prompt.to(tl.int32))
    fits = drafting & (anchor + K < max_model_len)

    seq_len = tl.minimum(anchor + Q, max_model_len)
    tl.store(seq_lens + request, tl.where(drafting, seq_len, 0), mask=held)
    tl.store(draft_counts + request, tl.where(fits, K, 0), mask=held)
    tl.store(out_start_loc + request, 0 * request, mask=request == 0)
    tl.store(out_start_loc + request + 1, tl.minimum(request + 1, num_requests) * Q, mask=held)

    offset = tl.arange(0, BLOCK_Q)[None, :]
    row = request[:, None] * Q + offset
    inside = held[:, None] & (offset < Q)
    index = anchor[:, None] + offset
    ids = tl.where(offset == 0, token[:, None], mask_token)
    tl.store(input_ids + row, tl.where(drafting[:, None], ids, 0), mask=inside)
    place = tl.minimum(index, max_model_len - 1)
    if mrope_delta is not None:
        place += tl.load(mrope_delta + state, mask=drafting, other=0).to(tl.int32)[:, None]
    place = tl.where(drafting[:, None], place, 0)
    _store_positions(positions, position_stride, row, place, inside, mrope_delta is not None)
    owned = _owned_columns(allocated_blocks, columns, request, fits)
    slot = _slots(
        (block_table + request * table_stride)[:, None], owned[:, None], index,
        fits[:, None] & (offset < Q), BLOCK_SIZE, NULL_BLOCK,
    )  # fmt: skip
    tl.store(slots + row, slot.to(tl.int64), mask=inside)

    sample = request[:, None] * K + offset - (Q - K)
    is_sample = inside & (offset >= Q - K)
    tl.store(sample_rows + sample, tl.where(drafting[:, None], row, 0), mask=is_sample)
    index = tl.where(drafting[:, None], index + 1 - (Q - K), 0)
    tl.store(sample_positions + sample, index, mask=is_sample)
    owner = tl.where(fits[:, None] & (offset < Q), state[:, None], -1)
    tl.store(sample_requests + sample, owner, mask=is_sample)


@triton.jit
def _context_rows(
    row, num_requests, max_requests, start_loc, target_positions, num_rejected, idx_mapping,
    block_table, table_stride, columns, allocated_blocks, mrope_positions, mrope_stride,
    context_positions, context_stride, context_slots, context_rows,
    BLOCK_R: tl.constexpr, BLOCK_SIZE: tl.constexpr, NULL_BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.arange(0, BLOCK_R)
    held = request < max_requests
    end = tl.load(start_loc + 1 + request, mask=held, other=0)
    kept = end - tl.load(num_rejected + request, mask=held, other=0)
    # compared as fp32 (exact below 2^24 rows): Ascend compares int32 element by element
    real = held & (request < num_requests)
    end = tl.where(real, end, 1 << 24).to(tl.float32)
    kept = tl.where(real, kept, 1 << 24).to(tl.float32)
    at = row.to(tl.float32)[:, None]
    owner = tl.sum(tl.where(end[None, :] <= at, 1, 0), axis=1)
    passed = tl.sum(tl.where(kept[None, :] <= at, 1, 0), axis=1)

    inside = row < context_rows
    valid = inside & (owner < num_requests) & (passed == owner)
    # ascend: one state row for each target row, gathered through the owner just found
    valid = valid & (tl.load(idx_mapping + owner, mask=valid, other=-1) >= 0)
    index = tl.load(target_positions + row, mask=valid, other=0).to(tl.int32)
    owned = _owned_columns(allocated_blocks, columns, owner, valid)
    slot = _slots(block_table + owner * table_stride, owned, index, valid, BLOCK_SIZE, NULL_BLOCK)
    tl.store(context_slots + row, slot.to(tl.int64), mask=inside)
    if mrope_positions is not None:
        for axis in tl.static_range(3):
            place = tl.load(mrope_positions + axis * mrope_stride + row, mask=valid, other=0)
            tl.store(context_positions + axis * context_stride + row, place, mask=inside)
    else:
        tl.store(context_positions + row, index, mask=inside)


@triton.jit(do_not_specialize=["num_requests", "context_rows", "max_rows"])
def _draft_inputs(
    num_requests, max_requests, start_loc, target_positions, num_sampled, num_rejected, idx_mapping,
    last_sampled, next_prefill_tokens, block_table, table_stride, columns, allocated_blocks,
    mrope_positions, mrope_stride, mrope_delta,
    input_ids, positions, position_stride, slots, out_start_loc, seq_lens, draft_counts,
    sample_rows, sample_positions, sample_requests,
    context_positions, context_stride, context_slots, context_rows, max_rows,
    groups, items, mask_token, max_model_len,
    K: tl.constexpr, Q: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_SIZE: tl.constexpr, NULL_BLOCK: tl.constexpr,
    DEVICE_COUNT: tl.constexpr,
):  # fmt: skip
    if DEVICE_COUNT:
        num_requests = tl.load(num_requests).to(tl.int32)
    num_requests = tl.minimum(num_requests, max_requests)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if item < groups:
            _block_rows(
                item * GROUP + tl.arange(0, GROUP), num_requests, max_requests,
                start_loc, target_positions, num_sampled, num_rejected, idx_mapping, last_sampled,
                next_prefill_tokens, block_table, table_stride, columns, allocated_blocks,
                mrope_delta, input_ids, positions, position_stride, slots, out_start_loc, seq_lens,
                draft_counts, sample_rows, sample_positions, sample_requests, mask_token,
                max_model_len, K, Q, BLOCK_Q, BLOCK_SIZE, NULL_BLOCK,
            )  # fmt: skip
        else:
            chunk = (item - groups) * CHUNK + tl.arange(0, CHUNK)
            _context_rows(
                chunk, num_requests, max_requests, start_loc, target_positions, num_rejected,
                idx_mapping, block_table, table_stride, columns, allocated_blocks,
                mrope_positions, mrope_stride, context_positions, context_stride, context_slots,
                context_rows, BLOCK_R, BLOCK_SIZE, NULL_BLOCK,
            )  # fmt: skip
            row = max_requests * Q + chunk
            nothing = tl.zeros([CHUNK], tl.int32)
            tl.store(input_ids + row, nothing, mask=row < max_rows)
            tl.store(slots + row, (nothing + _PADDING).to(tl.int64), mask=row < max_rows)
            _store_positions(
                positions, position_stride, row, nothing, row < max_rows,
                mrope_positions is not None,
            )  # fmt: skip


def draft_inputs(step: TargetStep, shape: BlockShape, out: DraftBuffers) -> DraftBuffers:
    """Fill `out` (contract: `vllm_ascend_spec.kernels.draft_inputs`).

    One launch, no wait for the host. Slots must fit int32. Capturable in a graph; with a device
    scalar for `step.num_requests` a replay may change the number of requests.
    """
    requests = check_shapes(step, shape, out)
    count = requests if step.num_requests is None else step.num_requests
    context_rows, max_rows = out.context_slots.shape[0], out.slots.shape[0]
    groups = triton.cdiv(requests, REQUESTS_PER_ITEM)
    beyond = max(context_rows, max_rows - requests * shape.rows)
    block_r = triton.next_power_of_2(max(requests, 16))
    chunk = min(64, COUNTED_TILE // block_r)
    items = groups + triton.cdiv(beyond, chunk)
    _draft_inputs[grid(items, out.slots.device)](
        count, requests, step.query_start_loc, step.positions, step.num_sampled,
        step.num_rejected, step.idx_mapping, step.last_sampled, step.next_prefill_tokens,
        step.block_table, step.block_table.stride(0), step.block_table.shape[1],
        step.allocated_blocks, step.mrope_positions,
        step.mrope_positions.stride(0) if step.mrope_positions is not None else 0,
        step.mrope_delta, out.input_ids, out.positions, out.positions.stride(0), out.slots,
        out.query_start_loc, out.seq_lens, out.draft_counts, out.sample_rows,
        out.sample_positions, out.sample_requests, out.context_positions,
        out.context_positions.stride(0), out.context_slots, context_rows, max_rows, groups, items,
        shape.mask_token, shape.max_model_len, K=shape.draft_tokens, Q=shape.rows,
        BLOCK_Q=triton.next_power_of_2(shape.rows),
        BLOCK_R=block_r, GROUP=REQUESTS_PER_ITEM, CHUNK=chunk, BLOCK_SIZE=shape.block_size,
        NULL_BLOCK=shape.null_block, DEVICE_COUNT=isinstance(count, torch.Tensor), num_warps=4,
    )  # fmt: skip
    return out
