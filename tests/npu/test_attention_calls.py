"""Every attention call that vllm-ascend makes on the double passes the plugin's checks."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from npu_double import harness
from npu_double.cases import case

pytestmark = pytest.mark.skipif(harness.why_not() is not None, reason=str(harness.why_not()))
OPERATOR = "npu_fused_infer_attention_score"


def run(folder: Path, target: str, method: str, graphs: bool, mutation: str) -> dict[str, Any]:
    base = case(target, method, graphs=graphs, mutation=mutation)
    small = replace(base, prompts=base.prompts[:3], max_tokens=(8, 6, 8))
    request, answer = folder / "request.json", folder / "answer.json"
    asked = asdict(small) | {"vllm_ascend": os.environ["VLLM_ASCEND_SRC"]}
    request.write_text(json.dumps(asked))
    script = Path(__file__).with_name("checked_attention.py")
    done = harness.python(folder, str(script), str(request), str(answer))
    assert answer.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(answer.read_text())


@pytest.mark.parametrize(
    ("target", "method", "graphs"),
    [("hybrid", "mtp", False), ("dense", "dspark", False), ("dense", "dspark", True)],
)
def test_the_engines_calls_pass(tmp_path: Path, target: str, method: str, graphs: bool) -> None:
    answer = run(tmp_path, target, method, graphs, "checked")
    assert answer["error"] is None, answer["error"]["traceback"][-3000:]
    calls = sum(n for name, n in answer["operators"].items() if OPERATOR in name)
    assert calls > 10, answer["operators"]


def test_a_wrong_length_is_refused_before_the_call(tmp_path: Path) -> None:
    answer = run(tmp_path, "dense", "dspark", False, "spoiled")
    assert answer["error"]["type"] == "AttentionArgumentError"
    assert "kv_lengths gives request 0" in answer["error"]["message"]
