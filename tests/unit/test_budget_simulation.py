"""The whole controller in a simulated engine: it never loses, it learns, it follows its costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.budget.simulate import FIXED, Adaptive, Scenario, fixed, oracle
from benchmarks.budget.world import EASY, HARD, SHAPES, surface
from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.planner import Limits, Planner, StepBatch
from vllm_ascend_spec.budget.surface import StepKind, Surface, SurfaceKey
from vllm_ascend_spec.budget.survival import prefix_products, split, to_grid


def rates(scenario: Scenario) -> tuple[float, float]:
    """(adaptive, best of no speculation and every fixed K), tokens per ms."""
    adaptive, _ = Adaptive(scenario, surface(scenario.shape, noise=0.01)).run()
    return adaptive, max(fixed(scenario, k) for k in (0, *FIXED))


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("requests", [1, 16, 128])
def test_never_below_the_best_fixed_choice_from_a_bad_start(shape: str, requests: int) -> None:
    """Confidences start far too timid; the first step counts like the last."""
    scenario = Scenario(SHAPES[shape], requests, 1024, slope=0.5, offset=-1.0, steps=500)
    adaptive, best = rates(scenario)
    assert adaptive >= 0.99 * best


@pytest.mark.parametrize("profile", [EASY, HARD])
def test_never_below_where_all_requests_are_alike(profile: tuple[float, ...]) -> None:
    """Nothing to win by choosing: all easy, or so hard that speculation loses at this load."""
    scenario = Scenario(SHAPES["hybrid+parallel"], 256, 1024, steps=300, profiles=(profile,))
    adaptive, best = rates(scenario)
    assert adaptive >= 0.99 * best


def test_overconfidence_is_unlearnt() -> None:
    scenario = Scenario(SHAPES["hybrid+parallel"], 64, 1024, slope=2.0, offset=1.5, steps=500)
    adaptive, best = rates(scenario)
    assert adaptive >= best


def test_uneven_requests_are_worth_ten_percent_and_most_of_the_oracle() -> None:
    scenario = Scenario(SHAPES["hybrid+parallel"], 64, 1024, steps=400)
    adaptive, best = rates(scenario)
    assert adaptive >= 1.10 * best
    assert adaptive >= 0.94 * oracle(replace(scenario, steps=200))


def ms(per_row: float, rows: int) -> float:
    return 8.0 + per_row * rows


class Case22:
    """16 requests, K = 7, survival 0.6**i; the surface knows 1K context only."""

    def __init__(self) -> None:
        ladder = list(range(8, 129, 8))
        key = SurfaceKey(
            model="m",
            dtype="d",
            device="x",
            engine="e",
            method="ngram",
            draft_tokens=7,
            full_ladder=ladder,
        )
        points = [
            {"kind": "full", "rows": n, "requests": 16, "context": 1024, "ms": ms(0.01, n)}
            for n in ladder
        ]
        self.cost = CostModel(Surface.model_validate({"key": key, "target": points}), 16, 128)
        self.planner = Planner(Limits(7, 16, 128, probe_share=0.0, probe_credit_ms=0.0), self.cost)
        survival = prefix_products(to_grid(np.full((16, 7), 0.6)))
        self.batch = StepBatch(
            kind=StepKind.FULL,
            survival=survival,
            typical=survival,
            drafted=np.full(16, 7),
            may_draft=np.ones(16, dtype=bool),
            rows=16,
            sampling=16,
            context=1024.0,
        )

    def step(self, per_row: float, context: float, slowdown: float = 1.0) -> tuple[int, float]:
        """(budget, regret against the best budget at the true cost)."""
        plan = self.planner.plan(replace(self.batch, context=context))
        padded = -(-plan.rows // 8) * 8
        real = ms(per_row, padded)
        self.cost.observe(StepKind.FULL, plan.rows, 0, 16, context, real * slowdown * 1e6)
        best = max(self.rate(n, per_row) for n in range(113))
        return plan.draft_rows, 1.0 - self.rate(plan.draft_rows, per_row) / best

    @staticmethod
    def rate(n: int, per_row: float) -> float:
        gains = np.sort(np.repeat(0.6 ** np.arange(1, 8), 16))[::-1][:n].sum()
        return float((16 + gains) / ms(per_row, -(-(16 + n) // 8) * 8))


def test_case_22_the_budget_follows_a_context_that_was_not_measured() -> None:
    case = Case22()
    assert case.step(0.01, 1024)[0] == 96
    stale, loss = case.step(0.40, 131072)
    assert stale == 96
    assert loss == pytest.approx(0.40, abs=0.01)
    steps = [case.step(0.40, 131072) for _ in range(120)]
    budgets, regrets = zip(*steps[60:], strict=True)
    assert np.mean(regrets) < 0.05
    assert set(budgets) == {16}
    assert case.step(0.01, 1024)[0] == 96  # the short context has not been touched


def test_case_22_an_outlier_bans_no_bucket_and_lifts_no_other() -> None:
    case = Case22()
    for _ in range(60):
        case.step(0.40, 131072)
    before = case.cost.verify(StepKind.FULL, 16, 0, 112, 16, 131072).tolist()
    assert case.step(0.40, 131072, slowdown=20.0)[0] == 16
    assert case.cost.verify(StepKind.FULL, 16, 0, 112, 16, 131072).tolist() == before
    assert [case.step(0.40, 131072)[0] for _ in range(20)] == [16] * 20


def test_costs_that_drift_as_a_whole_change_nothing() -> None:
    """A slower clock for all sizes: the budget may look around, and comes back."""
    case = Case22()
    budgets = [case.step(0.01 * 1.3, 1024, slowdown=1.0)[0] for _ in range(200)]
    regret = np.mean([1 - case.rate(n, 0.013) / case.rate(96, 0.013) for n in budgets[100:]])
    assert regret < 0.01


def test_a_change_of_acceptance_is_followed() -> None:
    """All requests turn from easy to hard: the controller stops drafting all of them deep."""
    scenario = Scenario(SHAPES["hybrid+parallel"], 128, 1024, steps=250, profiles=(EASY,))
    loop = Adaptive(scenario, surface(scenario.shape))
    easy, easy_ms = loop.trace()
    loop.acceptance.become((HARD,))
    hard, hard_ms = loop.proceed(250)
    best_easy = max(fixed(scenario, k) for k in (0, *FIXED))
    best_hard = max(fixed(replace(scenario, profiles=(HARD,)), k) for k in (0, *FIXED))
    assert easy.sum() / easy_ms.sum() >= 0.99 * best_easy
    assert hard[50:].sum() / hard_ms[50:].sum() >= 0.99 * best_hard


class RankedByRawConfidences(Adaptive):
    """A device that takes other rows than those that were planned for."""

    def _split(self, confidence: np.ndarray, drafted: np.ndarray, budget: int) -> np.ndarray:
        return split(prefix_products(to_grid(confidence)), drafted, budget).astype(np.int64)


@pytest.mark.parametrize("slope", [0.3, 0.5])
def test_ranking_by_raw_confidences_promises_more_than_it_keeps(slope: float) -> None:
    """Why the device has a copy of the calibration: less is accepted than was expected."""
    scenario = Scenario(SHAPES["hybrid+parallel"], 64, 1024, slope=slope, steps=500)
    measured = surface(scenario.shape)
    by_plan, planned = Adaptive(scenario, measured).run()
    by_raw, raw = RankedByRawConfidences(scenario, measured).run()
    promised, kept = (c.counters.expectation_error for c in (raw, planned))
    assert promised is not None and kept is not None
    assert promised > kept + 0.02 and abs(kept) < 0.06
    assert by_plan > 1.01 * by_raw
