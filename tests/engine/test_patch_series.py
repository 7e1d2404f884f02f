"""The series for vLLM against the installed vLLM: it applies, imports, and its tests pass."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.patch_tree import apply_series, as_user, export_series
from vllm_ascend_spec.patches.vllm import SERIES

PREPARE = """from vllm_ascend_spec.engine import packages

packages.hide_mismatched()
"""


@pytest.fixture
def patched_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The installed vLLM with the series on it: links, and copies of what the series edits."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no vllm is installed to make the series against")
    package = Path(next(iter(spec.submodule_search_locations)))
    as_user(monkeypatch)
    patches = export_series("vllm", package.parent, tmp_path / "out")
    tree = tmp_path / "tree"
    tree.mkdir()
    subprocess.run(["cp", "-rs", str(package), str(tree / "vllm")], check=True)
    edited = {path for patch in SERIES.patches for path in patch.edits}
    for path in edited:
        content = (tree / path).read_bytes()
        (tree / path).unlink()
        (tree / path).write_bytes(content)
    apply_series(tree, patches, edited)
    (tree / "sitecustomize.py").write_text(PREPARE)
    return tree


def test_series_applies_and_its_own_tests_pass_on_the_patched_files(patched_vllm: Path) -> None:
    variables = os.environ | {"PYTHONPATH": str(patched_vllm), "OMP_NUM_THREADS": "1"}

    def python(*arguments: str) -> str:
        run = subprocess.run(
            [sys.executable, *arguments], cwd=patched_vllm, env=variables,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
        return run.stdout

    where = "import vllm.v1.attention.backends.gdn_attn as module; print(module.__file__)"
    assert str(patched_vllm) in python("-c", where)
    tests = [path for patch in SERIES.patches for path in patch.files]
    assert "4 passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
