"""The replay layout on the CPU engine: answers, pages, and that its tests can fail."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from conftest import RunArm
from harness import EngineError, decode_steps, differences, real_differences

REPLAY = {"additional_config": {"ascend_spec": {"gdn_state": "replay"}}}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("batch", ["mixed", "single", "tail"])
def test_answers_equal_those_without_speculation(run_arm: RunArm, batch: str, adaptive: bool):
    """Mixed prompt and verification rows, batch 1, and a last chunk of one token."""
    plain = run_arm("hybrid", "none")["batches"][batch]
    replayed = run_arm("hybrid", "dspark", adaptive=adaptive, **REPLAY)["batches"][batch]
    assert real_differences(plain, replayed) == []


def test_schedule_holds_the_hard_cases(run_arm: RunArm):
    """Rows of many lengths, steps without drafts after an acceptance, flushes (more than 32)."""
    steps = decode_steps(run_arm("hybrid", "dspark", adaptive=True, **REPLAY)["batches"]["mixed"])
    assert len({step["verified"] for request in steps for step in request}) > 3
    assert any(
        before["accepted"] > 0 and after["verified"] == 0
        for request in steps
        for before, after in pairwise(request)
    )
    assert any(sum(1 + step["accepted"] for step in request) > 25 for request in steps)


@pytest.mark.parametrize("mutation", ["replay_never_advances", "replay_keeps_rejected_rows"])
def test_wrong_cursors_are_noticed(run_arm: RunArm, mutation: str):
    plain = run_arm("hybrid", "none")["batches"]["mixed"]
    wrong = run_arm("hybrid", "dspark", adaptive=True, mutation=mutation, **REPLAY)
    assert real_differences(plain, wrong["batches"]["mixed"])


def test_preempted_requests_start_again(run_arm: RunArm, batches: dict[str, Any]):
    """A cache too small for all: a request is thrown out and comes back with fresh cursors."""
    asked = {"mixed": batches["mixed"]}
    small = {"num_gpu_blocks_override": 9}
    plain = run_arm("hybrid", "none")["batches"]["mixed"]
    tight = run_arm("hybrid", "dspark", adaptive=True, asked=asked, **REPLAY, **small)
    assert real_differences(plain, tight["batches"]["mixed"]) == []


def test_what_stands_against_it_is_named(run_arm: RunArm):
    with pytest.raises(EngineError, match=r"gdn_state is \"replay\", and nothing is drafted"):
        run_arm("hybrid", "none", **REPLAY)


def test_native_and_replay_agree(run_arm: RunArm):
    native = run_arm("hybrid", "dspark", adaptive=True)["batches"]["single"]
    replayed = run_arm("hybrid", "dspark", adaptive=True, **REPLAY)["batches"]["single"]
    assert len(differences(native, replayed)) <= 1
