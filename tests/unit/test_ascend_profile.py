"""A cost surface of vllm-ascend: which steps are timed, and what is read off them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_spec.budget.surface import StepKind, Surface, SurfaceKey
from vllm_ascend_spec.engine import ascend_profile
from vllm_ascend_spec.engine.ascend_adaptive import LengthPlanner
from vllm_ascend_spec.engine.ascend_lanes import Lane
from vllm_ascend_spec.engine.ascend_profile import (
    REPLAYS,
    WARMUPS,
    Step,
    Stopwatch,
    SweepPlanner,
    contexts_to_time,
    counts_to_time,
    points,
    sizes_to_time,
    spread,
)

K = 4
REQUESTS = 3


def test_every_graph_that_can_be_filled_is_timed_and_sizes_beyond():
    assert sizes_to_time(4, 7, [8, 16, 32], 256) == [8, 16, 32]
    assert sizes_to_time(4, 7, [2, 8, 16], 256) == [8, 16, 17, 20, 23, 26, 29, 32]
    assert sizes_to_time(1, 3, [], 256) == [1, 2, 3, 4]
    assert sizes_to_time(8, 7, [8, 16], 12) == [8], "a launch holds no more rows"


def test_what_is_asked_for_stays_within_the_engine():
    assert counts_to_time(100) == [1, 4, 16, 64, 100]
    assert counts_to_time(1) == [1]
    assert contexts_to_time(32768, 7) == [512, 8192]
    assert contexts_to_time(256, 7) == [128]
    assert contexts_to_time(20, 7) == [4]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=12).map(np.array),
    st.integers(0, 120),
)
def test_rows_are_spread_evenly_and_exactly(drafted: Any, rows: int):
    kept = spread(rows, drafted)
    assert (kept >= 0).all() and (kept <= drafted).all()
    assert kept.sum() == min(max(rows - len(drafted), 0), drafted.sum())
    full = kept.max(initial=0)
    # Whoever has less than the others had no more, or is one short.
    assert all(k >= min(d, full - 1) for k, d in zip(kept, drafted, strict=True))


class Clock:
    """Events of a device on which the parts of a step take 5, 1 and 2 ms, each with a gap of 1."""

    def __init__(self) -> None:
        self.now, self.parts = 0.0, [5.0, 1.0, 1.0, 1.0, 2.0, 1.0]
        self.recorded = 0


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, -1.0

    def record(self) -> None:
        self.at = self.clock.now
        self.clock.now += self.clock.parts[self.clock.recorded % 6]
        self.clock.recorded += 1

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


class Runner:
    """As much of vllm-ascend's runner as is watched."""

    def __init__(self) -> None:
        self.model = torch.nn.Identity()
        self.cudagraph_manager = SimpleNamespace(run_fullgraph=lambda graph: None)
        self.speculator = SimpleNamespace(propose=lambda *_: None)

    def sample(self, hidden_states: Any, batch: Any, grammar: Any) -> None: ...

    def sample_tokens(self, grammar: Any) -> str:
        self.sample(None, self.batch, grammar)
        self.speculator.propose(self.batch)
        return "output"

    def step(self, sweep: SweepPlanner, graph: int | None = None) -> list[int]:
        """One step; graph: rows of the graph that it replays."""
        slots, whole = np.arange(REQUESTS), np.full(REQUESTS, K)
        kept = sweep.lengths(slots, whole, REQUESTS, 100.0).tolist()
        rows = REQUESTS + sum(kept)
        self.batch = SimpleNamespace(logits_indices=torch.zeros(rows), num_tokens=rows)
        if graph is None:
            self.model(torch.zeros(1))
        else:
            self.cudagraph_manager.run_fullgraph(SimpleNamespace(num_tokens=graph))
        assert self.sample_tokens(None) == "output"
        return kept


def sweep_of(lane: Lane) -> SweepPlanner:
    planner = LengthPlanner(
        method="dspark", draft_tokens=K, max_requests=REQUESTS, max_rows=64, lane=lane, cost=None
    )
    return SweepPlanner.of(planner, lambda: None)


