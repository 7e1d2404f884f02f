"""Inputs of a block drafter (DFlash, DSpark) for the whole batch, in one launch.

A block is an anchor (the newest known token) and masks after it: K rows a request where the first
draft token is read at the anchor (DSpark, arXiv 2607.05147), K + 1 where it is read at the first
mask (DFlash, arXiv 2602.06036). Contract of every implementation (`naive`, `triton`):

- The anchor's position is one past the last token that the target's step kept. A slot is
  block * block_size + offset through the request's own block table, page by page: it follows the
  token's index, never its rotary position.
- Padding slot, and no read of the block table, for: a page that is not allocated or is the null
  block, a column past the table, a rejected target row, a padding or dummy request.
- A request whose last draft token would lie at or past max_model_len drafts nothing: a block cut
  short is another block, for its rows see each other. All its rows get the padding slot, its sample
  requests are -1, its draft count is 0; the positions stay inside the rotary table.
- M-RoPE: context rows inherit the target's three positions, block rows have index + delta in all
  three; slots are as without it.
- Every entry of every output is written, so that a replayed graph finds nothing of an older step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PADDING_SLOT = -1
MAX_REQUESTS = 1024


@dataclass(frozen=True)
class BlockShape:
    """What does not change between steps.

    draft_tokens: K. rows: rows a request, K or K + 1. mask_token: id at the masks. block_size:
    tokens of a KV page. max_model_len: tokens a request may have. null_block: block id that owns
    no memory (vLLM's 0).
    """

    draft_tokens: int
    rows: int
    mask_token: int
    block_size: int
    max_model_len: int
    null_block: int = 0

    def __post_init__(self) -> None:
        if self.draft_tokens < 1 or self.rows - self.draft_tokens not in (0, 1):
            raise ValueError(
                f"rows must be draft_tokens (first draft read at the anchor) or one more, "
                f"got {self.rows} rows for {self.draft_tokens} draft tokens"
            )


@dataclass(frozen=True)
class TargetStep:
    """The target's step that has just been verified, R requests with padding included.

    query_start_loc: int32 [R + 1], rows of each request. positions: int [T], token index of each
    row. num_sampled, num_rejected: int32 [R]; a chunked prefill samples 0. idx_mapping: int32 [R],
    row of the request in the state arrays, -1 for a dummy. last_sampled, next_prefill_tokens: int
    [S], state arrays of the token that follows. block_table: int32 [R, columns]. allocated_blocks:
    int32 [R] columns that are the request's own, or None for all. mrope_positions: int [3, T] and
    mrope_delta: int [S], both or none. num_requests: host int, device scalar, or None for R.
    """

    query_start_loc: torch.Tensor
    positions: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    idx_mapping: torch.Tensor
    last_sampled: torch.Tensor
    next_prefill_tokens: torch.Tensor
    block_table: torch.Tensor
    allocated_blocks: torch.Tensor | None = None
    mrope_positions: torch.Tensor | None = None
    mrope_delta: torch.Tensor | None = None
    num_requests: int | torch.Tensor | None = None


@dataclass
class DraftBuffers:
    """Outputs, for R requests of Q rows; N >= R * Q and C may be a graph's upper bounds.

    input_ids: int [N]. positions: int [N], or [3, N] with M-RoPE. slots: int64 [N].
    query_start_loc: int32 [R + 1]. seq_lens: int32 [R], tokens the block attends to, itself
    included. draft_counts: int32 [R], K or 0. sample_rows, sample_positions, sample_requests: int
    [R * K], row of each draft token, its token index, its state row or -1. context_positions: int
    [C] or [3, C], context_slots: int64 [C]: where the target's hidden states of this step go.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    draft_counts: torch.Tensor
    sample_rows: torch.Tensor
    sample_positions: torch.Tensor
    sample_requests: torch.Tensor
    context_positions: torch.Tensor
    context_slots: torch.Tensor

    @classmethod
    def allocate(
        cls,
        requests: int,
        shape: BlockShape,
        context_rows: int,
        device: torch.device | str,
        *,
        max_rows: int | None = None,
        mrope: bool = False,
    ) -> DraftBuffers:
        """Zeroed buffers; max_rows: N, if it is more than requests * shape.rows."""
        rows = requests * shape.rows if max_rows is None else max_rows
        samples = requests * shape.draft_tokens
        axes = (3,) if mrope else ()

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        return cls(
            input_ids=zeros(rows),
            positions=zeros(*axes, rows, dtype=torch.int64),
            slots=zeros(rows, dtype=torch.int64),
            query_start_loc=zeros(requests + 1),
            seq_lens=zeros(requests),
            draft_counts=zeros(requests),
            sample_rows=zeros(samples, dtype=torch.int64),
            sample_positions=zeros(samples, dtype=torch.int64),
            sample_requests=zeros(samples),
            context_positions=zeros(*axes, context_rows, dtype=torch.int64),
            context_slots=zeros(context_rows, dtype=torch.int64),
        )


def check_shapes(step: TargetStep, shape: BlockShape, out: DraftBuffers) -> int:
    """R; ValueError names the argument that does not fit. Reads no device value."""
    requests = step.idx_mapping.shape[0]
    if requests > MAX_REQUESTS:
        raise ValueError(f"idx_mapping: at most {MAX_REQUESTS} requests, got {requests}")
    mrope = step.mrope_positions is not None
    if mrope != (step.mrope_delta is not None):
        raise ValueError("mrope_positions and mrope_delta come together")
    least = {
        "query_start_loc": requests + 1,
        "seq_lens": requests,
        "draft_counts": requests,
        "sample_rows": requests * shape.draft_tokens,
        "sample_positions": requests * shape.draft_tokens,
        "sample_requests": requests * shape.draft_tokens,
        "context_positions": out.context_slots.shape[0],
    }
    for name, size in least.items():
        if getattr(out, name).shape[-1] != size:
            raise ValueError(f"{name} must have {size} entries, has {getattr(out, name).shape[-1]}")
    if out.slots.shape[0] < requests * shape.rows:
        raise ValueError(f"slots: {out.slots.shape[0]} rows for {requests} x {shape.rows}")
    for name in ("positions", "context_positions"):
        if (getattr(out, name).dim() == 2) != mrope:
            raise ValueError(f"{name} must be [3, rows] with M-RoPE, [rows] without")
    for name in ("input_ids", "positions"):
        if getattr(out, name).shape[-1] != out.slots.shape[0]:
            raise ValueError(f"{name} must have as many rows as slots ({out.slots.shape[0]})")
    return requests
