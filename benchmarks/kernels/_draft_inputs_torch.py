"""The baseline of draft_inputs: the same buffers from torch operators, without a wait for the host.

For steps whose requests are all real and keep at least one row: padding is what the kernel has to
handle besides.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm_ascend_spec.kernels.draft_inputs import (
    PADDING_SLOT,
    BlockShape,
    DraftBuffers,
    TargetStep,
)


def slots_of(step: TargetStep, shape: BlockShape, request: Tensor, index: Tensor) -> Tensor:
    """Cache slot of token `index` of `request`, elementwise."""
    column = index // shape.block_size
    columns = step.block_table.shape[1]
    block = step.block_table[request, column.clamp(max=columns - 1)].long()
    owned = (column < columns) & (block != shape.null_block)
    return torch.where(owned, block * shape.block_size + index % shape.block_size, PADDING_SLOT)


def draft_inputs(step: TargetStep, shape: BlockShape, out: DraftBuffers) -> DraftBuffers:
    """As `naive.draft_inputs`, on steps without padding requests."""
    state = step.idx_mapping.long()
    kept = step.query_start_loc[1:].long() - step.num_rejected
    anchor = step.positions[kept - 1].long() + 1
    fits = anchor + shape.draft_tokens < shape.max_model_len
    _context(step, shape, out, kept)
    _block(step, shape, out, state, anchor, fits)
    _samples(shape, out, state, anchor, fits)
    request = torch.arange(len(state) + 1, device=anchor.device)
    out.query_start_loc.copy_(request * shape.rows)
    out.seq_lens.copy_((anchor + shape.rows).clamp(max=shape.max_model_len))
    out.draft_counts.copy_(fits * shape.draft_tokens)
    return out


def _context(step: TargetStep, shape: BlockShape, out: DraftBuffers, kept: Tensor) -> None:
    rows = step.positions.shape[0]
    row = torch.arange(rows, device=kept.device)
    request = torch.searchsorted(step.query_start_loc[1:].long(), row, right=True)
    request = request.clamp(max=len(kept) - 1)
    live = row < kept[request]
    source = step.positions if step.mrope_positions is None else step.mrope_positions
    out.context_positions.zero_()
    out.context_positions[..., :rows] = torch.where(live, source, 0)
    out.context_slots.fill_(PADDING_SLOT)
    slots = slots_of(step, shape, request, step.positions.long())
    out.context_slots[:rows] = torch.where(live, slots, PADDING_SLOT)


def _block(
    step: TargetStep, shape: BlockShape, out: DraftBuffers, state: Tensor, anchor: Tensor,
    fits: Tensor,
) -> None:  # fmt: skip
    request = torch.arange(len(state), device=anchor.device)
    index = anchor[:, None] + torch.arange(shape.rows, device=anchor.device)
    sampled = step.num_sampled > 0
    first = torch.where(sampled, step.last_sampled[state], step.next_prefill_tokens[state])
    tokens = torch.full_like(index, shape.mask_token)
    tokens[:, 0] = first
    out.input_ids[: index.numel()] = tokens.flatten().to(out.input_ids.dtype)
    delta = 0 if step.mrope_delta is None else step.mrope_delta[state][:, None]
    positions = index.clamp(max=shape.max_model_len - 1) + delta
    out.positions[..., : index.numel()] = positions.flatten()
    slots = slots_of(step, shape, request[:, None], index)
    out.slots[: index.numel()] = torch.where(fits[:, None], slots, PADDING_SLOT).flatten()


def _samples(
    shape: BlockShape, out: DraftBuffers, state: Tensor, anchor: Tensor, fits: Tensor
) -> None:
    draft = torch.arange(shape.draft_tokens, device=anchor.device)
    request = torch.arange(len(state), device=anchor.device)[:, None]
    skipped = shape.rows - shape.draft_tokens
    out.sample_rows.copy_((request * shape.rows + draft + skipped).flatten())
    out.sample_positions.copy_((anchor[:, None] + draft + 1).flatten())
    owner = torch.where(fits, state, -1)[:, None].expand(-1, shape.draft_tokens)
    out.sample_requests.copy_(owner.flatten())
