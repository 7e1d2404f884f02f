"""Rounds that draft fewer tokens than K: the length that pays, the same answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RunArm, assert_answers_as_without_speculation, start_adaptive
from harness import accepted_share

# A draft token costs a third of a step and verifying next to nothing: the first few pay, all seven
# do not.
COSTS: dict[str, Any] = {
    "ascend_spec": {
        "draft_lengths": [1, 2, 4],
        "cpu": {
            "verify_cost_ms": [[1, 1.0], [64, 1.1]],
            "draft_cost_ms": [[1, 2.3], [8, 2.3]],
        },
    }
}
METHODS = ("mtp",)
ALL = [*METHODS, pytest.param("eagle3", marks=pytest.mark.thorough)]


@pytest.fixture(scope="module", autouse=True)
def _started(run_arm: RunArm) -> None:
    start_adaptive(run_arm, METHODS, COSTS)


@pytest.mark.parametrize("method", ALL)
def test_answers_stay_the_same(method: str, run_arm: RunArm):
    assert_answers_as_without_speculation(run_arm, method, COSTS)


@pytest.mark.parametrize("method", ALL)
def test_the_plan_picks_shorter_drafts_where_they_pay(method: str, run_arm: RunArm):
    batches = run_arm("hybrid", method, adaptive=True, additional_config=COSTS)["batches"]
    lengths = [length for batch in batches.values() for length in batch["lengths"]]
    assert set(lengths) <= {1, 2, 4, 7}
    assert sum(length < 7 for length in lengths) > len(lengths) / 2, lengths


@pytest.mark.thorough
@pytest.mark.parametrize("method", ALL)
def test_nothing_is_verified_that_a_short_round_did_not_draft(method: str, run_arm: RunArm):
    """Taken for whole, a short draft ends in tokens of an earlier one, and acceptance falls."""
    right, wrong = (
        run_arm("hybrid", method, adaptive=True, additional_config=COSTS, mutation=mutation)
        for mutation in (None, "short_drafts_taken_for_whole")
    )
    assert (
        accepted_share(right["batches"]["mixed"]) > accepted_share(wrong["batches"]["mixed"]) + 0.05
    )


def test_graphs_are_captured_for_every_length_once():
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    from vllm_ascend_spec.engine.partial_recursion import capture_lengths

    shape = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=8, num_reqs=8)
    graphs = SimpleNamespace(_capture_descs={CUDAGraphMode.FULL: [shape]})
    for _ in range(2):  # vLLM may capture a first time to see how much memory that takes
        capture_lengths(graphs, (1, 2, 7))
    found = graphs._capture_descs[CUDAGraphMode.FULL]
    assert [shape.num_speculative_tokens for shape in found] == [7, 2]
    assert all(shape.num_tokens == 8 for shape in found)
