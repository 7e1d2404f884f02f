"""Sampled tokens of every method, adaptive on, against the distributions they should come from.

8000 tokens an arm here; `python -m benchmarks.engine.sampled` takes 400,000, and compares the rows
with transformers' as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import chi_square, sampled
from vllm_ascend_spec.zoo import Zoo

TOKENS = 4000  # at each temperature
ARMS = [sampled.Arm(method, requests=64) for method in sampled.METHODS]
ARMS += [sampled.Arm("dspark", requests=64, sampled_drafts=True)]
FAULTS = ("bonus_from_the_row_before", "trimmed_as_rejected")
FAULTY = [
    sampled.Arm("mtp", requests=64, draft_rows=0.75, fault=f"sampling_faults:{fault}")
    for fault in FAULTS
]

# Block drafter, token by token, and drawn drafts always run.
ALWAYS = {"mtp", "dspark"}
TESTED = [
    arm if arm.method in ALWAYS else pytest.param(arm, marks=pytest.mark.thorough) for arm in ARMS
]
Verdicts = dict[str, chi_square.Verdict]


def run(arm: sampled.Arm, toy: Zoo, out: Path) -> tuple[dict[str, Any], Verdicts]:
    request = sampled.request_of(arm, toy, "hybrid", TOKENS, out)
    faults = {"PYTHONPATH": str(Path(__file__).parent)}
    found = sampled.run(request, timeout_s=400, environment=faults)
    columns = sampled.delivered(request, found, compare=False)
    return found | {"impossible": sampled.impossible(columns)}, sampled.verdicts(columns)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, toy: Zoo, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[sampled.Arm, Future[tuple[dict[str, Any], Verdicts]]]]:
    """Every arm that a selected test asks for, side by side on the cores that there are."""
    items = (getattr(item, "callspec", None) for item in request.session.items)
    selected = {call.params["arm"] for call in items if call and "arm" in call.params}
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    folder = tmp_path_factory.mktemp("sampled")
    yield {
        arm: pool.submit(run, arm, toy, folder / f"{index}.npz")
        for index, arm in enumerate([*ARMS, *FAULTY])
        if arm in selected
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("arm", TESTED, ids=lambda arm: arm.name)
def test_the_output_is_not_told_from_the_targets(arm: sampled.Arm, results: Any):
    found, verdicts = results[arm].result()
    assert sampled.streams_agree(found)
    assert len(verdicts) == 4 and found["impossible"] == 0
    for name, verdict in verdicts.items():
        assert verdict.tokens == pytest.approx(TOKENS, abs=sampled.NEW_TOKENS), name
        assert verdict.degrees > 10, name
        assert verdict.p_value > sampled.LIKELY, (name, verdict)


@pytest.mark.parametrize("arm", TESTED, ids=lambda arm: arm.name)
def test_drafts_are_accepted_rejected_and_trimmed_in_this_run(arm: sampled.Arm, results: Any):
    """Otherwise nothing was put to the test."""
    found, _ = results[arm].result()
    offset, verified, drafted = found["offset"], found["verified"], found["drafted"]
    assert (offset > 0).sum() > 50
    assert ((offset < verified) & (verified > 0)).sum() > 500
    assert ((offset == verified) & (verified < drafted)).sum() > 50


@pytest.mark.parametrize("arm", FAULTY, ids=FAULTS)
def test_a_fault_is_seen(arm: sampled.Arm, results: Any):
    _, verdicts = results[arm].result()
    assert min(verdict.p_value for verdict in verdicts.values()) < sampled.LIKELY / 100, verdicts
