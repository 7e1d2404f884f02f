"""The zoo's bars on a report made by hand."""

from __future__ import annotations

import pytest

from tools.zoo import evaluate
from vllm_ascend_spec.demo.records import (
    Agreement,
    AnswerRecord,
    ArmRecord,
    ArmRow,
    PositionRow,
    Report,
    StepRecord,
)

MIB = 2**20


def row(arm: str, acceptance_length: float = 4.0, auc: float | None = 0.9, real: int = 0) -> ArmRow:
    reference = arm == "none"
    position = PositionRow(position=1, reached=9, accepted=5, rate=5 / 9, survival=5 / 9, auc=auc)
    return ArmRow(
        arm=arm,
        title=arm,
        status="ok",
        answers=20,
        acceptance_length=1.0 if reference else acceptance_length,
        json_answers=20,
        json_valid=19,
        agreement=None if reference else Agreement(equal=20 - real, near_tie=0, real=real),
        positions=[] if reference else [position],
    )


def record(name: str, emitted: list[int]) -> ArmRecord:
    return ArmRecord(
        name=name,
        answers=[
            AnswerRecord(
                prompt_id=str(number),
                text="",
                token_ids=[],
                pieces=[],
                finished_by="stop",
                prefill_tokens=1,
                steps=[
                    StepRecord(
                        engine_step=0, drafted=7, verified=7, accepted=tokens - 1, emitted=tokens
                    )
                ],
            )
            for number, tokens in enumerate(emitted)
        ],
        confidence_source=None,
        counters={},
        load_seconds=1.0,
        generate_seconds=1.0,
        model_runner="V2",
        async_scheduling=True,
        versions={},
    )


def report(rows: list[ArmRow]) -> Report:
    return Report(
        command="",
        date="2026-11-30",
        device="CPU",
        model="hybrid",
        draft_tokens=7,
        max_tokens=8,
        prompts=[],
        versions={},
        seconds=1.0,
        speed_note="",
        near_tie_gap=0.25,
        rows=rows,
        arms=[record(row.arm, [2, 4, 4]) for row in rows],
    )


ALL = ("none", "mtp", "eagle3", "dflash", "dspark", "dflash2")


def missed(rows: list[ArmRow], weight_bytes: int = MIB) -> list[tuple[str, str]]:
    found = evaluate.bars(report(rows), weight_bytes)
    return [(row.case, row.metric) for row in found if row.met is False]


def test_a_good_zoo_misses_nothing():
    rows = [row(arm) for arm in ALL]
    assert missed(rows) == []
    assert evaluate.missing(report(rows)) == []


@pytest.mark.parametrize(
    ("arm", "below"),
    [("dspark", 2.99), ("dflash2", 2.99), ("dflash", 2.69), ("eagle3", 2.29), ("mtp", 2.29)],
)
def test_each_acceptance_bar_can_be_missed(arm: str, below: float):
    rows = [row(name, below if name == arm else 4.0) for name in ALL]
    assert missed(rows) == [(f"{arm} K=7", "acceptance length")]


def test_json_auc_weights_and_difference_bars_can_be_missed():
    broken = row("none")
    broken.json_valid = 18
    assert missed([broken])[0][0] == "no speculation"
    assert missed([row("dspark", auc=0.74)]) == [
        ("dspark position 1", "confidence AUC (5 accepted of 9)")
    ]
    assert missed([], 8 * MIB + 1) == [("all checkpoints", "weights")]
    assert missed([row("mtp", real=1)]) == [
        ("mtp K=7", "answers that really differ from no speculation")
    ]


def test_a_bar_without_a_figure_is_named_and_gets_no_number():
    rows = [row(arm, auc=None) for arm in ALL if arm != "eagle3"]
    absent = evaluate.missing(report(rows))
    assert absent[0] == "eagle3"
    assert absent[1].startswith("dspark confidence AUC at position 1")
    assert not any("AUC" in found.metric for found in evaluate.bars(report(rows), MIB))


def test_spread_of_equal_answers_is_nothing_and_of_unequal_ones_is_not():
    assert evaluate.spread(record("mtp", [3, 3, 3])) == 0
    assert evaluate.spread(record("mtp", [1, 8, 2, 7])) > 0.05
