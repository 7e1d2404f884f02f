"""An arm of the speed benchmark in a process of its own, as the benchmark talks to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.acceptance import speculative_options
from benchmarks.engine.adaptive import compared, measure
from benchmarks.engine.cases import Case
from benchmarks.engine.driver import start
from vllm_ascend_spec.zoo import DRAFT_TOKENS, Zoo

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]

CASES = [Case(24, 4), Case(40, 1)]


def test_every_arm_of_a_case_is_measured_and_the_adaptive_one_counts(tmp_path: Path) -> None:
    zoo = Zoo()
    speculative = zoo.speculative_config("hybrid", "dspark", adaptive=True)
    assert speculative is not None

    def request(config: dict[str, object] | None) -> dict[str, object]:
        return {
            "model": str(zoo.target("hybrid")),
            "engine": {
                "speculative_config": config,
                "max_model_len": 1024,
                "additional_config": {
                    "ascend_spec": {"gdn_state": "replay" if config else "native"}
                },
            },
            "acceptance": config is not None,
        }

    arms = start(
        {
            "no speculation": request(None),
            "adaptive": request(speculative | speculative_options(DRAFT_TOKENS)),
        },
        tmp_path,
    )
    assert [arm.name for arm in arms] == ["no speculation", "adaptive"]
    for case in CASES:
        windows = {arm.name: measure(arm, case, repeats=2) for arm in arms}
        assert [len(found) for found in windows.values()] == [2, 2]
        for plain in windows["no speculation"]:
            emitted = plain["tokens_per_s"] * plain["step_ms"] * case.steps / 1e3
            assert emitted == pytest.approx(case.load * case.steps, rel=0.05)
        for window in windows["adaptive"]:
            counters = window["counters"]
            assert 0 < counters["accepted"] <= counters["verified"] <= counters["drafted"]
        ratios = [r for r in compared(windows, case, ["no speculation"]) if "over up" in r.metric]
        assert [row.case for row in ratios] == [f"{case}, adaptive"]
    for arm in arms:
        arm.close()


def test_an_arm_that_dies_is_left_out(tmp_path: Path) -> None:
    (arm,) = start(
        {"none": {"model": str(Zoo().target("hybrid")), "engine": {"max_model_len": 64}}}, tmp_path
    )
    # More steps than the context has room for: no request is left at the end of a window.
    assert measure(arm, Case(24, 1), repeats=1) == []
    assert "cache is too small" in arm.log.read_text()
