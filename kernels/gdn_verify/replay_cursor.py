"""The replay cursor of each slot, on the device: what a row starts from, and when it is flushed.

One cursor serves all layers. A step is `stage` (before the first GDN layer), the layers, and
`advance` (after sampling); each is one launch with no host wait, so both fit into a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import grid
from .layout import NULL_SLOT, StepCursor

_BLOCK = 128


@dataclass
class Cursor:
    """start, pending: int32 [slots]; see `StepCursor`. ring_rows: W. max_rows: longest step.

    null_slot: this slot and those below it are padding. A cursor kept by request instead of by
    state slot has no null entry: -1.
    """

    start: Tensor
    pending: Tensor
    ring_rows: int
    max_rows: int
    null_slot: int = NULL_SLOT

    @classmethod
    def allocate(
        cls,
        slots: int,
        ring_rows: int,
        max_rows: int,
        device: torch.device | str,
        null_slot: int = NULL_SLOT,
    ) -> Cursor:
        """All slots without pending rows. ValueError if a step could overrun the ring."""
        if ring_rows < 2 * max_rows:
            raise ValueError(
                f"{max_rows} rows a step need a ring of {2 * max_rows}, got {ring_rows}"
            )
        start, pending = (torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(2))
        return cls(start, pending, ring_rows, max_rows, null_slot)

    def reset(self, slots: Tensor) -> None:
        """Slots (int tensor) whose state was just written by prefill, or folded by a flush."""
        self.start[slots] = 0
        self.pending[slots] = 0


@triton.jit
def stage_kernel(
    slots_ptr,
    query_start_loc_ptr,
    force_ptr,
    slot_start_ptr,
    slot_pending_ptr,
    start_ptr,
    pending_ptr,
    flush_ptr,
    num_requests,
    RING_ROWS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    HAS_FORCE: tl.constexpr,
    NULL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather each request's cursor; flush where the step after this one might not fit."""
    for block in range(tl.program_id(0), tl.cdiv(num_requests, BLOCK), tl.num_programs(0)):
        request = block * BLOCK + tl.arange(0, BLOCK)
        real = request < num_requests
        slot = tl.load(slots_ptr + request, mask=real, other=0)
        rows = tl.load(query_start_loc_ptr + request + 1, mask=real, other=0) - tl.load(
            query_start_loc_ptr + request, mask=real, other=0
        )
        active = real & (slot > NULL) & (rows > 0)
        start = tl.load(slot_start_ptr + slot, mask=active, other=0)
        pending = tl.load(slot_pending_ptr + slot, mask=active, other=0)
        flush = active & (pending + rows + MAX_ROWS > RING_ROWS)
        if HAS_FORCE:
            forced = tl.load(force_ptr + request, mask=active, other=0)
            flush = flush | (active & (forced != 0))
        tl.store(start_ptr + request, start, mask=real)
        tl.store(pending_ptr + request, pending, mask=real)
        tl.store(flush_ptr + request, flush.to(tl.int32), mask=real)


@triton.jit
def advance_kernel(
    slots_ptr,
    query_start_loc_ptr,
    accepted_ptr,
    start_ptr,
    pending_ptr,
    flush_ptr,
    slot_start_ptr,
    slot_pending_ptr,
    verifies_ptr,
    num_requests,
    RING_ROWS: tl.constexpr,
    HAS_VERIFIES: tl.constexpr,
    NULL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Accepted rows become pending; flushed ones leave the ring."""
    for block in range(tl.program_id(0), tl.cdiv(num_requests, BLOCK), tl.num_programs(0)):
        request = block * BLOCK + tl.arange(0, BLOCK)
        real = request < num_requests
        slot = tl.load(slots_ptr + request, mask=real, other=0)
        rows = tl.load(query_start_loc_ptr + request + 1, mask=real, other=0) - tl.load(
            query_start_loc_ptr + request, mask=real, other=0
        )
        active = real & (slot > NULL) & (rows > 0)
        if HAS_VERIFIES:
            active = active & (tl.load(verifies_ptr + request, mask=real, other=0) != 0)
        accepted = tl.load(accepted_ptr + request, mask=active, other=0)
        accepted = tl.minimum(tl.maximum(accepted, 0), rows)
        start = tl.load(start_ptr + request, mask=active, other=0)
        pending = tl.load(pending_ptr + request, mask=active, other=0)
        flushed = tl.load(flush_ptr + request, mask=active, other=0) != 0
        start = tl.where(flushed, (start + pending) % RING_ROWS, start)
        pending = tl.where(flushed, 0, pending) + accepted
        tl.store(slot_start_ptr + slot, start, mask=active)
        tl.store(slot_pending_ptr + slot, pending, mask=active)


def stage(
    cursor: Cursor,
    slots: Tensor,
    query_start_loc: Tensor,
    step: StepCursor,
    force_flush: Tensor | None = None,
) -> StepCursor:
    """Fill `step` for R requests; a flush is due where pending + rows + max_rows > W.

    force_flush: int32 [R], nonzero where the real state is needed after this step's read, such as
    at a prefix-cache block boundary.
    """
    requests = slots.shape[0]
    if requests:
        stage_kernel[grid(triton.cdiv(requests, _BLOCK), slots.device)](
            slots, query_start_loc, slots if force_flush is None else force_flush,
            cursor.start, cursor.pending, step.start, step.pending, step.flush, requests,
            RING_ROWS=cursor.ring_rows, MAX_ROWS=cursor.max_rows,
            HAS_FORCE=force_flush is not None, NULL=cursor.null_slot, BLOCK=_BLOCK,
        )  # fmt: skip
    return step


def advance(
    cursor: Cursor,
    slots: Tensor,
    query_start_loc: Tensor,
    step: StepCursor,
    accepted: Tensor,
    verifies: Tensor | None = None,
) -> None:
    """Move the cursors of R requests past a step.

    accepted: int32 [R], rows of this step that were accepted (tokens emitted, bonus included); 0
    discards the step. verifies: bool or int [R], zero for requests whose rows are a prompt chunk;
    None where all verify. Those, requests with no rows and the null slot keep their cursor.
    """
    requests = slots.shape[0]
    if requests:
        advance_kernel[grid(triton.cdiv(requests, _BLOCK), slots.device)](
            slots, query_start_loc, accepted, step.start, step.pending, step.flush,
            cursor.start, cursor.pending, slots if verifies is None else verifies, requests,
            RING_ROWS=cursor.ring_rows, HAS_VERIFIES=verifies is not None, NULL=cursor.null_slot,
            BLOCK=_BLOCK,
        )  # fmt: skip
