"""Prometheus metrics of adaptive verification, beside vLLM's `vllm:spec_decode_*`.

vLLM counts a draft token that was trimmed as rejected; here trimmed is drafted less verified. The
engine is a process of its own, and vLLM's `/metrics` shows what it counts where both processes
share `PROMETHEUS_MULTIPROC_DIR` (`vllm-ascend-spec serve` sets it; before `vllm serve`, set it to
an empty directory).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_ascend_spec.budget.accounting import Counters
from vllm_ascend_spec.budget.controller import BudgetController
from vllm_ascend_spec.budget.planner import Plan

PREFIX = "ascend_spec:"
DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
EVERY_STEPS = 32

COUNTERS = {
    "steps": "Steps that the budget planner planned.",
    "drafted": "Draft tokens handed to verification steps.",
    "verified": "Draft tokens verified.",
    "accepted": "Draft tokens accepted.",
    "emitted": "Tokens emitted, bonus tokens included.",
    "invalid": "Confidences that were NaN or outside [0, 1].",
}
GAUGES = {
    "acceptance_length": "Tokens per request and step over all steps, undrafted ones included.",
    "budget_rows": "Draft tokens that the last planned step verifies.",
    "expected_over_accepted": "Expected over real acceptances since the start.",
    "calibration_error": "Expected calibration error of survival, mean over positions.",
    "predicted_over_real_time": "Predicted over real step time since the start.",
}


def share_directory() -> None:
    """Let this process and the engine's count into one place. Before prometheus_client loads."""
    if DIRECTORY_VARIABLE not in os.environ:
        os.environ[DIRECTORY_VARIABLE] = tempfile.mkdtemp(prefix="ascend_spec_metrics_")


class BudgetMetrics:
    """Publishes a controller's totals every `EVERY_STEPS` steps. One a process."""

    def __init__(self, registry: Any = None) -> None:
        """registry: of prometheus_client, its default if None."""
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = registry or REGISTRY
        for collector in list(getattr(registry, "_collector_to_names", ())):
            # An engine built before in this process has left its own.
            if getattr(collector, "_name", "").startswith(PREFIX):
                registry.unregister(collector)
        self._counters = {
            name: Counter(f"{PREFIX}{name}", text, registry=registry)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"{PREFIX}{name}", text, registry=registry, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        self._published = Counters()

    def step(self, controller: BudgetController, plan: Plan | None) -> None:
        """Publish if it is time to."""
        if controller.counters.steps - self._published.steps >= EVERY_STEPS:
            self.publish(controller, plan)

    def publish(self, controller: BudgetController, plan: Plan | None) -> None:
        """Bring every metric up to date."""
        controller.learn()
        counters = replace(controller.counters)
        interval = counters.since(self._published)
        self._published = counters
        for name, counter in self._counters.items():
            counter.inc(max(getattr(interval, name), 0))
        errors = controller.reliability.expected_calibration_error()
        known = errors[~np.isnan(errors)]
        values = {
            "acceptance_length": counters.tau,
            "budget_rows": None if plan is None else float(plan.draft_rows),
            "expected_over_accepted": _more_than(counters.expectation_error),
            "calibration_error": float(known.mean()) if known.size else None,
            "predicted_over_real_time": _more_than(counters.time_error),
        }
        for name, value in values.items():
            if value is not None:
                self._gauges[name].set(value)


def _more_than(error: float | None) -> float | None:
    return None if error is None else 1.0 + error
