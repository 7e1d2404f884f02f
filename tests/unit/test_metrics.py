"""Prometheus metrics of the planner, in a registry of their own."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from vllm_ascend_spec.budget.confidence import cold_start
from vllm_ascend_spec.budget.controller import BudgetController
from vllm_ascend_spec.budget.planner import Limits
from vllm_ascend_spec.engine.metrics import EVERY_STEPS, BudgetMetrics


@pytest.fixture
def controller() -> BudgetController:
    controller = BudgetController(Limits(3, 4, 64), None, cold_start("mtp", 3))
    controller.begin(0)
    return controller


def run_steps(controller: BudgetController, steps: int) -> None:
    slots, drafted = np.array([0]), np.array([3])
    for _ in range(steps):
        drafts = controller.record(slots, np.full((1, 3), 0.5), drafted)
        plan = controller.plan(slots, drafted, np.array([True]), 1, 1, 10.0)
        controller.observe(drafts, drafted, np.array([2]), np.array([1]))
        controller.observe_step(plan, 1, 2, None)


def test_trimmed_tokens_are_drafted_and_not_verified(controller: BudgetController):
    registry = CollectorRegistry()
    metrics = BudgetMetrics(registry)
    run_steps(controller, EVERY_STEPS - 1)
    metrics.step(controller, None)
    assert registry.get_sample_value("ascend_spec:drafted_total") == 0
    run_steps(controller, 1)
    metrics.step(controller, None)
    value = registry.get_sample_value
    assert value("ascend_spec:drafted_total") == 3 * EVERY_STEPS
    assert value("ascend_spec:verified_total") == 2 * EVERY_STEPS
    assert value("ascend_spec:accepted_total") == EVERY_STEPS
    assert value("ascend_spec:acceptance_length") == 2.0
    assert 0.0 <= value("ascend_spec:calibration_error") <= 1.0


def test_counters_go_on_and_a_second_engine_takes_their_place(controller: BudgetController):
    registry = CollectorRegistry()
    metrics = BudgetMetrics(registry)
    run_steps(controller, 5)
    metrics.publish(controller, None)
    run_steps(controller, 5)
    metrics.publish(controller, None)
    assert registry.get_sample_value("ascend_spec:steps_total") == 10
    BudgetMetrics(registry)
    assert registry.get_sample_value("ascend_spec:steps_total") == 0
