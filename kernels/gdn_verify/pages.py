"""States that change pages, for prefix caching in the replay layout. Oracle: `pages_naive.py`.

With prefix caching a request's running page is the one of the block that its last token falls
into, and a full block's page must hold the state exactly at the block's end. Both are one
operation: fold some of a page's pending rows into the state of a page, its own or another.

- *Move*, before a step: the running block changes. All pending rows are folded on the way, so the
  ring stays behind: it would be a third more bytes, and its cursor says nothing of the new page.
- *Settle*, after sampling: the accepted tokens reached a block's end. The rows up to there are
  folded into that block's page. Where it is the running page itself, no row is left pending.

A plan (one launch) decides for every request and takes the cursor along; `fold_pages` (one launch)
carries it out for all layers. Nothing waits for the host, and without a change of block the second
launch reads one number. CUDA only; the CPU engine runs the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import device_cores, grid
from .layout import ReplayCache, ReplayLayout
from .replay_cursor import Cursor
from .triton_replay import fold_tile, suffix_sums

_BLOCK = 128
_PROGRAMS_PER_CORE = 8  # enough to fill a device with one request's pages, few enough to idle
_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@dataclass
class FoldPlan:
    """Which pages change, at most R of them; all on the device.

    total: int32 [1], entries in use. entries: int32 [5, R], a line for each of request (a row of
    the block tables), source and target (columns of it), start (ring index of the first pending
    row) and count (rows to fold).
    """

    total: Tensor
    entries: Tensor

    @classmethod
    def allocate(cls, requests: int, device: torch.device | str) -> FoldPlan:
        """An empty plan for up to `requests` entries."""
        return cls(
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(5, requests, dtype=torch.int32, device=device),
        )

    def arguments(self) -> tuple[Tensor, Tensor, int]:
        """As the kernels take it: both tensors, and the length of a line."""
        return self.total, self.entries, self.entries.shape[1]


class PagePool:
    """The pages of all layers of one rank, and the block tables that lead to them.

    caches: of each layer, views of pages that begin at any address and lie at one stride; groups:
    for each layer the index of its block table; tables: int32 [requests, columns], of one shape.

    Raises:
        ValueError: the layers' pages differ in layout or stride.
    """

    def __init__(
        self, caches: Sequence[ReplayCache], groups: Sequence[int], tables: Sequence[Tensor]
    ) -> None:
        self.caches, self.groups, self.tables = list(caches), list(groups), list(tables)
        self.layout: ReplayLayout = caches[0].check()
        self.page_stride = _page_stride(caches[0])
        self.offsets = _offsets(caches[0])
        for cache in caches:
            found = cache.check(), _page_stride(cache), _offsets(cache)
            if found != (self.layout, self.page_stride, self.offsets):
                raise ValueError("pages of all layers must have one layout and one stride")
        if len({table.stride() for table in tables}) != 1:
            raise ValueError("block tables must have one stride")
        states = [cache.state.data_ptr() for cache in caches]
        where = torch.device(caches[0].state.device)
        self.states = _addresses(states, where)
        self.layer_groups = torch.tensor(self.groups, dtype=torch.int32, device=where)
        self.table_addresses = _addresses([table.data_ptr() for table in tables], where)
        self.alignment = _alignment([*states, self.page_stride, *self.offsets])


def _page_stride(cache: ReplayCache) -> int:
    return int(cache.state.stride(0)) * cache.state.itemsize


def _offsets(cache: ReplayCache) -> tuple[int, ...]:
    return tuple(x.data_ptr() - cache.state.data_ptr() for x in cache.tensors()[1:])


def _addresses(values: list[int], device: torch.device) -> Tensor:
    signed = [value - (1 << 64) if value >> 63 else value for value in values]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def _alignment(values: list[int]) -> int:
    """Bytes, up to 16, that divide all values: what a load of several elements may rely on."""
    return next(size for size in (16, 8, 4, 2, 1) if not any(value % size for value in values))


@triton.jit
def append_to_plan(
    entries_ptr, capacity, used, active, request, source, target, start, count
):  # fmt: skip
    """Write the active entries behind the `used` ones; returns how many there are then."""
    # ascend: never launched there, see the module's text
    place = entries_ptr + used + tl.cumsum(active.to(tl.int32), 0) - 1
    tl.store(place, request, mask=active)
    tl.store(place + capacity, source, mask=active)
    tl.store(place + 2 * capacity, target, mask=active)
    tl.store(place + 3 * capacity, start, mask=active)
    tl.store(place + 4 * capacity, count, mask=active)
    return used + tl.sum(active.to(tl.int32), axis=0)


@triton.jit
def plan_moves_kernel(
    requests_ptr,
    previous_ptr,
    running_ptr,
    cursor_start_ptr,
    cursor_pending_ptr,
    total_ptr,
    entries_ptr,
    capacity,
    num_requests,
    BLOCK: tl.constexpr,
):
    """One program: requests whose running column changes; their cursors are emptied."""
    used = 0
    for block in range(0, tl.cdiv(num_requests, BLOCK)):
        entry = block * BLOCK + tl.arange(0, BLOCK)
        request = tl.load(requests_ptr + entry, mask=entry < num_requests, other=-1)
        known = request >= 0
        source = tl.load(previous_ptr + request, mask=known, other=-1)
        target = tl.load(running_ptr + request, mask=known, other=-1)
        active = known & (source >= 0) & (target >= 0) & (source != target)
        start = tl.load(cursor_start_ptr + request, mask=active, other=0)
        count = tl.load(cursor_pending_ptr + request, mask=active, other=0)
        tl.store(cursor_pending_ptr + request, tl.zeros_like(count), mask=active)
        used = append_to_plan(
            entries_ptr, capacity, used, active, request, source, target, start, count
        )  # fmt: skip
    tl.store(total_ptr, used)


@triton.jit
def plan_settles_kernel(
    requests_ptr,
    accepted_ptr,
    computed_ptr,
    running_ptr,
    cursor_start_ptr,
    cursor_pending_ptr,
    total_ptr,
    entries_ptr,
    capacity,
    num_requests,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: requests whose accepted tokens reached the end of a block."""
    used = 0
    for block in range(0, tl.cdiv(num_requests, BLOCK)):
        entry = block * BLOCK + tl.arange(0, BLOCK)
        real = entry < num_requests
        request = tl.load(requests_ptr + entry, mask=real, other=-1)
        known = request >= 0
        accepted = tl.maximum(tl.load(accepted_ptr + entry, mask=known, other=1), 1)
        computed = tl.load(computed_ptr + request, mask=known, other=0)
        source = tl.load(running_ptr + request, mask=known, other=-1)
        boundary = computed // BLOCK_TOKENS * BLOCK_TOKENS
        target = boundary // BLOCK_TOKENS - 1
        reached = known & (source >= 0) & (boundary > 0) & (boundary > computed - accepted)
        start = tl.load(cursor_start_ptr + request, mask=reached, other=0)
        pending = tl.load(cursor_pending_ptr + request, mask=reached, other=0)
        count = tl.maximum(pending - (computed - boundary), 0)
        in_place = source == target
        tl.store(cursor_pending_ptr + request, tl.zeros_like(count), mask=reached & in_place)
        used = append_to_plan(
            entries_ptr, capacity, used, reached & ((count > 0) | (source != target)), request,
            source, target, start, count,
        )  # fmt: skip
    tl.store(total_ptr, used)


