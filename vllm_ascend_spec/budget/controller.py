"""The budget of one engine: calibration, memory, price and plan behind five calls.

`begin` and `record` keep what is known of the requests, `plan` decides, `observe` learns from what
verification and the clock showed. Host only; the engine calls `plan` before the launch and the
others when their data happen to have arrived, one or two steps late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ascend_spec.budget.accounting import Counters
from vllm_ascend_spec.budget.calibration import OnlineCalibration, Reliability, sampling_class
from vllm_ascend_spec.budget.confidence import RequestMemory
from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.planner import Limits, Plan, Planner, StepBatch
from vllm_ascend_spec.budget.surface import StepKind
from vllm_ascend_spec.budget.survival import Grid, Ints, Scores, quantise_scores, valid_rows

# Small rounds are graded together: the host pays for calls, hardly for rows.
LEARN_EVERY, LEARN_REQUESTS = 8, 128


@dataclass(frozen=True)
class Drafts:
    """One drafting round as recorded, in batch order: hand it back with the outcome.

    scores uint16 [R, K], survival uint16 [R, K], classes and slots int [R]. valid: bool [R], False
    where a confidence was no number; None for none.
    """

    slots: Ints
    classes: Ints
    scores: Scores
    survival: Grid
    valid: npt.NDArray[np.bool_] | None = None


class BudgetController:
    """max_requests slots; a request keeps its slot as long as it lives."""

    def __init__(
        self,
        limits: Limits,
        cost: CostModel | None,
        acceptance: npt.NDArray[np.float64],
        calibration: OnlineCalibration | None = None,
    ) -> None:
        """acceptance: chances by position before any data, float [K] (`confidence.cold_start`)."""
        depth = limits.draft_tokens
        self.calibration = calibration or OnlineCalibration(depth)
        self.cost = cost
        self.planner = Planner(limits, cost)
        self.memory = RequestMemory(limits.max_requests, self.calibration, acceptance)
        self.reliability = Reliability(depth)
        self.counters = Counters()
        self._graded: list[tuple[npt.NDArray[Any], ...]] = []

    def begin(self, slot: int, temperature: float = 0.0, top_p: float = 1.0) -> None:
        """A new request takes the slot."""
        self.memory.begin(slot, sampling_class(temperature, top_p))

    def record(
        self,
        slots: Ints,
        confidence: npt.ArrayLike,
        drafted: Ints,
        depth: int | None = None,
    ) -> Drafts:
        """Confidences [R, K] that have arrived from the device.

        drafted: draft tokens per request, int [R]. depth: how far the drafter ran, if less than K.
        """
        scores, invalid = quantise_scores(confidence, drafted)
        self.counters.invalid += invalid
        valid = valid_rows(confidence, drafted) if invalid else None
        depth = self.planner.limits.draft_tokens if depth is None else depth
        survival = self.memory.record(slots, scores, drafted > 0, depth, valid)
        return Drafts(slots, self.memory.classes(slots), scores, survival, valid)

    def plan(
        self,
        slots: Ints,
        drafted: Ints,
        may_draft: npt.NDArray[np.bool_],
        rows: int,
        sampling: int,
        context: float,
        kind: StepKind = StepKind.FULL,
    ) -> Plan:
        """The plan of the step; arguments as in `StepBatch`, requests given by their slots."""
        memory = self.memory
        return self.planner.plan(
            StepBatch(
                kind=kind,
                survival=memory.expected(slots),
                typical=memory.typical[slots],
                drafted=drafted,
                may_draft=may_draft,
                rows=rows,
                sampling=sampling,
                context=context,
            )
        )

    def observe(self, drafts: Drafts, drafted: Ints, verified: Ints, accepted: Ints) -> None:
        """What became of a recorded round; int [R] each, accepted without the bonus token.

        Drafts without a valid confidence are counted, and teach nothing.
        """
        graded = verified if drafts.valid is None else np.where(drafts.valid, verified, 0)
        self._graded.append((drafts.scores, drafts.classes, drafts.survival, graded, accepted))
        requests = sum(len(part[0]) for part in self._graded)
        if len(self._graded) >= LEARN_EVERY or requests >= LEARN_REQUESTS:
            self.learn()
        counters = self.counters
        counters.drafted += int(drafted.sum())
        counters.verified += int(verified.sum())
        counters.accepted += int(accepted.sum())

    def learn(self) -> None:
        """Take in the rounds graded so far; `observe` does it after a few of them."""
        if not self._graded:
            return
        columns = (np.concatenate(parts) for parts in zip(*self._graded, strict=True))
        scores, classes, survival, verified, accepted = columns
        self._graded.clear()
        self.calibration.observe(scores, classes, verified, accepted)
        self.reliability.observe(survival, verified, accepted)

    def observe_step(self, plan: Plan, sampling: int, emitted: int, real_ms: float | None) -> None:
        """Count a finished step; real_ms where it was timed."""
        counters = self.counters
        counters.steps += 1
        counters.requests += sampling
        counters.emitted += emitted
        counters.expected_accepted += plan.expected_tokens - sampling
        if real_ms is not None and plan.expected_ms is not None:
            counters.predicted_ms += plan.expected_ms
            counters.real_ms += real_ms

    def observe_host(self, requests: int, period_ms: float, device_waited: bool) -> None:
        """Time from a step's start to the next one's; whether the device had nothing to do."""
        if self.cost is not None:
            self.cost.host.observe(requests, period_ms * 1e6, device_waited)

    def observe_target(
        self,
        kind: StepKind,
        rows: int,
        sampled: int,
        requests: int,
        context: float,
        real_ms: float,
    ) -> None:
        """Time of one target pass with LM head and sampling, drafting not included."""
        if self.cost is not None:
            self.cost.observe(kind, rows, sampled, requests, context, real_ms * 1e6)

    def observe_drafter(
        self, count: int, whole: bool, depth: int, context: float, real_ms: float
    ) -> None:
        """Time of one drafting round for `count` requests, after the target's pass."""
        if self.cost is not None:
            self.cost.drafter.observe(count, whole, depth, context, real_ms * 1e6)
