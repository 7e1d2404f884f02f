"""The figures of the demo on step records made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from vllm_ascend_spec.demo import answers, metrics
from vllm_ascend_spec.demo.records import AnswerRecord, StepRecord


def step(
    verified: int,
    accepted: int,
    *,
    drafted: int = 4,
    emitted: int | None = None,
    confidence: list[float] | None = None,
) -> StepRecord:
    return StepRecord(
        engine_step=0,
        drafted=drafted,
        verified=verified,
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
        confidence=confidence or [],
    )


def answer(prompt_id: str, token_ids: list[int], gaps: list[float] | None = None) -> AnswerRecord:
    return AnswerRecord(
        prompt_id=prompt_id,
        text="",
        token_ids=token_ids,
        pieces=["x"] * len(token_ids),
        finished_by="stop",
        prefill_tokens=1,
        steps=[],
        gaps=gaps,
    )


def test_acceptance_length_counts_steps_without_a_draft():
    steps = [step(4, 3), step(0, 0, drafted=0), step(0, 0, drafted=0), step(4, 1)]
    total = metrics.totals(steps)
    assert total.draftless == 2
    assert total.acceptance_length == pytest.approx((4 + 1 + 1 + 2) / 4)
    assert total.acceptance_length_drafted == pytest.approx(1 + 4 / 2)


def test_acceptance_length_counts_only_tokens_of_the_answer():
    cut = step(4, 4, emitted=2)
    assert metrics.totals([step(4, 1), cut]).acceptance_length == pytest.approx((2 + 2) / 2)


def test_no_step_has_no_acceptance_length():
    assert metrics.totals([]).acceptance_length is None
    assert metrics.totals([step(0, 0, drafted=0)]).acceptance_length_drafted is None


def test_trimmed_is_not_rejected():
    total = metrics.totals([step(2, 1), step(0, 0), step(4, 4)])
    assert (total.drafted, total.verified, total.accepted) == (12, 6, 5)
    assert (total.trimmed, total.rejected) == (6, 1)


def test_positions_leave_out_trimmed_and_unreached_steps():
    steps = [
        step(2, 2),  # positions 3 and 4 were trimmed
        step(4, 0),  # position 1 rejected: 2 to 4 not reached
        step(4, 3),  # position 4 rejected
        step(0, 0),  # all trimmed
    ]
    rows = metrics.positions(steps, 4)
    assert [(row.reached, row.accepted) for row in rows] == [(3, 2), (2, 2), (1, 1), (1, 0)]
    assert [row.survival for row in rows] == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0])


def test_position_past_every_trim_has_no_rate():
    rows = metrics.positions([step(1, 1)], 3)
    assert [row.rate for row in rows] == [1.0, None, None]
    assert rows[2].survival is None


def test_answer_end_censors_positions_past_it():
    # Five tokens were sampled and two belong to the answer: positions 3 and 4 judged nothing.
    rows = metrics.positions([step(4, 4, emitted=2)], 4)
    assert [row.reached for row in rows] == [1, 1, 0, 0]


def test_end_on_the_bonus_token_censors_nothing():
    rows = metrics.positions([step(4, 2, emitted=3)], 4)
    assert [(row.reached, row.accepted) for row in rows] == [(1, 1), (1, 1), (1, 0), (0, 0)]


@pytest.mark.parametrize("levels", [3, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_auc_equals_sklearn_with_and_without_ties(seed: int, levels: int):
    draw = np.random.default_rng(seed)
    accepted = draw.random(200) < 0.7
    confidence = np.round((draw.random(200) + 0.4 * accepted) * levels) / levels
    assert metrics.auc(confidence, accepted) == pytest.approx(roc_auc_score(accepted, confidence))


def test_auc_needs_both_outcomes_and_every_confidence():
    one = np.array([0.2, 0.9])
    assert metrics.auc(one, np.array([True, True])) is None
    assert metrics.auc(np.array([0.2, np.nan]), np.array([True, False])) is None


def test_position_auc_takes_reached_steps_only():
    steps = [
        step(2, 2, confidence=[0.9, 0.8, 0.0, 0.0]),
        step(2, 1, confidence=[0.9, 0.3, 0.0, 0.0]),
        # Rejected at position 1: its confidence at position 2 must not count.
        step(2, 0, confidence=[0.1, 0.99, 0.0, 0.0]),
    ]
    rows = metrics.positions(steps, 2)
    assert [row.auc for row in rows] == [1.0, 1.0]


def test_reliability_bins_hold_all_reached_positions():
    steps = [step(2, 1, confidence=[0.95, 0.25, 0.5, 0.5]), step(1, 1, confidence=[1.0, 0, 0, 0])]
    rows = metrics.reliability(steps, 4)
    filled = {round(row.low, 1): row for row in rows if row.count}
    assert sum(row.count for row in rows) == 3
    assert filled[0.9].count == 2 and filled[0.9].accepted == 1.0
    assert filled[0.9].confidence == pytest.approx(0.975)
    assert filled[0.2].accepted == 0.0
    assert metrics.calibration_error(rows) == pytest.approx((2 * 0.025 + 0.25) / 3)


def test_no_confidence_no_reliability():
    assert metrics.reliability([step(4, 2)], 4) == []
    assert metrics.calibration_error([]) is None


@pytest.mark.parametrize(
    ("found", "verdict", "position"),
    [
        ([1, 2, 3], "equal", None),
        ([1, 9, 9], "near-tie", 1),
        ([1, 2, 9], "real", 2),
        ([1, 2], "real", 2),
    ],
)
def test_first_difference_decides(found: list[int], verdict: str, position: int | None):
    comparison = answers.compare([1, 2, 3], [3.0, answers.NEAR_TIE_GAP, 0.26], found)
    assert (comparison.verdict, comparison.position) == (verdict, position)


def test_agreement_names_prompts_and_takes_a_missing_answer_for_real():
    reference = [answer("a", [1, 2], [0.1, 2.0]), answer("b", [1], [1.0]), answer("c", [1], [1.0])]
    result = answers.agreement(reference, [answer("a", [3, 2]), answer("b", [2])])
    assert (result.equal, result.near_tie, result.real) == (0, 1, 2)
    assert result.real_prompts == ["b", "c"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"n": 1}', (True, True)),
        ('{"n": "one"}', (True, False)),
        ('{"n": 1', (False, False)),
        ("", (False, False)),
    ],
)
def test_json_and_schema_are_told_apart(text: str, expected: tuple[bool, bool]):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert answers.json_verdict(text, schema) == expected
