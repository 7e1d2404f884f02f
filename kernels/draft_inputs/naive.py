"""Oracle of `draft_inputs`: one request, one row at a time; reads device values."""

from __future__ import annotations

from . import PADDING_SLOT, BlockShape, DraftBuffers, TargetStep, check_shapes


def slot_of(step: TargetStep, shape: BlockShape, request: int, index: int) -> int:
    """Cache slot of token `index` of a request, or PADDING_SLOT where it owns none."""
    column = index // shape.block_size
    columns = step.block_table.shape[1]
    if step.allocated_blocks is not None:
        columns = min(columns, int(step.allocated_blocks[request]))
    if column >= columns:
        return PADDING_SLOT
    block = int(step.block_table[request, column])
    if block == shape.null_block:
        return PADDING_SLOT
    return block * shape.block_size + index % shape.block_size


def draft_inputs(step: TargetStep, shape: BlockShape, out: DraftBuffers) -> DraftBuffers:
    """Fill `out` (contract: `vllm_ascend_spec.kernels.draft_inputs`)."""
    requests = check_shapes(step, shape, out)
    count = requests if step.num_requests is None else min(int(step.num_requests), requests)
    _fill_padding(out)
    for request in range(requests):
        out.query_start_loc[request + 1] = min(request + 1, count) * shape.rows
    for request in range(count):
        first, end = step.query_start_loc[request : request + 2].tolist()
        kept = end - int(step.num_rejected[request])
        if int(step.idx_mapping[request]) < 0 or kept <= first:
            continue
        for row in range(first, kept):
            _context_row(step, shape, out, request, row)
        _block(step, shape, out, request, anchor_index=int(step.positions[kept - 1]) + 1)
    return out


def _fill_padding(out: DraftBuffers) -> None:
    for buffer in (out.slots, out.context_slots):
        buffer.fill_(PADDING_SLOT)
    out.sample_requests.fill_(-1)
    for name in ("input_ids", "positions", "query_start_loc", "seq_lens", "draft_counts"):
        getattr(out, name).zero_()
    for name in ("sample_rows", "sample_positions", "context_positions"):
        getattr(out, name).zero_()


def _context_row(
    step: TargetStep, shape: BlockShape, out: DraftBuffers, request: int, row: int
) -> None:
    index = int(step.positions[row])
    out.context_slots[row] = slot_of(step, shape, request, index)
    source = step.positions if step.mrope_positions is None else step.mrope_positions
    out.context_positions[..., row] = source[..., row].to(out.context_positions)


def _block(
    step: TargetStep, shape: BlockShape, out: DraftBuffers, request: int, anchor_index: int
) -> None:
    state = int(step.idx_mapping[request])
    known = step.last_sampled if int(step.num_sampled[request]) > 0 else step.next_prefill_tokens
    delta = 0 if step.mrope_delta is None else int(step.mrope_delta[state])
    fits = anchor_index + shape.draft_tokens < shape.max_model_len
    out.seq_lens[request] = min(anchor_index + shape.rows, shape.max_model_len)
    out.draft_counts[request] = shape.draft_tokens if fits else 0
    for offset in range(shape.rows):
        row, index = request * shape.rows + offset, anchor_index + offset
        out.input_ids[row] = int(known[state]) if offset == 0 else shape.mask_token
        out.positions[..., row] = min(index, shape.max_model_len - 1) + delta
        if fits:
            out.slots[row] = slot_of(step, shape, request, index)
    skipped = shape.rows - shape.draft_tokens
    for draft in range(shape.draft_tokens):
        sample = request * shape.draft_tokens + draft
        out.sample_rows[sample] = request * shape.rows + draft + skipped
        out.sample_positions[sample] = anchor_index + draft + 1
        out.sample_requests[sample] = state if fits else -1
