"""Which draft rows are verified this step: the best n of the whole batch, packed into row offsets.

Contract of every implementation (`naive`, `triton`, `cuda`):

- A draft row's rank is its survival, the chance that it and all rows before it are accepted. It
  falls along a request, so each request keeps a prefix of its draft.
- Survival is an integer in units of 2**-16: confidences are rounded to it (halves to even, at most
  2**16 - 1; NaN and what lies outside [0, 1] is 0), products truncate. Survival given as input is
  rounded the same way and made non-increasing. Equal survivals go by (position, request index). So
  no order of float operations decides anything: every rank of a parallel group that holds the same
  scores takes the same decision, which is also that of `vllm_ascend_spec.budget.survival.split`.
- The host fixes the total: min(budget, eligible rows) draft rows, zeros included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

GRID_BITS = 16
MAX_REQUESTS = 1024
MAX_POSITIONS = 16

ScoreKind = Literal["confidence", "survival"]


@dataclass
class PackedRows:
    """Row layout of a verification step; buffers may be longer than the batch, for graph capture.

    draft_lengths: int32 [>= R], draft rows that each request verifies.
    query_start_loc: int32 [>= R + 1], first row of each request; the tail repeats the total.
    cu_num_logits: int32 [>= R + 1], first logits row of each request; the tail repeats the total.
    """

    draft_lengths: torch.Tensor
    query_start_loc: torch.Tensor
    cu_num_logits: torch.Tensor

    @classmethod
    def allocate(cls, max_requests: int, device: torch.device | str) -> PackedRows:
        """Buffers for up to `max_requests` requests, all zero."""
        sizes = (max_requests, max_requests + 1, max_requests + 1)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


@dataclass(frozen=True)
class Batch:
    """What the scheduler asks of each request, R requests with padding included.

    base_rows: int32 [R], rows without a draft: 1 for decoding, the chunk's length for a prefill
    chunk, 0 for a padding request. draft_counts: int32 [R], draft tokens proposed (0: none, or the
    request opted out). caps: int32 [R], a limit per request, or None. score_rows: int32 [R], row of
    `scores` that belongs to the request, or None for row r. num_requests: requests that count, the
    others are padding; a host int, a device scalar, or None for all R.
    """

    base_rows: torch.Tensor
    draft_counts: torch.Tensor
    caps: torch.Tensor | None = None
    score_rows: torch.Tensor | None = None
    num_requests: int | torch.Tensor | None = None


def check_shapes(scores: torch.Tensor, batch: Batch, out: PackedRows) -> tuple[int, int]:
    """(R, K) of a call; ValueError names the argument that does not fit. Reads no device value."""
    if scores.dim() != 2 or not scores.is_floating_point():
        raise ValueError(f"scores must be floating [rows, K], got {tuple(scores.shape)}")
    requests, positions = batch.base_rows.shape[0], scores.shape[1]
    if not (requests <= MAX_REQUESTS and 1 <= positions <= MAX_POSITIONS):
        raise ValueError(
            f"scores: {requests} requests x {positions} positions, "
            f"at most {MAX_REQUESTS} x {MAX_POSITIONS} are packed in one launch"
        )
    for name in ("draft_counts", "caps", "score_rows"):
        value = getattr(batch, name)
        if value is not None and value.shape != (requests,):
            raise ValueError(
                f"{name} must be [{requests}] like base_rows, got {tuple(value.shape)}"
            )
    if batch.score_rows is None and scores.shape[0] < requests:
        raise ValueError(f"scores has {scores.shape[0]} rows for {requests} requests")
    for name, least in (("draft_lengths", 0), ("query_start_loc", 1), ("cu_num_logits", 1)):
        buffer = getattr(out, name)
        if buffer.shape[0] < requests + least or buffer.dtype != torch.int32:
            raise ValueError(f"{name} must be int32 with at least {requests + least} entries")
    return requests, positions