@triton.jit
def fold_pages_kernel(
    total_ptr,
    entries_ptr,
    capacity,
    states_ptr,
    groups_ptr,
    tables_ptr,
    table_stride,
    page_stride,
    LAYERS: tl.constexpr,
    KEYS_AT: tl.constexpr,
    UPDATES_AT: tl.constexpr,
    DECAY_AT: tl.constexpr,
    NORM_AT: tl.constexpr,
    STATE: tl.constexpr,
    UPDATE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HV: tl.constexpr,
    HK: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    W: tl.constexpr,
    W2: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """Grid: any size; programs stride over (plan entry, layer, value head)."""
    total = tl.load(total_ptr)
    for work in range(tl.program_id(0), total * (LAYERS * HV), tl.num_programs(0)):
        entry = entries_ptr + work // (LAYERS * HV)
        layer = (work // HV) % LAYERS
        head = work % HV
        group = tl.load(groups_ptr + layer)
        table = tl.load(tables_ptr + group).to(tl.pointer_type(tl.int32))
        table += tl.load(entry).to(tl.int64) * table_stride
        source = tl.load(table + tl.load(entry + capacity)).to(tl.int64)
        target = tl.load(table + tl.load(entry + 2 * capacity)).to(tl.int64)
        if (source > 0) & (target > 0):
            states = tl.load(states_ptr + layer)
            page = states + source * page_stride
            count = tl.load(entry + 4 * capacity)
            ring = tl.arange(0, W2)
            place = (tl.load(entry + 3 * capacity) + ring) % W
            decay = (page + DECAY_AT).to(tl.pointer_type(tl.float32)) + head * W
            norm = (page + NORM_AT).to(tl.pointer_type(tl.float32)) + (head // (HV // HK)) * W
            log_decay = tl.load(decay + place, mask=ring < count, other=0.0)
            weight = tl.load(norm + place, mask=ring < count, other=0.0)
            weight *= tl.exp(tl.sum(suffix_sums(log_decay[None, :], W2), axis=0))
            # What a loaded address is a multiple of is known here alone: a hint on a function's
            # argument gets lost when the function is inlined.
            before = tl.multiple_of(page.to(tl.pointer_type(STATE)), ALIGNMENT)
            after = (states + target * page_stride).to(tl.pointer_type(STATE))
            after = tl.multiple_of(after, ALIGNMENT)
            keys = tl.multiple_of((page + KEYS_AT).to(tl.pointer_type(tl.bfloat16)), ALIGNMENT)
            updates = tl.multiple_of((page + UPDATES_AT).to(tl.pointer_type(UPDATE)), ALIGNMENT)
            fold_head(
                before + head * (DV * DK), after + head * (DV * DK),
                keys + (head // (HV // HK)) * (W * DK), updates + head * (W * DV), place,
                ring < count, weight, tl.exp(tl.sum(log_decay, axis=0)), DK, DV, BV, BK,
            )  # fmt: skip


@triton.jit
def fold_head(
    source,
    target,
    keys,
    updates,
    place,
    folded,
    weight,
    decay,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """Write to `target` the state at `source` after the rows `folded`; the two may be one."""
    for tile in range(0, (DV // BV) * (DK // BK)):
        value = (tile // (DK // BK)) * BV + tl.arange(0, BV)
        channel = (tile % (DK // BK)) * BK + tl.arange(0, BK)
        at = value[:, None] * DK + channel[None, :]
        state = tl.load(source + at)
        key = tl.load(keys + place[:, None] * DK + channel[None, :], folded[:, None], 0.0)
        update = tl.load(updates + place[:, None] * DV + value[None, :], folded[:, None], 0.0)
        parts: tl.constexpr = 3 if source.dtype.element_ty == tl.float32 else 2
        after = fold_tile(state, update, key, weight, decay, parts)
        tl.store(target + at, after.to(target.dtype.element_ty))


def plan_moves(
    cursor: Cursor, requests: Tensor, previous: Tensor, running: Tensor, plan: FoldPlan
) -> None:
    """Plan the requests whose running column changes; empties their cursors.

    requests: int32 [R], slot of each batch entry, -1 for none. previous, running: int32 [slots],
    column of the last step (-1: none yet) and of the step that comes.
    """
    plan_moves_kernel[(1,)](
        requests, previous, running, cursor.start, cursor.pending, *plan.arguments(),
        requests.shape[0], BLOCK=_BLOCK,
    )  # fmt: skip


def plan_settles(
    cursor: Cursor,
    requests: Tensor,
    accepted: Tensor,
    computed: Tensor,
    running: Tensor,
    block_tokens: int,
    plan: FoldPlan,
) -> None:
    """Plan the requests whose accepted tokens reached the end of a block in this step.

    To be called after `replay_cursor.advance`. requests, accepted: int32 [R]; accepted counts the
    tokens emitted, 0 for a prompt chunk that samples none. computed: int32 [slots], tokens that
    the state holds by now. running: int32 [slots], column of the step's page. Where the block's
    page is the running one, the cursor is emptied.
    """
    plan_settles_kernel[(1,)](
        requests, accepted, computed, running, cursor.start, cursor.pending, *plan.arguments(),
        requests.shape[0], BLOCK_TOKENS=block_tokens, BLOCK=_BLOCK,
    )  # fmt: skip


def fold_pages(plan: FoldPlan, pool: PagePool, tile: int = 64) -> None:
    """Carry a plan out in every layer; rings and every page that is no target stay as they are.

    Entries that name the null block are left out. tile: rows and columns of a state at a time.
    """
    layout, device = pool.layout, pool.states.device
    work = plan.entries.shape[1] * len(pool.caches) * layout.value_heads
    programs = min(work, _PROGRAMS_PER_CORE * device_cores(device))
    keys, updates, decay, norm = pool.offsets
    fold_pages_kernel[grid(programs, device)](
        *plan.arguments(), pool.states, pool.layer_groups, pool.table_addresses,
        pool.tables[0].stride(0), pool.page_stride, LAYERS=len(pool.caches), KEYS_AT=keys,
        UPDATES_AT=updates, DECAY_AT=decay, NORM_AT=norm, STATE=_TYPES[layout.state_dtype],
        UPDATE=_TYPES[layout.update_dtype], ALIGNMENT=pool.alignment, HV=layout.value_heads,
        HK=layout.key_heads, DK=layout.key_dim, DV=layout.value_dim, W=layout.ring_rows,
        W2=max(16, triton.next_power_of_2(layout.ring_rows)), BV=min(tile, layout.value_dim),
        BK=min(tile, layout.key_dim),
    )  # fmt: skip
