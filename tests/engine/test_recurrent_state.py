"""Recurrent state on the CPU engine: the cases in which vLLM 0.32's CPU operators fail.

Each case is shown to occur, to be right with the plugin's operators, and to go wrong with the
fault put in.
"""

from __future__ import annotations

from itertools import pairwise

from conftest import RunArm
from harness import EngineError, decode_steps, differences, real_differences


def test_rows_of_different_lengths_are_right(run_arm: RunArm):
    """vLLM's roll of the convolution window holds only for rows of K + 1 tokens."""
    plain = run_arm("hybrid", "none")["batches"]["mixed"]
    ragged = run_arm("hybrid", "dspark", adaptive=True)["batches"]["mixed"]
    verified = {step["verified"] for steps in decode_steps(ragged) for step in steps}
    assert len(verified) > 3
    assert real_differences(plain, ragged) == []


def test_step_without_drafts_after_an_acceptance_is_right(run_arm: RunArm):
    """vLLM's operator refuses it: num_accepted_tokens must be in [1, seqlen]."""
    plain = run_arm("hybrid", "none")["batches"]["mixed"]
    adaptive = run_arm("hybrid", "dspark", adaptive=True)["batches"]["mixed"]
    hits = sum(
        before["accepted"] > 0 and after["verified"] == 0
        for steps in decode_steps(adaptive)
        for before, after in pairwise(steps)
    )
    assert hits > 0
    assert real_differences(plain, adaptive) == []


def test_last_chunk_of_one_token_is_right(run_arm: RunArm):
    """On Model Runner V1 vLLM's operator stops: tensor must be contiguous at last dimension."""
    plain = run_arm("hybrid", "none")["batches"]["tail"]
    speculated = run_arm("hybrid", "mtp")["batches"]["tail"]
    assert [1] in speculated["scheduled"]
    assert real_differences(plain, speculated) == []


def test_upstream_operators_fail_on_rows_of_different_lengths(run_arm: RunArm):
    plain = run_arm("hybrid", "none")["batches"]["mixed"]
    try:
        upstream = run_arm("hybrid", "dspark", adaptive=True, mutation="upstream_gdn_operators")
    except EngineError as failure:
        assert "gdn_attention.py" in str(failure)
    else:
        assert real_differences(plain, upstream["batches"]["mixed"])


def test_dropping_the_handling_of_draftless_rows_is_noticed(run_arm: RunArm):
    """The corruption test can fail: the same comparison, with the published fault put in."""
    plain = run_arm("hybrid", "none")["batches"]["mixed"]
    right = run_arm("hybrid", "dspark", adaptive=True)["batches"]["mixed"]
    wrong = run_arm("hybrid", "dspark", adaptive=True, mutation="zero_draft_rows_as_plain_decode")[
        "batches"
    ]["mixed"]
    assert differences(right, wrong)
    assert real_differences(plain, wrong)
