"""A step's plan in flight, and what the planner is told once the step has landed."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ascend_spec.budget.controller import BudgetController
from vllm_ascend_spec.budget.planner import Plan
from vllm_ascend_spec.budget.surface import StepKind
from vllm_ascend_spec.engine.ledger import Bools
from vllm_ascend_spec.engine.step_clock import Ticks

# Longer than the inputs of a step take, which is all that lies between two steps where the host is
# ahead of the device.
WAITED_MS = 0.5


@dataclass(frozen=True)
class Planned:
    """The plan of the step under way, and what it was made for.

    draft_next: bool by request slot, who is drafted for after the step, `length` tokens each.
    """

    plan: Plan
    budget: int
    kind: StepKind
    requests: int
    sampling: int
    context: float
    drafts: dict[str, int]
    base: dict[str, int]
    draft_next: Bools
    length: int


def account(
    controller: BudgetController,
    planned: Planned,
    ticks: Ticks | None,
    emitted: int,
    drafted: int,
) -> None:
    """Tell the planner what became of a step: tokens emitted, requests drafted for, times."""
    times = ticks.read() if ticks is not None else None
    real_ms = None
    if times is not None:
        real_ms = times.total_ms
        device_waited = times.idle_ms is not None and times.idle_ms > WAITED_MS
        if times.period_ms is not None:
            controller.observe_host(planned.requests, times.period_ms, device_waited)
        if device_waited:  # such a step tells the host's time, not the device's
            real_ms, times = times.period_ms, None
    controller.observe_step(planned.plan, planned.sampling, emitted, real_ms)
    if times is not None:
        controller.observe_target(
            planned.kind,
            planned.plan.rows - planned.plan.draft_rows + planned.budget,
            planned.sampling + planned.budget,
            planned.requests,
            planned.context,
            times.target_ms,
        )
        controller.observe_drafter(
            drafted,
            drafted == planned.requests,
            planned.length,
            planned.context,
            times.total_ms - times.target_ms,
        )
