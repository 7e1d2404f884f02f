"""The NPU benchmark's engine arm in a real engine: on a CPU, where its times mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.npu import run
from benchmarks.npu.arms import Answer, Plan, arms_of, differs
from vllm_ascend_spec.zoo import Zoo


@pytest.mark.slow
def test_dynamic_arm_answers_like_the_target_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    zoo = Zoo()
    drafter = zoo.speculative_config("dense", "dspark", 3, False)["model"]
    plan = Plan(
        model=str(zoo.target("dense")), drafters={"dspark": drafter}, batches=[2], draft_tokens=3,
        prompts=["Hello there", "JSON please"], output_tokens=6, rounds=1, repeats=1,
        check_tokens=6, platform="cpu", engine={"max_model_len": 256},
    )  # fmt: skip
    target_arm, _, dynamic_arm = arms_of(plan)
    target, dynamic = run.run_arm(target_arm), run.run_arm(dynamic_arm)
    assert isinstance(target, Answer), target
    assert isinstance(dynamic, Answer), dynamic
    assert differs(dynamic, target) is None
    assert dynamic.acceptance_length is not None and dynamic.acceptance_length >= 1
