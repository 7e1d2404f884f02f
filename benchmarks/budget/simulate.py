"""The planner against no speculation, every fixed K, and an oracle, in a simulated engine.

    python -m benchmarks.budget.simulate [--steps N] [--json PATH]

Tokens are credited by the true chance of the rows that were verified, so that the comparison is not
drowned in luck; the calibration sees drawn outcomes only. The first step counts like the last one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.budget.world import EASY, HARD, SHAPES, Acceptance, Shape, surface
from benchmarks.results import Result, Row, versions
from vllm_ascend_spec.budget.controller import BudgetController
from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.planner import Limits
from vllm_ascend_spec.budget.surface import StepKind, Surface
from vllm_ascend_spec.budget.survival import prefix_products, split

K = 7
FIXED = (1, 3, 5, 7)


@dataclass(frozen=True)
class Scenario:
    """One cell: a shape, a load, a context, and how wrong the raw confidences are."""

    shape: Shape
    requests: int
    context: int
    slope: float = 1.0
    offset: float = 0.0
    steps: int = 1500
    seed: int = 7
    profiles: tuple[tuple[float, ...], ...] = (EASY, HARD)

    def acceptance(self) -> Acceptance:
        return Acceptance(
            self.requests,
            self.seed,
            slope=self.slope,
            offset=self.offset,
            profiles=self.profiles,
        )


class Truth:
    """True step times in ms, from the noiseless surface."""

    def __init__(self, shape: Shape, requests: int, context: float) -> None:
        self.model = CostModel(surface(shape), requests, requests * (K + 1))
        self.requests, self.context = requests, context

    def target(self, draft_rows: int) -> float:
        return float(self.targets(draft_rows)[-1])

    def targets(self, draft_rows: int) -> np.ndarray:
        r = self.requests
        return self.model.verify(StepKind.FULL, r, r, draft_rows, r, self.context) / 1e6

    def drafter(self, count: int, depth: int) -> float:
        return self.model.drafter.prices(depth, self.context).item(count) / 1e6


def fixed(scenario: Scenario, draft_tokens: int) -> float:
    """Tokens per ms when every request verifies `draft_tokens` every step; 0 = no speculation."""
    truth = Truth(scenario.shape, scenario.requests, scenario.context)
    acceptance = scenario.acceptance()
    ms = truth.target(scenario.requests * draft_tokens)
    ms += truth.drafter(scenario.requests, draft_tokens) if draft_tokens else 0.0
    tokens = 0.0
    for _ in range(scenario.steps):
        acceptance.turnover()
        chances, _ = acceptance.draw()
        tokens += scenario.requests + chances[:, :draft_tokens].cumprod(axis=1).sum()
    return tokens / (ms * scenario.steps)


def oracle(scenario: Scenario) -> float:
    """Tokens per ms of brute force over all n and all sets of the m best requests, rates known."""
    truth = Truth(scenario.shape, scenario.requests, scenario.context)
    acceptance = scenario.acceptance()
    targets = truth.targets(scenario.requests * K)
    tokens = ms = 0.0
    # Few requests: every step of the others, or luck tells them apart. Many: brute force is slow.
    for _ in range(min(scenario.steps, 200 if scenario.requests > 32 else scenario.steps)):
        acceptance.turnover()
        chances, _ = acceptance.draw()
        survival = chances.cumprod(axis=1)
        order = np.argsort(-(1 / (1 + np.exp(-acceptance.rates))).cumprod(axis=1).sum(axis=1))
        best = (scenario.requests / targets[0], float(scenario.requests), targets[0])
        for depth in scenario.shape.depths:
            for count in sorted({1, 2, 4, *range(8, scenario.requests + 1, 8), scenario.requests}):
                if count > scenario.requests:
                    continue
                ranked = np.sort(survival[order[:count], :depth], axis=None)[::-1]
                gain = scenario.requests + ranked.cumsum()
                cost = targets[1 : gain.size + 1] + truth.drafter(count, depth)
                n = int((gain / cost).argmax())
                best = max(best, (gain[n] / cost[n], gain[n], cost[n]))
        tokens, ms = tokens + best[1], ms + best[2]
    return tokens / ms


@dataclass
class Adaptive:
    """The controller in the loop; confidences reach the host one step late, as in the engine."""

    scenario: Scenario
    measured: Surface
    timing_noise: float = 0.02

    def run(self) -> tuple[float, BudgetController]:
        """Tokens per ms, and the controller as it ended."""
        tokens, ms = self.trace()
        return float(tokens.sum() / ms.sum()), self.controller

    def trace(self) -> tuple[np.ndarray, np.ndarray]:
        """Credited tokens and true ms of every step."""
        s = self.scenario
        limits = Limits(K, s.requests, s.requests * (K + 1), depths=s.shape.depths)
        cost = CostModel(self.measured, s.requests, s.requests * (K + 1))
        self.controller = BudgetController(limits, cost, np.full(K, 0.7))
        self.truth = Truth(s.shape, s.requests, s.context)
        self.acceptance = s.acceptance()
        self.random = np.random.default_rng(s.seed + 1)
        self.slots = np.arange(s.requests)
        self.classes = np.zeros(s.requests, dtype=np.int64)
        self.drafted = np.zeros(s.requests, dtype=np.int64)
        self.late: Callable[[], None] | None = None
        return self.proceed(s.steps)

    def proceed(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Credited tokens and true ms of `steps` more steps."""
        tokens, ms = np.zeros(steps), np.zeros(steps)
        for step in range(steps):
            for slot in self.acceptance.turnover():
                self.controller.begin(int(slot))
            if self.late is not None:
                self.late()
            tokens[step], ms[step] = self._step()
        return tokens, ms

    def _step(self) -> tuple[float, float]:
        s, controller = self.scenario, self.controller
        drafted = self.drafted
        chances, confidence = self.acceptance.draw()
        everyone = np.ones(s.requests, dtype=bool)
        plan = controller.plan(self.slots, drafted, everyone, s.requests, s.requests, s.context)
        verified = self._split(confidence, drafted, plan.draft_rows)
        survival = chances.cumprod(axis=1)
        kept = np.arange(K) < verified[:, None]
        alive = (self.random.random(chances.shape) < chances) & kept
        accepted = alive.cumprod(axis=1).sum(axis=1)
        target_ms = self.truth.target(plan.draft_rows)
        seen_ms = target_ms * float(np.exp(self.timing_noise * self.random.standard_normal()))
        count = int(plan.draft_next.sum())
        drafter_ms = self.truth.drafter(count, plan.depth) if count else 0.0

        def arrive() -> None:
            depth = int(drafted.max(initial=0)) or None
            drafts = controller.record(self.slots, confidence, drafted, depth)
            controller.observe(drafts, drafted, verified, accepted)
            controller.observe_step(
                plan, s.requests, s.requests + int(accepted.sum()), seen_ms + drafter_ms
            )
            controller.observe_target(
                StepKind.FULL, plan.rows, plan.rows, s.requests, s.context, seen_ms
            )

        emitted = s.requests + float((survival * kept).sum())
        self.drafted = np.where(plan.draft_next, plan.depth, 0)
        self.late = arrive
        return emitted, target_ms + drafter_ms

    def _split(self, confidence: np.ndarray, drafted: np.ndarray, budget: int) -> np.ndarray:
        """What the device does with the fresh confidences."""
        scores = np.rint(np.clip(confidence, 0, 1) * 1023).astype(np.uint16)
        survival = prefix_products(self.controller.calibration.apply(scores, self.classes))
        return split(survival, drafted, budget).astype(np.int64)


