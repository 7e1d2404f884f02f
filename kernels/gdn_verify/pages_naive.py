"""Oracle of `pages.py`: the same plans and folds, request by request, in the dtype of `work`."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import NULL_SLOT
from .pages import FoldPlan, PagePool
from .replay_cursor import Cursor
from .replay_naive import replayed


def plan_moves(
    cursor: Cursor, requests: Tensor, previous: Tensor, running: Tensor, plan: FoldPlan
) -> None:
    """As `pages.plan_moves`."""
    entries: list[tuple[int, ...]] = []
    for request in requests.tolist():
        source, target = (int(x[request]) if request >= 0 else -1 for x in (previous, running))
        if 0 <= source != target >= 0:
            entries.append((request, source, target, *_taken(cursor, request)))
            cursor.pending[request] = 0
    _write(plan, entries)


def plan_settles(
    cursor: Cursor,
    requests: Tensor,
    accepted: Tensor,
    computed: Tensor,
    running: Tensor,
    block_tokens: int,
    plan: FoldPlan,
) -> None:
    """As `pages.plan_settles`."""
    entries: list[tuple[int, ...]] = []
    for request, emitted in zip(requests.tolist(), accepted.tolist(), strict=True):
        tokens = int(computed[request]) if request >= 0 else 0
        boundary = tokens // block_tokens * block_tokens
        if not boundary or boundary <= tokens - max(emitted, 1) or int(running[request]) < 0:
            continue
        start, pending = _taken(cursor, request)
        source, target = int(running[request]), boundary // block_tokens - 1
        count = max(pending - (tokens - boundary), 0)
        if source == target:
            cursor.pending[request] = 0
        if count or source != target:
            entries.append((request, source, target, start, count))
    _write(plan, entries)


def fold_pages(plan: FoldPlan, pool: PagePool, work: torch.dtype = torch.float64) -> None:
    """As `pages.fold_pages`."""
    for request, source, target, start, count in plan.entries.T[: int(plan.total)].tolist():
        for cache, group in zip(pool.caches, pool.groups, strict=True):
            page, to = (int(pool.tables[group][request, column]) for column in (source, target))
            if page > NULL_SLOT and to > NULL_SLOT:
                state = replayed(cache.state[page].to(work), cache, page, start, count, work)
                cache.state[to] = state.to(cache.state.dtype)


def _taken(cursor: Cursor, request: int) -> tuple[int, int]:
    return int(cursor.start[request]), int(cursor.pending[request])


def _write(plan: FoldPlan, entries: list[tuple[int, ...]]) -> None:
    plan.total.fill_(len(entries))
    if entries:
        plan.entries[:, : len(entries)] = torch.tensor(entries, dtype=torch.int32).T
