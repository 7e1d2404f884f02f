"""Rounds in which drafting does not pay: nothing is drafted, the drafter's cache is kept."""

from __future__ import annotations

import pytest
from conftest import RunArm, assert_answers_as_without_speculation, start_adaptive
from harness import decode_steps, differences

# A step costs nearly the same however many rows it verifies, and drafting costs two and a half
# steps: it pays where more than about two and a half draft tokens a request are accepted.
COSTS = {
    "ascend_spec": {
        "cpu": {
            "verify_cost_ms": [[1, 1.0], [64, 1.1]],
            "draft_cost_ms": [[1, 2.6], [8, 2.6]],
        }
    }
}
METHODS = ("mtp", "dflash", "dspark")


@pytest.fixture(scope="module", autouse=True)
def _started(run_arm: RunArm) -> None:
    start_adaptive(run_arm, METHODS, COSTS)


@pytest.mark.parametrize("method", METHODS)
def test_answers_stay_the_same_when_rounds_are_skipped(method: str, run_arm: RunArm):
    assert_answers_as_without_speculation(run_arm, method, COSTS)


@pytest.mark.parametrize("method", METHODS)
def test_the_plan_skips_and_comes_back(method: str, run_arm: RunArm):
    batches = run_arm("hybrid", method, adaptive=True, additional_config=COSTS)["batches"]
    steps = [
        step["verified"]
        for batch in batches.values()
        for request in decode_steps(batch)
        for step in request
    ]
    assert sum(verified == 0 for verified in steps) > 0, steps
    assert sum(verified > 0 for verified in steps) > 0, steps


def test_drafts_after_a_skipped_round_are_as_good_as_ever(run_arm: RunArm):
    """Without the context's keys and values the drafter would draft from holes."""
    always = run_arm("hybrid", "dflash", adaptive=True)["batches"]["mixed"]
    skipping = run_arm("hybrid", "dflash", adaptive=True, additional_config=COSTS)["batches"][
        "mixed"
    ]
    assert differences(always, skipping) == []
    assert _first_accepted(skipping) > 0.6 * _first_accepted(always)


def _first_accepted(batch: dict) -> float:
    """Share of verified rounds whose first draft token was accepted."""
    verified = [
        step["accepted"] > 0
        for request in decode_steps(batch)
        for step in request
        if step["verified"] > 0
    ]
    return sum(verified) / len(verified)