@pytest.mark.parametrize("lane", [Lane.L0, Lane.L1])
def test_a_sweep_launches_each_size_and_reads_its_parts(lane: Lane):
    sweep, runner, clock = sweep_of(lane), Runner(), Clock()
    watch = Stopwatch(runner, sweep, lambda: Event(clock))
    sweep.ask(REQUESTS, 96, [5, 9])
    graph = 16 if lane.graph else None
    launched = [sum(runner.step(sweep, graph)) + REQUESTS for _ in range(2 * (WARMUPS + REPLAYS))]
    assert launched == [5] * 4 + [9] * 4 and not sweep.wanted
    assert len(watch.steps) == (2 * REPLAYS if graph is None else 2 * (WARMUPS + REPLAYS) - 1)
    found = points(watch.steps, K, lane)
    kind = StepKind.FULL if graph else StepKind.EAGER
    sizes = [(point.kind, point.rows, point.requests, point.ms) for point in found["target"]]
    assert sizes == [(kind, rows, REQUESTS, 5.0) for rows in ([16] if graph else [5, 9])]
    assert {point.context for point in found["target"]} == {100}
    assert [(point.rows, point.ms) for point in found["logits"]] == [(5, 1.0), (9, 1.0)]
    assert [(p.requests, p.depth, p.ms) for p in found["drafter"]] == [(REQUESTS, K, 2.0)]
    assert found["host"].floor_ms > 0
    key = SurfaceKey(
        model="m", dtype="bfloat16", device="d", engine="e", method="dspark", draft_tokens=K,
        full_ladder=(16,) if graph else (), mixed_ladder=(), drafter_ladder=(),
    )  # fmt: skip
    Surface(key=key, **found)


def test_only_whole_decode_steps_are_timed():
    sweep, runner = sweep_of(Lane.L0), Runner()
    clock = Clock()
    watch = Stopwatch(runner, sweep, lambda: Event(clock))
    slots, whole = np.arange(REQUESTS), np.full(REQUESTS, K)
    sweep.ask(REQUESTS, 96, [4])
    short = np.array([K, K, K - 1])
    assert sweep.lengths(slots, whole, REQUESTS, 9.0, in_prompt=True).tolist() == [K] * 3
    assert sweep.lengths(slots, whole, REQUESTS + 1, 9.0).tolist() == [K] * 3
    assert sweep.lengths(slots, short, REQUESTS, 9.0).tolist() == short.tolist()
    assert sweep.lengths(slots[:2], whole[:2], 2, 9.0).tolist() == [K] * 2
    assert len(sweep.wanted) == WARMUPS + REPLAYS
    sweep.ask(REQUESTS, 96, [])
    runner.step(sweep)
    assert watch.steps == [] and clock.recorded == 0
    with pytest.raises(ValueError, match="no step was timed"):
        points([], K, Lane.L0)


def test_the_host_of_lane_l0_is_timed_up_to_its_launch():
    step = Step(1, 10.0, 10, begun=1.0, launched=1.25, finished=2.0)
    assert step.host_ms(Lane.L0) == 250.0 and step.host_ms(Lane.L1) == 1000.0


def test_a_step_that_missed_a_part_is_not_kept():
    sweep, runner, clock = sweep_of(Lane.L0), Runner(), Clock()
    watch = Stopwatch(runner, sweep, lambda: Event(clock))
    sweep.ask(REQUESTS, 96, [4])
    runner.speculator.propose = lambda *_: None  # a round without drafting
    for _ in range(WARMUPS + REPLAYS):
        runner.step(sweep)
    assert watch.steps == []


def test_an_engine_in_another_process_is_refused():
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace()))
    with pytest.raises(ascend_profile.UserError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        ascend_profile.measure(llm)


def test_an_engine_without_adaptive_verification_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "torch_npu", SimpleNamespace(npu=None))
    worker = SimpleNamespace(model_runner=SimpleNamespace(length_planner=None))
    with pytest.raises(ascend_profile.UserError, match="adaptive verification is off"):
        ascend_profile._start(worker)
