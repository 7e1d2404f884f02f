"""`vllm-ascend-spec doctor` on the double of an NPU, and on a host whose NPUs are gone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from npu_double import harness

WHY_NOT = harness.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

DOCTOR = "import sys; sys.argv = ['', 'doctor', '--json']; from vllm_ascend_spec.cli import main"


def doctor(folder: Path, **variables: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report."""
    done = harness.python(folder, "-c", f"{DOCTOR}; main()", **variables)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_npu_and_its_lane_are_named(tmp_path: Path):
    code, report = doctor(tmp_path)
    assert code == 0 and report["usable"] and report["problems"] == []
    assert (report["platform"], report["device"]) == ("ascend", "1 x Ascend910B3")
    assert report["lane"] == "L1"
    assert "npu_fused_infer_attention_score_v2_sink" in report["lane_reason"]
    runs = {
        cell["method"] for cell in report["matrix"] if cell["feature"] == "hybrid" and cell["ok"]
    }
    assert runs == {"mtp", "eagle3", "dflash", "dspark"}


def test_without_an_npu_it_says_so(tmp_path: Path):
    code, report = doctor(tmp_path, FAKE_NPU_COUNT="0")
    assert code == 1 and not report["usable"]
    assert "torch_npu sees no NPU" in report["problems"][0]