def cell(scenario: Scenario) -> dict[str, float]:
    """All policies in one cell, tokens per ms."""
    rates = {f"K={k}" if k else "none": fixed(scenario, k) for k in (0, *FIXED)}
    rates["best fixed"] = max(rates.values())
    rates["oracle"] = oracle(scenario)
    rates["adaptive"], controller = Adaptive(scenario, surface(scenario.shape, noise=0.01)).run()
    error = controller.reliability.expected_calibration_error()
    rates["ece 1"] = float(error[0])
    return rates


def figures(case: str, rates: dict[str, float]) -> list[Row]:
    """The two figures of a cell that have a meaning outside of it."""
    return [
        Row(
            case=case,
            metric="adaptive over the best of none and fixed K",
            value=round(rates["adaptive"] / rates["best fixed"], 4),
            unit="x",
            baseline=round(rates["best fixed"], 4),
            bar=0.99,
        ),
        Row(
            case=case,
            metric="regret against the oracle",
            value=round(1.0 - rates["adaptive"] / rates["oracle"], 4),
            unit="share",
            better="lower",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.shapes:
        for context in (1024, 8192):
            for requests in options.loads:
                # A bad start: raw confidences far too timid, as untrained ones may be.
                scenario = Scenario(
                    SHAPES[name], requests, context, slope=0.5, offset=-1.0, steps=options.steps
                )
                rates = cell(scenario)
                case = f"{name} context {context} requests {requests}"
                rows += figures(case, rates)
                gain, regret = rows[-2].value, rows[-1].value
                shown = " ".join(f"{k} {v:.3f}" for k, v in rates.items())
                print(f"{case}: {gain:.3f}x regret {regret:.3f} | {shown}", flush=True)
    if options.json:
        result = Result(
            name="budget/simulate",
            command=f"python -m benchmarks.budget.simulate --steps {options.steps} "
            f"--json benchmarks/results/{options.json.name}",
            device="simulated",
            repeats=1,
            versions=versions("numpy"),
            rows=rows,
            notes="Simulated costs and acceptance, not a measurement of an engine. Every policy "
            "sees the same requests; the adaptive one starts from timid raw confidences.",
        )
        result.write(options.json)


if __name__ == "__main__":
    main()
