"""Every method on both targets: speculation changes speed, never an answer."""

from __future__ import annotations

import pytest
from conftest import RunArm
from harness import decode_steps, differences, real_differences

from vllm_ascend_spec.zoo import DRAFT_TOKENS, Zoo

ARMS = [
    ("hybrid", "ngram", False),
    ("hybrid", "mtp", False),
    ("hybrid", "eagle3", False),
    ("hybrid", "dflash", False),
    ("hybrid", "dspark", False),
    ("hybrid", "dflash2", False),
    ("hybrid", "dspark", True),
    ("hybrid", "mtp", True),
    ("hybrid", "dflash", True),
    ("hybrid", "ngram", True),
    ("dense", "ngram", False),
    ("dense", "dspark", False),
    ("dense", "dspark", True),
]
# Adaptive arms whose fixed twins run anyway.
THOROUGH = {("hybrid", "mtp", True), ("hybrid", "dflash", True)}
NAMES = [f"{t}-{m}{'-adaptive' if a else ''}" for t, m, a in ARMS]
BATCHES = ("mixed", "single", "tail")
# Drafts with this method and a fixed length; every other arm must give its answers.
REFERENCE = "dspark"


@pytest.fixture(scope="module", autouse=True)
def _started(request: pytest.FixtureRequest, zoo: Zoo, run_arm: RunArm) -> None:
    """Begin with every arm that a selected test will ask for, so that all cores have work."""
    selected = {
        item.callspec.params["arm"]
        for item in request.session.items
        if "arm" in getattr(getattr(item, "callspec", None), "params", {})
    }
    for target in dict.fromkeys(target for target, _, _ in ARMS):
        chosen = [arm for arm in ARMS if arm in selected and arm[0] == target]
        for method in ("none", REFERENCE) if chosen else ():
            run_arm(target, method, wait=False)
        for _, method, adaptive in chosen:
            if method in zoo.methods(target):
                run_arm(target, method, adaptive=adaptive, wait=False)


@pytest.fixture(
    params=[
        pytest.param(arm, marks=pytest.mark.thorough) if arm in THOROUGH else arm for arm in ARMS
    ],
    ids=NAMES,
)
def arm(request: pytest.FixtureRequest, zoo: Zoo) -> tuple[str, str, bool]:
    target, method, adaptive = request.param
    if method not in zoo.methods(target):
        pytest.skip(f"the zoo has no {method} drafter for {target}")
    return target, method, adaptive


def test_runs_on_model_runner_v2_with_async_scheduling(arm: tuple[str, str, bool], run_arm: RunArm):
    target, method, adaptive = arm
    assert run_arm(target, method, adaptive=adaptive)["config"] == {
        "model_runner_v2": True,
        "async_scheduling": True,
        "prefix_caching": False,
        "adaptive": adaptive,
    }


@pytest.mark.parametrize("batch", BATCHES)
def test_equals_no_speculation_up_to_near_ties(
    arm: tuple[str, str, bool], batch: str, run_arm: RunArm
):
    target, method, adaptive = arm
    plain = run_arm(target, "none")["batches"][batch]
    speculated = run_arm(target, method, adaptive=adaptive)["batches"][batch]
    assert real_differences(plain, speculated) == []


@pytest.mark.parametrize("batch", BATCHES)
def test_equals_a_fixed_length_run_token_for_token(
    arm: tuple[str, str, bool], batch: str, run_arm: RunArm
):
    target, method, adaptive = arm
    fixed = run_arm(target, REFERENCE)["batches"][batch]
    other = run_arm(target, method, adaptive=adaptive)["batches"][batch]
    assert differences(fixed, other) == []


def test_accepted_and_rejected_drafts_both_occur(arm: tuple[str, str, bool], run_arm: RunArm):
    """Otherwise the comparisons above compare nothing."""
    target, method, adaptive = arm
    mixed = run_arm(target, method, adaptive=adaptive)["batches"]["mixed"]
    drafted = mixed["counters"]["vllm:spec_decode_num_draft_tokens"]
    accepted = mixed["counters"]["vllm:spec_decode_num_accepted_tokens"]
    assert drafted > accepted > 0 or method in ("eagle3", "dflash")
    assert drafted > 0


def test_prompts_are_prefilled_beside_rows_that_verify(arm: tuple[str, str, bool], run_arm: RunArm):
    target, method, adaptive = arm
    mixed = run_arm(target, method, adaptive=adaptive)["batches"]["mixed"]
    rows = DRAFT_TOKENS + 1
    assert any(rows in step and any(n > rows for n in step) for step in mixed["scheduled"])


def test_a_prompt_ends_in_a_chunk_of_one_token(arm: tuple[str, str, bool], run_arm: RunArm):
    target, method, adaptive = arm
    tail = run_arm(target, method, adaptive=adaptive)["batches"]["tail"]
    assert [1] in tail["scheduled"]


@pytest.mark.parametrize("target", ["hybrid", "dense"])
def test_adaptive_lengths_vary_within_a_step(target: str, run_arm: RunArm):
    mixed = run_arm(target, "dspark", adaptive=True)["batches"]["mixed"]
    lengths: dict[int, set[int]] = {}
    for steps in decode_steps(mixed):
        for step in steps:
            assert 0 <= step["accepted"] <= step["verified"] <= step["drafted"]
            lengths.setdefault(step["engine_step"], set()).add(step["verified"])
    assert sum(len(different) > 1 for different in lengths.values()) > 5
    assert {0, DRAFT_TOKENS} < set.union(*lengths.values())
