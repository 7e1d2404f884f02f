"""The plugin's adaptive manager against what the runner does with its answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def played() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("manager_case.py"))],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_worked_example_end_to_end(played: dict[str, Any]):
    worked = played["worked"]
    assert worked["budget"] == 8 and worked["total"] == 11
    assert worked["lengths"] == [5, 4, 2]
    assert worked["query_start_loc"][:4] == [0, 5, 9, 11]
    assert worked["cu_num_logits"] == [0, 5, 9, 11]
    # The host knows the total and splits it evenly; the tail of a graph repeats the total.
    assert sum(worked["host"]) == 11 and worked["query_start_loc"][4:] == [11]


def test_a_request_that_opted_out_keeps_its_draft_whole(played: dict[str, Any]):
    assert played["opted_out"]["lengths"][2] == 5
    assert sum(played["opted_out"]["lengths"]) == 11


def test_a_draft_with_nan_confidences_is_verified_whole_and_counted(played: dict[str, Any]):
    assert played["nan"]["lengths"][0] == 5
    assert sum(played["nan"]["lengths"]) == 11
    assert played["invalid"] == 4


def test_a_row_layout_is_sent_only_where_it_differs_from_the_step_before(played: dict[str, Any]):
    assert played["layouts"] == [1, 1, 1, 2, 3]


def test_rows_are_ranked_by_calibrated_chances(played: dict[str, Any]):
    """Equal confidences, three ways to sample: mild sampling fails more, free sampling less."""
    before, after = played["calibrated"]
    assert before == [4, 4, 3]
    assert after == [5, 1, 5]


def test_where_drafts_are_drawn_the_total_does_not_depend_on_them(played: dict[str, Any]):
    """A confidence depends on the draft tokens before it, and through the total on all of them."""
    usual, unusual = played["drawn and sampled"]
    assert usual == unusual
    for harmless in ("drawn, greedy", "likeliest and sampled"):
        usual, unusual = played[harmless]
        assert usual > unusual


def test_a_skipped_round_has_nothing_to_verify(played: dict[str, Any]):
    assert played["skipped"]["budget"] == 0
    assert played["skipped"]["lengths"] == [1, 1, 1]


def test_trimmed_is_not_rejected(played: dict[str, Any]):
    counters = played["counters"]
    assert counters["verified"] == 8 + 8 + 8
    assert counters["drafted"] > counters["verified"]
    assert counters["accepted"] == 3 + 2 + 0
