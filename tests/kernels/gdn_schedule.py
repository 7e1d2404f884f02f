"""Ragged schedules of many steps, run by the replay operator and by a float64 recurrence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kernels.gdn_verify import replay, replay_cursor, replay_naive
from kernels.gdn_verify.layout import ReplayCache, ReplayLayout, StepCursor

POISON = 777.0


@dataclass(frozen=True)
class Step:
    """rows, accepted: of each request; order: request of each batch entry, None for padding."""

    rows: tuple[int, ...]
    accepted: tuple[int, ...]
    order: tuple[int | None, ...]
    force_flush: tuple[bool, ...] = ()


@dataclass
class Setting:
    """Model and data of a run. slow: weak decays, so that old rows count; similar: how alike keys
    are (1: all equal), with gates near 1, which makes the small system ill-conditioned. kernel:
    takes the arguments of `replay.replay_verify` up to max_rows; None: that one, with `config`."""

    layout: ReplayLayout
    max_rows: int = 8
    seed: int = 0
    slow: bool = True
    similar: float = 0.0
    spare_slots: int = 2
    config: replay.ReplayConfig | None = None
    out_dtype: torch.dtype = torch.float32
    kernel: Callable[..., Tensor] | None = None


@dataclass
class Errors:
    """max |x - reference| / max |reference| over a run; native: the same for a recurrence in fp32
    whose state is rounded to its dtype once a step, as a kernel that stores it does."""

    out: float = 0.0
    native_out: float = 0.0
    state: float = 0.0
    native_state: float = 0.0
    flushes: int = 0
    outputs: list[Tensor] = field(default_factory=list)


def relative_error(x: Tensor, reference: Tensor) -> float:
    """max |x - reference| / max |reference|."""
    worst = (x.double() - reference.double()).abs().max()
    return float(worst / reference.double().abs().max().clamp(min=1e-30))


class Run:
    """One schedule's state: the cache under test and two recurrences beside it."""

    def __init__(self, setting: Setting, requests: int, device: torch.device) -> None:
        """Random states, rings full of NaN (a row that is not pending must never count)."""
        self.setting, self.device = setting, device
        self.random = torch.Generator().manual_seed(setting.seed)
        layout = setting.layout
        slots = 1 + requests + setting.spare_slots
        self.cache = layout.allocate(slots, device)
        self.cache.state.copy_(self.normal(*self.cache.state.shape) * 0.3)
        for name in ("keys", "updates", "log_decay", "key_norm"):
            getattr(self.cache, name).fill_(float("nan"))
        self.slots = (torch.randperm(slots - 1, generator=self.random) + 1)[:requests].tolist()
        self.cursor = replay_cursor.Cursor.allocate(
            slots, layout.ring_rows, setting.max_rows, device
        )
        self.cursor.start.copy_(torch.randint(0, layout.ring_rows, (slots,), generator=self.random))
        HV = layout.value_heads
        decay = torch.rand(HV, generator=self.random) * 15 + 1
        self.A_log = (decay.log() - (6.0 if setting.slow else 0.0)).to(device)
        self.dt_bias = (self.normal(HV) * 0.5 - 2.0).to(device)
        self.base_key = self.normal(1, layout.key_heads, layout.key_dim)
        self.guard = [s for s in range(slots) if s not in self.slots]
        self.guarded = [x[self.guard].clone() for x in self.cache.tensors()]
        self.exact = {s: self.cache.state[s].double() for s in self.slots}
        self.native = {s: self.cache.state[s].float() for s in self.slots}
        self.errors = Errors()

    def normal(self, *shape: int) -> Tensor:
        """Standard normal on the CPU, so that every device sees the same numbers."""
        return torch.randn(*shape, generator=self.random)

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """q, k, v, a, b; q, k and v are slices of one tensor, as after the convolution."""
        layout, similar = self.setting.layout, self.setting.similar
        HK, HV, DK, DV = layout.key_heads, layout.value_heads, layout.key_dim, layout.value_dim
        q, k = self.normal(tokens, HK, DK), self.normal(tokens, HK, DK)
        v = self.normal(tokens, HV, DV)
        k = (1 - similar) * k + similar * self.base_key
        packed = torch.cat([x.flatten(1) for x in (q, k, v)], 1).bfloat16().to(self.device)
        q, k, v = packed.split([HK * DK, HK * DK, HV * DV], 1)
        gates = (self.normal(tokens, 2 * HV) + 3 * similar).bfloat16().to(self.device)
        return (
            q.unflatten(1, (HK, DK)), k.unflatten(1, (HK, DK)), v.unflatten(1, (HV, DV)),
            gates[:, :HV], gates[:, HV:],
        )  # fmt: skip

    def step(self, step: Step) -> None:
        """Run one step and compare; padding entries get rows, which must be ignored."""
        rows = [1 if r is None else step.rows[r] for r in step.order]
        slots = [(-1, 0)[i % 2] if r is None else self.slots[r] for i, r in enumerate(step.order)]
        accepted = [0 if r is None else step.accepted[r] for r in step.order]
        integer = lambda x: torch.tensor(x, dtype=torch.int32, device=self.device)  # noqa: E731
        starts = torch.tensor([0, *rows]).cumsum(0)
        tokens = int(starts[-1]) + 2
        query_start_loc, slot_tensor = integer(starts.tolist()), integer(slots)
        q, k, v, a, b = self.inputs(tokens)
        cursor = StepCursor(*(integer([9] * len(rows)) for _ in range(3)))
        force = integer([0 if r is None else int(r in step.force_flush) for r in step.order])
        replay_cursor.stage(self.cursor, slot_tensor, query_start_loc, cursor, force)
        out = torch.full((tokens, *v.shape[1:]), POISON, device=self.device)
        out = out.to(self.setting.out_dtype)
        before = self.cache.state.clone()
        kernel = self.setting.kernel or partial(replay.replay_verify, config=self.setting.config)
        kernel(
            q, k, v, a, b, self.A_log, self.dt_bias, query_start_loc, slot_tensor, cursor,
            self.cache, out, self.setting.max_rows,
        )  # fmt: skip
        written = torch.zeros(tokens, dtype=torch.bool)
        got, exact, native = [], [], []
        for entry, request in enumerate(step.order):
            first, last = int(starts[entry]), int(starts[entry + 1])
            if request is None or first == last:
                continue
            written[first:last] = True
            slot = self.slots[request]
            arguments = [x[first:last] for x in (q, k, v, a, b)]
            kept = step.accepted[request] - 1
            wide = self.recurrence(self.exact, slot, arguments, torch.float64, kept)
            narrow = self.recurrence(self.native, slot, arguments, torch.float32, kept)
            got.append(out[first:last])
            exact.append(wide)
            native.append(narrow.to(out.dtype))
            flushed = bool(cursor.flush[entry]) and bool(cursor.pending[entry])
            self.errors.flushes += flushed
            assert flushed or torch.equal(before[slot], self.cache.state[slot])
        assert bool((out.cpu()[~written] == POISON).all()), "a row of no request was written"
        replay_cursor.advance(self.cursor, slot_tensor, query_start_loc, cursor, integer(accepted))
        self.errors.outputs.append(out)
        if got:
            reference = torch.cat(exact)
            self.errors.out = max(self.errors.out, relative_error(torch.cat(got), reference))
            self.errors.native_out = max(
                self.errors.native_out, relative_error(torch.cat(native), reference)
            )

    def recurrence(
        self, states: dict[int, Tensor], slot: int, rows: list[Tensor], work: torch.dtype, kept: int
    ) -> Tensor:
        """Outputs of one request; `states[slot]` moves to the state after row `kept`."""
        q, k, v, a, b = rows
        group = v.shape[1] // q.shape[1]
        log_decay, beta = replay_naive.gates(a, b, self.A_log, self.dt_bias, work)
        unit = lambda x: (  # noqa: E731
            x.to(work) * replay_naive.inverse_norm(x, work)[..., None]
        ).repeat_interleave(group, 1)
        queries, keys = unit(q) * q.shape[-1] ** -0.5, unit(k)
        state, outputs = states[slot], []
        for t in range(len(q)):
            state = state * log_decay[t].exp()[:, None, None]
            update = beta[t][:, None] * (v[t].to(work) - torch.einsum("hvk,hk->hv", state, keys[t]))
            state = state + update[:, :, None] * keys[t][:, None, :]
            outputs.append(torch.einsum("hvk,hk->hv", state, queries[t]))
            if t == kept:
                stored = state if work == torch.float64 else state.to(self.cache.state.dtype)
                states[slot] = stored.to(work)
        return torch.stack(outputs)

    def finish(self) -> Errors:
        """Fold all rings, compare states, and see that guard slots hold what they held."""
        slots = torch.tensor(self.slots, dtype=torch.int32, device=self.device)
        step = StepCursor(
            self.cursor.start[slots.long()], self.cursor.pending[slots.long()],
            torch.ones_like(slots),
        )  # fmt: skip
        replay.replay_flush(slots, step, self.cache, self.setting.config)
        for slot in self.slots:
            exact, native = self.exact[slot], self.native[slot]
            state = self.cache.state[slot]
            self.errors.state = max(self.errors.state, relative_error(state, exact))
            self.errors.native_state = max(self.errors.native_state, relative_error(native, exact))
        for tensor, guarded in zip(self.cache.tensors(), self.guarded, strict=True):
            same = torch.equal(
                torch.nan_to_num(tensor[self.guard], 5.0), torch.nan_to_num(guarded, 5.0)
            )
            assert same, "a slot of no request was written"
        return self.errors


def run(setting: Setting, requests: int, steps: list[Step], device: torch.device) -> Errors:
    """Run a whole schedule."""
    state = Run(setting, requests, device)
    for step in steps:
        state.step(step)
    return state.finish()


def cache_copy(cache: ReplayCache) -> ReplayCache:
    """Deep copy."""
    return ReplayCache(*(x.clone() for x in cache.tensors()))
