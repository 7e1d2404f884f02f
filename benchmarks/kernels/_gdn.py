"""Problems of the gdn_verify benchmark: tensors of several input sets, bytes, and verification."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from vllm_ascend_spec.kernels.gdn_verify import replay, replay_naive
from vllm_ascend_spec.kernels.gdn_verify import triton as native
from vllm_ascend_spec.kernels.gdn_verify.layout import ReplayCache, ReplayLayout, StepCursor

HK, HV, DIM, RING = 16, 32, 128, 32
MAX_ROWS = 8
Kernel = Callable[..., Tensor]  # replay.replay_verify, or another with its first 13 arguments
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def integers(values: list[int] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).cuda()


@dataclass(frozen=True)
class Shape:
    """rows: of each request, or None for 0..8 drawn uniformly; pending: rows of the ring before
    the step; flush: every eighth request folds them."""

    state: torch.dtype
    requests: int
    rows: int | None
    pending: int = 4
    flush: bool = False

    @property
    def name(self) -> str:
        state = "bf16" if self.state == torch.bfloat16 else "fp32"
        rows = "0..8" if self.rows is None else str(self.rows)
        return f"{state} B{self.requests} T{rows} P{self.pending}" + (
            " flush 1/8" if self.flush else ""
        )

    def lengths(self, seed: int = 0) -> Tensor:
        if self.rows is not None:
            return torch.full((self.requests,), self.rows)
        random = torch.Generator().manual_seed(seed)
        return torch.randint(0, MAX_ROWS + 1, (self.requests,), generator=random)

    def bytes(self) -> int:
        """Fewest bytes that a replay step moves: requests without rows cost nothing."""
        layout = ReplayLayout(HK, HV, DIM, DIM, RING, self.state)
        lengths = self.lengths()
        active, tokens = int((lengths > 0).sum()), int(lengths.sum())
        state, row = layout.slot_bytes()["state"], layout.row_bytes()
        folded = -(-active // 8) if self.flush and self.pending else 0
        inputs = 2 * (2 * HK * DIM + 2 * HV * DIM + 2 * HV)
        return (active + folded) * state + active * self.pending * row + tokens * (row + inputs)


class Rows:
    """Inputs of one set's rows: q, k, v, a, b, and the head parameters."""

    def __init__(self, tokens: int, seed: int) -> None:
        random = torch.Generator(device="cuda").manual_seed(seed)
        normal = partial(torch.randn, generator=random, device="cuda")
        shapes = ((tokens, HK, DIM), (tokens, HK, DIM), (tokens, HV, DIM), (tokens, HV))
        self.q, self.k, self.v, self.a = (normal(*shape).bfloat16() for shape in shapes)
        self.b = normal(tokens, HV).bfloat16()
        self.A_log = torch.log(torch.rand(HV, generator=random, device="cuda") + 0.05)
        self.dt_bias = torch.full((HV,), -2.0, device="cuda")
        self.out = torch.zeros_like(self.v)

    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.a, self.b, self.A_log, self.dt_bias


def random_cache(state: torch.dtype, slots: int) -> ReplayCache:
    """States of order 1 and rings as steps would have left them."""
    random = torch.Generator(device="cuda").manual_seed(1)
    cache = ReplayLayout(HK, HV, DIM, DIM, RING, state).allocate(slots, "cuda")
    for tensor in (cache.state, cache.keys, cache.updates):
        tensor.normal_(0, 1 if tensor is cache.keys else 0.3, generator=random)
    cache.log_decay.uniform_(-0.1, 0, generator=random)
    cache.key_norm.copy_(cache.keys.float().pow(2).sum(-1).rsqrt())
    return cache


