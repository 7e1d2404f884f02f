"""Rounds that draft for a part of the batch: right drafts at the right requests, same answers."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import RunArm, assert_answers_as_without_speculation, start_adaptive
from harness import accepted_share

# Every request drafted for costs half a step, and verifying costs next to nothing: drafting pays
# for requests whose drafts are good, and for no others.
COSTS: dict[str, Any] = {
    "ascend_spec": {
        "cpu": {
            "verify_cost_ms": [[1, 1.0], [64, 1.1]],
            "draft_cost_ms": [[n, 0.55 * n] for n in range(1, 5)],
        }
    }
}
METHODS = ("mtp", "dspark")
MORE = ("eagle3", "dflash", "dflash2")
ALL = [*METHODS, *(pytest.param(method, marks=pytest.mark.thorough) for method in MORE)]


@pytest.fixture(scope="module", autouse=True)
def _started(run_arm: RunArm) -> None:
    start_adaptive(run_arm, METHODS, COSTS)


@pytest.mark.parametrize("method", ALL)
def test_answers_stay_the_same(method: str, run_arm: RunArm):
    assert_answers_as_without_speculation(run_arm, method, COSTS)


@pytest.mark.parametrize("method", ["dspark", pytest.param("mtp", marks=pytest.mark.thorough)])
def test_drafts_reach_the_requests_they_were_made_for(method: str, run_arm: RunArm):
    """With the drafts of a partial round given to the wrong rows, acceptance falls."""
    right = run_arm("hybrid", method, adaptive=True, additional_config=COSTS)
    wrong = run_arm(
        "hybrid",
        method,
        adaptive=True,
        additional_config=COSTS,
        mutation="partial_drafts_at_the_wrong_rows",
    )
    assert (
        accepted_share(right["batches"]["mixed"]) > accepted_share(wrong["batches"]["mixed"]) + 0.1
    )
