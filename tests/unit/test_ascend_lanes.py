"""Which lane an installation and an engine's configuration allow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_ascend_spec.engine.ascend_lanes import Features, Lane, asks_for_graphs, choose

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
        (ALL, True, Lane.L2, "from the device"),
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
