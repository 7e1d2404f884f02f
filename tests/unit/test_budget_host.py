"""Host time: learnt where the device waited, and what it makes of a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.budget.planner_time import batches, cost_model
from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.host import FORGET, MOST, WINDOW, HostTime
from vllm_ascend_spec.budget.planner import Limits, Planner, StepBatch
from vllm_ascend_spec.budget.survival import to_grid

REQUESTS, K = 16, 7


def waiting(host: HostTime, requests: int, period_ms: float, steps: int = MOST) -> HostTime:
    for _ in range(steps):
        host.observe(requests, period_ms * 1e6, device_waited=True)
    return host


def test_where_the_device_keeps_waiting_the_period_is_the_hosts() -> None:
    assert waiting(HostTime(64), 16, 6).least(16) == 6e6


def test_single_waits_are_pauses_of_the_engine() -> None:
    host = HostTime(64)
    for _ in range(10 * WINDOW):
        host.observe(16, 9e6, device_waited=False)
        host.observe(16, 30e6, device_waited=True)
    assert host.least(16) == 0


def test_a_pause_among_waits_is_not_taken_for_a_slow_host() -> None:
    host = waiting(HostTime(64), 16, 6)
    host.observe(16, 5e9, device_waited=True)
    assert host.least(16) == 6e6


def test_a_step_without_a_wait_shows_that_the_host_is_that_fast() -> None:
    host = waiting(HostTime(64), 16, 6)
    host.observe(16, 4e6, device_waited=False)
    assert host.least(16) == 4e6


def test_a_busy_device_says_nothing_about_the_host_and_in_the_end_it_is_forgotten() -> None:
    host = waiting(HostTime(64), 16, 6)
    for _ in range(FORGET - 1):
        host.observe(16, 8e6, device_waited=False)
    assert host.least(16) == 6e6
    host.observe(16, 8e6, device_waited=False)
    assert host.least(16) == 0


def test_many_requests_do_not_slow_down_few() -> None:
    host = waiting(HostTime(64), 64, 20)
    assert host.least(1) == 0 and host.least(33) == 0 and host.least(64) == 20e6


def poor_drafts(requests: int) -> StepBatch:
    """Drafts of which a staircase of costs would leave some out."""
    survival = np.repeat(to_grid(0.35 ** np.arange(1, K + 1))[None], requests, axis=0)
    return replace(batches(requests, K, 1)[0], survival=survival, typical=survival)


def plan(cost: CostModel) -> tuple[int, int]:
    limits = Limits(K, REQUESTS, cost.max_rows, probe_share=0, probe_credit_ms=0)
    planner = Planner(limits, cost)
    made = planner.plan(poor_drafts(REQUESTS))
    return made.draft_rows, int(made.draft_next.sum())


def test_rows_are_free_where_the_host_is_slower_than_the_device() -> None:
    cost = cost_model(REQUESTS, K, drafter_ms=2.0)
    trimmed, _ = plan(cost)
    assert trimmed < REQUESTS * K
    waiting(cost.host, REQUESTS, 30)
    assert plan(cost) == (REQUESTS * K, REQUESTS)


@pytest.mark.parametrize("host_ms", [0.0, 3.0])
def test_a_fast_host_decides_nothing(host_ms: float) -> None:
    cost = cost_model(REQUESTS, K, drafter_ms=2.0)
    before = plan(cost)
    if host_ms:
        waiting(cost.host, REQUESTS, host_ms)
    assert plan(cost) == before
