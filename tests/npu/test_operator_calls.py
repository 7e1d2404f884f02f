"""Every torch_npu call of the package against the real library, on meta tensors.

Schema and shape only: no kernel runs, and nothing is said of what CANN accepts. Needs the
environment of `tools/npu_env.sh double`.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROOMS = ("vllm_ascend_spec", "kernels", "graphs")
ROOTS = ("torch_npu.", "torch.npu.", "torch.ops.npu.")
# Operators whose arguments meta_calls.py builds and checks.
CHECKED = {"npu_fused_infer_attention_score", "_npu_fused_infer_attention_score_get_max_workspace"}


def environment() -> Path:
    """Where `tools/npu_env.sh double` put its environment."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    default = Path(cache_home, "vllm_ascend_spec", "npu_double")
    return Path(os.environ.get("VLLM_ASCEND_SPEC_NPU_DOUBLE") or default)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain of names, or an empty string."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def names_in(source: str) -> set[str]:
    """Names of the Ascend extension in a source, without what is looked up in them further."""
    found = {dotted(node) for node in ast.walk(ast.parse(source))}
    found = {name for name in found if name.startswith(ROOTS) and name + "." not in ROOTS}
    return {n for n in found if not any(other.startswith(n + ".") for other in found)}


@cache
def package_names() -> tuple[str, ...]:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return tuple(sorted(set().union(*(names_in(path.read_text("utf-8")) for path in files))))


@cache
def seen() -> dict[str, Any]:
    names = Path(tempfile.gettempdir(), f"vllm_ascend_spec_names_{os.getpid()}.json")
    names.write_text(json.dumps(package_names()))
    try:
        return with_torch_npu(str(HERE / "meta_calls.py"), str(names))
    finally:
        names.unlink()


def with_torch_npu(*arguments: str, **variables: str) -> dict[str, Any]:
    """What a child with the real torch_npu over the fake AscendCL prints, as JSON."""
    python, libraries = environment() / "bin/python", environment() / "fakeacl"
    if not (libraries / "libascendcl.so").exists():
        pytest.skip(f"no torch_npu in {environment()}: run `tools/npu_env.sh double`")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TORCH"))}
    own = {
        "PYTHONPATH": f"{ROOT}:{HERE}", "LD_LIBRARY_PATH": str(libraries),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TASK_QUEUE_ENABLE": "0",  # calls are made where they are seen, not by another thread
    }  # fmt: skip
    run = subprocess.run(
        [str(python), *arguments],
        capture_output=True, text=True, timeout=300, env=inherited | own | variables,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout[run.stdout.index("{") :])


@pytest.mark.parametrize("case", ["verify", "window", "draft block", "prompt"])
def test_attention_takes_the_arguments(case: str) -> None:
    answer = seen()["cases"][case]
    assert answer["shape"] == answer["rows"] and answer["dtype"] == "torch.bfloat16"
    assert answer["workspace"] == answer["out"] == []


def test_the_library_itself_accepts_what_the_builder_refuses() -> None:
    """Why the builder checks: lengths that do not cover the rows, heads that do not divide."""
    assert seen()["cases"]["accepted though wrong"]["shape"] == [11, 8, 128]


def test_lengths_on_the_device_are_waited_for_one_by_one(tmp_path: Path) -> None:
    """Why there is no lane L2: attention takes a device tensor, and then waits for every element.

    Two requests, so four lengths; lists on the host cost nothing.
    """
    trace = str(tmp_path / "calls.txt")
    found = with_torch_npu("-m", "npu_double.device_lengths", FAKE_ACL_TRACE=trace)
    assert len(found) == 2
    for operator, calls in found.items():
        assert calls == {"host": [], "device": ["SynchronizeStream"] * 4}, operator


def test_every_name_that_the_package_uses_exists() -> None:
    missing = [name for name, kind in seen()["names"].items() if kind is None]
    assert missing == [], f"torch_npu {seen()['torch_npu']} has no {missing}"


def test_every_operator_call_is_checked() -> None:
    called = {n.rsplit(".", 1)[1] for n, kind in seen()["names"].items() if kind == "operator"}
    assert called - CHECKED - {"out", "default"} == set()


def test_the_scan_sees_calls_and_not_their_modules() -> None:
    source = "import torch\nx = torch.ops.npu.npu_swiglu(y)\ns = torch.npu.Stream()\nz = torch.add"
    assert names_in(source) == {"torch.ops.npu.npu_swiglu", "torch.npu.Stream"}