class Replay:
    """Replay steps of one shape, an input set each; sets share nothing, so states are cold.

    A step with `flush` is replayed without moving its cursor, so it folds the same rows each time.
    Pending rows are never overwritten and every decay is below 1, so states stay bounded; `finite`
    is asked at the end all the same.
    """

    def __init__(self, shape: Shape, sets: int) -> None:
        self.shape = shape
        requests, lengths = shape.requests, shape.lengths()
        self.cache = random_cache(shape.state, sets * requests + 1)
        self.query_start_loc = integers(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
        order = torch.randperm(sets * requests, generator=torch.Generator().manual_seed(2)) + 1
        self.slots = [integers(part) for part in order.split(requests)]
        every_eighth = (torch.arange(requests) % 8 == 0) & torch.tensor(shape.flush)
        self.step = StepCursor(
            integers(torch.arange(requests) * 5 % RING),
            integers([shape.pending] * requests),
            integers(every_eighth.int()),
        )
        tokens = max(1, int(lengths.sum()))
        self.rows = [Rows(tokens, seed) for seed in range(sets)]

    def calls(self, kernel: Kernel = replay.replay_verify) -> list[Callable[[], object]]:
        return [
            partial(
                kernel, *rows.inputs(), self.query_start_loc, slots, self.step, self.cache,
                rows.out, MAX_ROWS,
            )
            for rows, slots in zip(self.rows, self.slots, strict=True)
        ]  # fmt: skip

    def finite(self) -> bool:
        return all(bool(x.isfinite().all()) for x in self.cache.tensors())


class Native:
    """Steps in the native layout, C state columns a request: ours, and vLLM's kernel on it."""

    def __init__(self, shape: Shape, sets: int) -> None:
        requests, lengths = shape.requests, shape.lengths()
        columns = max(1, int(lengths.max()))
        slots = sets * requests * columns + 1
        random = torch.Generator(device="cuda").manual_seed(1)
        self.states = torch.empty(slots, HV, DIM, DIM, dtype=shape.state, device="cuda")
        self.states.normal_(0, 0.3, generator=random)
        order = torch.randperm(slots - 1, generator=torch.Generator().manual_seed(2)) + 1
        self.indices = [integers(part) for part in order.view(sets, requests, columns)]
        self.accepted = integers((torch.arange(requests) % columns) + 1)
        self.query_start_loc = integers(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
        self.rows = [Rows(int(lengths.sum()), seed) for seed in range(sets)]

    def calls(
        self, config: native.NativeConfig | native.RowConfig | None = None
    ) -> list[Callable[[], object]]:
        return [
            partial(
                native.gdn_verify, *rows.inputs(), self.states, self.query_start_loc, indices,
                self.accepted, rows.out, indices.shape[1], config=config,
            )
            for rows, indices in zip(self.rows, self.indices, strict=True)
        ]  # fmt: skip

    def vllm_calls(self) -> list[Callable[[], Tensor]]:
        return [
            partial(vllm_verify, rows, self.states, self.query_start_loc, indices, self.accepted)
            for rows, indices in zip(self.rows, self.indices, strict=True)
        ]


def vllm_verify(
    rows: Rows, states: Tensor, query_start_loc: Tensor, indices: Tensor, accepted: Tensor
) -> Tensor:
    from vllm.third_party.flash_linear_attention.ops import (
        fused_sigmoid_gating_delta_rule_update,
    )

    out, _ = fused_sigmoid_gating_delta_rule_update(
        A_log=rows.A_log, a=rows.a, b=rows.b, dt_bias=rows.dt_bias, q=rows.q[None],
        k=rows.k[None], v=rows.v[None], initial_state=states, inplace_final_state=True,
        cu_seqlens=query_start_loc, ssm_state_indices=indices, num_accepted_tokens=accepted,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out


def error(x: Tensor, reference: Tensor) -> float:
    """|x - reference| / |reference|, NaN if x has one."""
    return float((x.double() - reference.double()).norm() / reference.double().norm())


def triton_kernel(config: replay.ReplayConfig | None) -> Kernel:
    return partial(replay.replay_verify, config=config)


def replay_errors(state: torch.dtype, kernel: Kernel = replay.replay_verify) -> tuple[float, float]:
    """(outputs, worst cache tensor) of a ragged batch with pending rows, flushes, an empty and a
    padding request, against the float64 oracle; AssertionError if a stray row was written."""
    shape = Shape(state, 16, None, pending=6)
    problem = Replay(shape, 1)
    problem.slots[0][4] = 0
    problem.step.flush[::2] = 1
    rows = problem.rows[0]
    rows.out.fill_(777.0)
    exact = ReplayCache(*(x.clone() for x in problem.cache.tensors()))
    exact.state, exact.updates = exact.state.double(), exact.updates.double()
    reference = rows.out.double()
    arguments = (*rows.inputs(), problem.query_start_loc, problem.slots[0], problem.step)
    replay_naive.replay_verify(*arguments, exact, reference)
    kernel(*arguments, problem.cache, rows.out, MAX_ROWS)
    first, last = problem.query_start_loc[4:6].tolist()
    assert bool((rows.out[first:last] == 777.0).all()), "a padding request's row was written"
    rows.out[first:last] = reference[first:last] = 0
    pairs = zip(problem.cache.tensors(), exact.tensors(), strict=True)
    return error(rows.out, reference), max(error(x, y) for x, y in pairs)


def errors_beside_vllm(
    state: torch.dtype, kernel: Kernel = replay.replay_verify
) -> dict[str, tuple[float, float]]:
    """name -> (replay, vLLM) after 8 rows from the same states, against float64: outputs (bf16
    from both) and the state after the last row (the replay one from a flush)."""
    shape = Shape(state, 16, MAX_ROWS, pending=0)
    ours, theirs = Replay(shape, 1), Native(shape, 1)
    theirs.accepted.fill_(1)
    rows, columns = ours.rows[0], theirs.indices[0]
    ours.cache.state[ours.slots[0].long()] = theirs.states[columns[:, 0].long()]
    exact = ReplayCache(*(x.double() for x in ours.cache.tensors()))
    reference = torch.zeros_like(rows.v, dtype=torch.float64)
    arguments = (*rows.inputs(), ours.query_start_loc, ours.slots[0], ours.step)
    replay_naive.replay_verify(*arguments, exact, reference)
    ours.calls(kernel)[0]()
    after = StepCursor(ours.step.start, integers([MAX_ROWS] * 16), ours.step.flush)
    replay_naive.replay_flush(ours.slots[0], after, exact)
    replay.replay_flush(ours.slots[0], after, ours.cache)
    vllm_out = vllm_verify(
        rows, theirs.states, theirs.query_start_loc, columns, theirs.accepted
    ).reshape(reference.shape)
    slots = ours.slots[0].long()
    wanted = exact.state[slots]
    return {
        "outputs": (error(rows.out, reference), error(vllm_out, reference)),
        "state": (
            error(ours.cache.state[slots], wanted),
            error(theirs.states[columns[:, -1].long()], wanted),
        ),
    }


def native_errors(
    state: torch.dtype, config: native.NativeConfig | native.RowConfig | None
) -> tuple[float, float]:
    """(outputs, states) of a ragged batch against the oracle in float64."""
    from vllm_ascend_spec.kernels.gdn_verify import naive

    problem = Native(Shape(state, 16, None, pending=0), 1)
    rows = problem.rows[0]
    exact = problem.states.double()
    gates = replay_naive.gates(rows.a, rows.b, rows.A_log, rows.dt_bias, torch.float64)
    reference = naive.gdn_verify(
        rows.q.double(), rows.k.double(), rows.v.double(), *gates, exact,
        problem.query_start_loc, problem.indices[0], problem.accepted,
    )  # fmt: skip
    problem.calls(config)[0]()
    return error(rows.out, reference), error(problem.states, exact)
