"""The demo end to end: real vLLM on a CPU, the zoo's models, two arms, two prompts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vllm_ascend_spec import demo
from vllm_ascend_spec.demo import session
from vllm_ascend_spec.demo.records import ArmRecord, Report
from vllm_ascend_spec.zoo import Zoo


@pytest.fixture(scope="module")
def files(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("demo")
    json_path, html_path = folder / "demo.json", folder / "demo.html"
    with pytest.MonkeyPatch.context() as patch:
        if zoo.root != Zoo().root:
            shutil.copy(Zoo().root / "prompts.jsonl", zoo.root)
            patch.setattr(session, "Zoo", lambda: zoo)
        assert demo.run(["none", "dspark-adaptive"], 2, json_path, html_path) == 0
    return json_path, html_path


@pytest.fixture(scope="module")
def report(files: tuple[Path, Path]) -> Report:
    return Report.model_validate_json(files[0].read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def adaptive(report: Report) -> ArmRecord:
    return next(arm for arm in report.arms if arm.name == "dspark-adaptive")


def test_both_arms_ran_on_model_runner_v2_with_async_scheduling(report: Report):
    assert [row.status for row in report.rows] == ["ok", "ok"]
    assert all(arm.model_runner == "V2" and arm.async_scheduling for arm in report.arms)


def test_recorder_agrees_with_the_counters_of_vllm(report: Report, adaptive: ArmRecord):
    row = next(row for row in report.rows if row.arm == "dspark-adaptive")
    counters = adaptive.counters
    assert row.drafted == counters["vllm:spec_decode_num_draft_tokens"]
    assert row.accepted == counters["vllm:spec_decode_num_accepted_tokens"]
    assert row.decode_steps - row.draftless_steps == counters["vllm:spec_decode_num_drafts"]
    # vLLM has no counter for what was trimmed; it would call these tokens rejected.
    assert 0 < row.accepted <= row.verified <= row.drafted


def test_steps_account_for_every_token_of_the_answers(report: Report):
    for arm in report.arms:
        for answer in arm.answers:
            emitted = sum(step.emitted for step in answer.steps)
            assert answer.prefill_tokens + emitted == len(answer.token_ids)
            assert "".join(answer.pieces).startswith(answer.text)


def test_confidence_head_speaks_for_every_drafted_token(adaptive: ArmRecord):
    assert adaptive.confidence_source == "confidence head"
    steps = [step for answer in adaptive.answers for step in answer.steps if step.drafted]
    assert all(len(step.confidence) == step.drafted for step in steps)
    values = [value for step in steps for value in step.confidence]
    assert all(0.0 <= value <= 1.0 for value in values)
    assert len(set(values)) > len(steps)


def test_page_shows_the_answers(files: tuple[Path, Path], report: Report):
    html = files[1].read_text(encoding="utf-8")
    assert html.count("<article>") == len(report.prompts) * len(report.arms)
    assert "figure-verified" in html
