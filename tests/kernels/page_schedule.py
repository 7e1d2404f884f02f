"""Requests that decode from block to block on pages of several layers, beside exact states."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from kernels.gdn_verify import replay_cursor, replay_naive
from kernels.gdn_verify.layout import ReplayCache, ReplayLayout, StepCursor
from kernels.gdn_verify.pages import FoldPlan, PagePool

BLOCK_TOKENS = 8
MAX_ROWS = 4
CONV_BYTES, PADDING_BYTES = 96, 32  # before and behind what the layout describes


def paged_cache(
    layout: ReplayLayout, slots: int, device: torch.device
) -> tuple[Tensor, ReplayCache]:
    """(int8 [slots, bytes] of noise, views as the engine binds them: parts packed in each page)."""
    sizes = layout.slot_bytes()
    page = CONV_BYTES + sum(sizes.values()) + PADDING_BYTES
    raw = torch.randint(-128, 127, (slots, page), dtype=torch.int8, device=device)
    views, at = {}, CONV_BYTES
    for name, (shape, dtype) in layout.shapes().items():
        views[name] = raw[:, at : at + sizes[name]].view(dtype).view(-1, *shape)
        at += sizes[name]
    return raw, ReplayCache(**views)


@dataclass
class Seen:
    """What a schedule held, and the worst error against float64: max |x - r| / max |r|.

    Ends of blocks that were reached in the running page (in_place) or left behind it; within: by a
    step that was accepted further.
    """

    error: float = 0.0
    in_place: int = 0
    behind: int = 0
    within: int = 0


class Decode:
    """Three requests, layers in two groups. `kernels`: the module of plans and folds under test."""

    def __init__(
        self,
        layout: ReplayLayout,
        kernels: ModuleType,
        device: torch.device,
        groups: tuple[int, ...] = (0, 1, 0),
        computed: tuple[int, ...] = (3, 8, 15),
        seed: int = 0,
    ) -> None:
        """Requests with an exact state after their prompt, rings full of noise."""
        torch.manual_seed(seed)
        self.layout, self.kernels, self.device, self.groups = layout, kernels, device, groups
        self.requests, columns = len(computed), 12
        pages = 2 + self.requests * columns  # the null block, and one that nobody owns
        made = [paged_cache(layout, pages, device) for _ in groups]
        self.raw, self.caches = [raw for raw, _ in made], [cache for _, cache in made]
        for cache in self.caches:
            cache.state.copy_(torch.randn(cache.state.shape) * 0.3)
        self.tables = [
            (torch.randperm(pages - 2)[: self.requests * columns] + 1)
            .view(self.requests, columns).int().to(device)
            for _ in range(max(groups) + 1)
        ]  # fmt: skip
        self.pool = PagePool(self.caches, groups, self.tables)
        self.plan = FoldPlan.allocate(self.requests + 2, device)
        self.cursor = replay_cursor.Cursor.allocate(
            self.requests, layout.ring_rows, MAX_ROWS, device, null_slot=-1
        )
        self.computed = torch.tensor(computed, dtype=torch.int32, device=device)
        self.running = (self.computed - 1) // BLOCK_TOKENS
        heads = layout.value_heads
        self.gates = [torch.rand(heads).to(device) - 4.0, torch.randn(heads).to(device)]
        self.history = {
            (layer, request): {
                tokens: self.page(layer, request, (tokens - 1) // BLOCK_TOKENS).double()
            }
            for layer in range(len(groups))
            for request, tokens in enumerate(computed)
        }
        self.seen = Seen()

    def page(self, layer: int, request: int, column: int) -> Tensor:
        """The state that a block's page holds."""
        slot = int(self.tables[self.groups[layer]][request, column])
        return self.caches[layer].state[slot]

    def step(self, order: list[int], rows: list[int], accepted: list[int]) -> None:
        """One step of the requests in `order`; -1 is padding. accepted: of each entry with rows."""
        integer = lambda x: torch.tensor(x, dtype=torch.int32, device=self.device)  # noqa: E731
        batch, before = integer(order), self.computed.tolist()
        previous = self.running.clone()
        for request, count in zip(order, rows, strict=True):
            if request >= 0 and count:
                self.running[request] = (before[request] + count - 1) // BLOCK_TOKENS
        self.kernels.plan_moves(self.cursor, batch, previous, self.running, self.plan)
        assert int(self.plan.total) == int((previous != self.running).sum())
        self.kernels.fold_pages(self.plan, self.pool)
        starts = integer([0, *torch.tensor(rows).cumsum(0).tolist()])
        cursor = replay_cursor.stage(
            self.cursor, batch, starts, StepCursor(*(integer([0] * len(order)) for _ in range(3)))
        )
        for layer in range(len(self.groups)):
            self._verify(layer, order, starts, cursor, accepted)
        emitted = integer(accepted)
        replay_cursor.advance(self.cursor, batch, starts, cursor, emitted)
        for request, count in zip(order, accepted, strict=True):
            if request >= 0:
                self.computed[request] += count
        self.kernels.plan_settles(
            self.cursor, batch, emitted, self.computed, self.running, BLOCK_TOKENS, self.plan
        )
        self.kernels.fold_pages(self.plan, self.pool)
        for request in order:
            if request >= 0:
                self._compare(request, before[request])

    def _verify(
        self, layer: int, order: list[int], starts: Tensor, cursor: StepCursor, accepted: list[int]
    ) -> None:
        layout, tokens = self.layout, int(starts[-1])
        shapes = [(layout.key_heads, layout.key_dim)] * 2 + [(layout.value_heads, layout.value_dim)]
        q, k, v = (torch.randn(tokens, *s).bfloat16().to(self.device) for s in shapes)
        a, b = (torch.randn(tokens, layout.value_heads).to(self.device) for _ in range(2))
        table = self.tables[self.groups[layer]]
        slots = torch.stack(
            [table[r, self.running[r]] if r >= 0 else table[0, 0] * 0 for r in order]
        )
        replay_naive.replay_verify(
            q, k, v, a, b, *self.gates, starts, slots, cursor, self.caches[layer]
        )
        self._remember(layer, order, starts.tolist(), accepted, (k, v, a, b))

    def _remember(
        self,
        layer: int,
        order: list[int],
        starts: list[int],
        accepted: list[int],
        rows: tuple[Tensor, ...],
    ) -> None:
        """The exact state after every accepted token."""
        k, v, a, b = rows
        log_decay, beta = replay_naive.gates(a, b, *self.gates, torch.float64)
        group = v.shape[1] // k.shape[1]
        unit = k.double() * replay_naive.inverse_norm(k, torch.float64)[..., None]
        keys = unit.repeat_interleave(group, 1)
        for entry, request in enumerate(order):
            if request < 0:
                continue
            states, tokens = self.history[layer, request], int(self.computed[request])
            for row in range(starts[entry], starts[entry] + accepted[entry]):
                state = states[tokens] * log_decay[row].exp()[:, None, None]
                read = torch.einsum("hvk,hk->hv", state, keys[row])
                update = beta[row][:, None] * (v[row].double() - read)
                tokens += 1
                states[tokens] = state + update[:, :, None] * keys[row][:, None, :]

    def _compare(self, request: int, before: int) -> None:
        """A full block holds its state; the running page and its pending rows give the last one."""
        after, column = int(self.computed[request]), int(self.running[request])
        boundary = after // BLOCK_TOKENS * BLOCK_TOKENS
        start, pending = int(self.cursor.start[request]), int(self.cursor.pending[request])
        if boundary > before:
            self.seen.in_place += column == boundary // BLOCK_TOKENS - 1
            self.seen.behind += column > boundary // BLOCK_TOKENS - 1
            self.seen.within += after > boundary
            assert pending == 0 or column > boundary // BLOCK_TOKENS - 1
        for layer, cache in enumerate(self.caches):
            states = self.history[layer, request]
            if boundary > before:
                self._note(
                    self.page(layer, request, boundary // BLOCK_TOKENS - 1), states[boundary]
                )
            slot = int(self.tables[self.groups[layer]][request, column])
            committed = cache.state[slot].double()
            now = replay_naive.replayed(committed, cache, slot, start, pending, torch.float64)
            self._note(now, states[after])

    def _note(self, state: Tensor, exact: Tensor) -> None:
        error = float((state.double() - exact).abs().max() / exact.abs().max())
        assert error == error, "not a number"
        self.seen.error = max(self.seen.error, error)
