"""The NPU benchmark without an NPU: its dry run, its judgement of answers, its tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.npu import run, tables
from benchmarks.npu.arms import Answer, Arm, Plan, arms_of, differs

ROOT = Path(__file__).parents[2]
PLAN = Plan(
    model="target", drafters={"dspark": "d", "eagle3": "e"}, batches=[128, 256], draft_tokens=9,
    prompts=["a"], engine={"additional_config": {"other": 1}},
)  # fmt: skip


def test_dry_run_checks_every_operator_and_prints_both_tables() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/npu/run.py", "--dry-run"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    operators = ("max_softmax", "pack_rows", "draft_inputs DSpark", "draft_inputs DFlash",
                 "conv_verify", "gdn_verify native", "gdn_verify replay")  # fmt: skip
    checked = [line for line in done.stdout.splitlines() if line.endswith("equals its oracle")]
    assert [next(o for o in operators if line.startswith(o)) for line in checked] == [*operators]
    assert "BS 256 dspark dynamic: {" in done.stdout and '"adaptive": true' in done.stdout
    assert "| DSpark | not run | 2614 tok/s | not run | 3120 tok/s, 1.29x |" in done.stdout
    assert " us" not in done.stdout, "an interpreter's time is no figure"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dry-run", "--drafter", "mtp=x"], "write METHOD=DIR, METHOD one of dspark"),
        (["--dry-run", "--engine", "{"], "--engine is not JSON"),
        (["--dry-run", "--prompts", "missing.jsonl"], "--prompts missing.jsonl: no such file"),
        ([], "run on an NPU host, or with --dry-run"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.parse(arguments)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_arms_are_the_tables_and_lengths_are_the_plugins_option() -> None:
    names = [arm.name for arm in arms_of(PLAN)]
    one = ["none", "dspark fixed", "dspark dynamic", "eagle3 fixed", "eagle3 dynamic"]
    assert names == [f"BS {batch} {name}" for batch in (128, 256) for name in one]
    arguments = Arm(batch=256, method="dspark", dynamic=True, plan=PLAN).llm_arguments()
    assert arguments["additional_config"] == {"other": 1, "ascend_spec": {"adaptive": True}}
    assert arguments["speculative_config"]["num_speculative_tokens"] == 9
    assert arguments["max_num_seqs"] == 256
    alone = Arm(batch=128, method="none", dynamic=False, plan=PLAN).llm_arguments()
    assert "speculative_config" not in alone


def answer(tokens: list[int], speed: float = 100.0, length: float | None = None) -> Answer:
    return Answer(check_tokens=[tokens], tokens_per_s=[speed], acceptance_length=length)


TARGET = Answer(
    check_tokens=[[5, 6, 7]],
    check_logprobs=[[{5: -0.1}, {6: -0.7, 8: -0.9, 9: -1.5}, {7: -0.1}]],
    tokens_per_s=[2000.0, 2411.0, 2500.0],
)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_dynamic_arm_plans_with_costs_measured_on_its_own_engine(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    asked: list[tuple[str, Arm]] = []

    def child(what: str, arm: Arm, out: Path) -> None:
        asked.append((what, arm))
        out.write_text(answer([1]).model_dump_json() if what == "answer" else "{}")

    monkeypatch.setattr(run, "_child", child)
    arm = Arm(batch=2, method="dspark", dynamic=dynamic, plan=PLAN)
    assert run.run_arm(arm) == answer([1])
    assert [what for what, _ in asked] == (["surface"] if dynamic else []) + ["answer"]
    options = [a.llm_arguments()["additional_config"]["ascend_spec"] for _, a in asked]
    assert all(found["adaptive"] is dynamic for found in options)
    assert ["cost_surface" in found for found in options] == ([False, True] if dynamic else [False])


def test_an_arm_whose_costs_cannot_be_measured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_child", lambda what, arm, out: f"failed: {what}")
    arm = Arm(batch=2, method="dspark", dynamic=True, plan=PLAN)
    assert run.run_arm(arm) == "failed: surface"


def test_only_near_ties_may_differ_from_the_target() -> None:
    assert differs(answer([5, 6, 7]), TARGET) is None
    assert differs(answer([5, 8, 1]), TARGET) is None, "after a near-tie contexts differ"
    assert "token 1: 9 for 6, gap 0.80" in str(differs(answer([5, 9, 7]), TARGET))
    assert "further than the best tokens" in str(differs(answer([4, 6, 7]), TARGET))
    assert "2 tokens, the target gives 3" in str(differs(answer([5, 6]), TARGET))


def test_a_wrong_arm_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLAN.model_copy(update={"batches": [256]})
    answers = {
        "BS 256 none": TARGET,
        "BS 256 dspark fixed": answer([5, 6, 7], 2614.0, 4.5),
        "BS 256 dspark dynamic": answer([5, 9, 7], 9999.0),
        "BS 256 eagle3 fixed": "failed: no such operator",
        "BS 256 eagle3 dynamic": answer([5, 8, 1], 2500.0),
    }
    monkeypatch.setattr(run, "run_arm", lambda arm: answers[arm.name])
    seen, wrong = run.run_engines(plan)
    assert [problem.split(":")[0] for problem in wrong] == [
        "BS 256 dspark dynamic", "BS 256 eagle3 fixed"
    ]  # fmt: skip
    text = tables.table(256, seen)
    assert "| target alone | 2411 tok/s, 1.00x | 2411 tok/s, 1.00x |  |  |" in text
    assert "| DSpark | 2614 tok/s, 1.08x, length 4.50 | 2614 tok/s | wrong answers" in text
    assert "9999" not in text
    rows = {row.case: row for row in run.engine_rows(plan, seen)}
    assert set(rows) == {"BS 256 none", "BS 256 dspark fixed", "BS 256 eagle3 dynamic"}
    assert rows["BS 256 dspark fixed"].value == pytest.approx(2614 / 2411)


def test_an_arm_without_the_target_alone_has_nothing_to_be_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = PLAN.model_copy(update={"batches": [128], "drafters": {"dspark": "d"}})
    monkeypatch.setattr(
        run, "run_arm", lambda arm: "failed: x" if arm.method == "none" else answer([1])
    )
    seen, wrong = run.run_engines(plan)
    assert len(wrong) == 3 and run.engine_rows(plan, seen) == []
