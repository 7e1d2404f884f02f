"""Which lane an installation and an engine's configuration allow."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.planner import best_count
from vllm_ascend_spec.budget.surface import (
    HostCost,
    StepKind,
    Surface,
    SurfaceKey,
    TargetPoint,
)
from vllm_ascend_spec.budget.survival import ONE
from vllm_ascend_spec.engine.ascend_lanes import Features, Lane, asks_for_graphs, choose, priced

ALL = Features(missing_update_api=(), missing_device_lengths=())
TODAY = Features(missing_update_api=(), missing_device_lengths=("attention_with_device_lengths",))
OLD = Features(missing_update_api=("graph_task_update_begin",), missing_device_lengths=())


@pytest.mark.parametrize(
    ("features", "graphs", "lane", "reason"),
    [
        (TODAY, None, Lane.L1, "no operator attention_with_device_lengths"),
        (TODAY, True, Lane.L1, "takes lengths from the host"),
        (TODAY, False, Lane.L0, "captures no FULL graphs"),
        (OLD, True, Lane.L0, "no graph_task_update_begin"),
        (OLD, False, Lane.L0, "captures no FULL graphs"),
        (ALL, True, Lane.L1, "lane L2 is refused: torch_npu has npu_fused_infer_attention"),
        (ALL, False, Lane.L0, "captures no FULL graphs"),
    ],
)
def test_the_highest_lane_that_everything_allows(
    features: Features, graphs: bool | None, lane: Lane, reason: str
):
    choice = choose(features, graphs)
    assert choice.lane is lane
    assert reason in choice.reason


def test_what_a_lane_costs_the_host():
    assert [lane.waits_for_drafter for lane in Lane] == [True, False, False]
    assert [lane.age for lane in Lane] == [0, 1, 0]
    assert [lane.graph for lane in Lane] == [False, True, True]


@pytest.mark.parametrize("full", [True, False])
def test_the_configuration_says_whether_graphs_are_captured(full: bool):
    mode = SimpleNamespace(has_full_cudagraphs=lambda: full)
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
    assert asks_for_graphs(config) is full


def surface(floor_ms: float, added_ms: float = 0.0) -> Surface:
    """A target of 10 ms and 2 ms for each row more."""
    key = SurfaceKey(
        model="m", dtype="bfloat16", device="d", engine="e", method="dspark", draft_tokens=8,
        full_ladder=(), mixed_ladder=(), drafter_ladder=(),
    )  # fmt: skip
    points = tuple(
        TargetPoint(kind=StepKind.EAGER, rows=rows, requests=1, context=16, ms=8.0 + 2.0 * rows)
        for rows in (1, 64)
    )
    return Surface(key=key, target=points, host=HostCost(ms=added_ms, floor_ms=floor_ms))


def step_ms(lane: Lane, floor_ms: float, added_ms: float = 0.0) -> list[float]:
    """Times of a step of one request that verifies 0 to 8 draft tokens."""
    model = CostModel(priced(surface(floor_ms, added_ms), lane), 1, 64)
    device = model.verify(lane.step_kind(in_prompt=False), 1, 1, 8, 1, 16.0)
    return (model.step(device, 0.0) / 1e6).tolist()


def test_only_the_lane_that_waits_pays_the_hosts_time_beside_the_devices():
    device = [10.0 + 2.0 * rows for rows in range(9)]
    assert step_ms(Lane.L0, 15.0) == [ms + 15.0 for ms in device]
    assert step_ms(Lane.L1, 15.0) == [max(ms, 15.0) for ms in device]
    assert step_ms(Lane.L0, 15.0, 0.5) == [ms + 15.5 for ms in device]
    assert step_ms(Lane.L1, 15.0, 0.5) == [max(ms, 15.0) + 0.5 for ms in device]


def test_the_wait_is_a_reason_to_verify_more():
    tokens = ONE * (1 + np.cumsum([0, *0.7 ** np.arange(1, 9)]))
    alone = np.array(step_ms(Lane.L0, 0.0))
    best = {lane: best_count(tokens, np.array(step_ms(lane, 11.0))) for lane in (Lane.L0, Lane.L1)}
    by_hand = {
        Lane.L0: max(range(9), key=lambda n: tokens[n] / (alone[n] + 11.0)),
        Lane.L1: max(range(9), key=lambda n: tokens[n] / max(alone[n], 11.0)),
    }
    assert best == by_hand and best[Lane.L0] > best[Lane.L1]


def test_each_launch_lies_on_its_own_cost_curve():
    assert [lane.step_kind(False) for lane in Lane] == [
        StepKind.EAGER, StepKind.FULL, StepKind.FULL
    ]  # fmt: skip
    assert {lane.step_kind(True) for lane in Lane} == {StepKind.MIXED}
