"""The series for vllm-ascend against a given tree: applied, imported, its tests run, its values.

On the double: nothing here has run on an NPU.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from npu_double import harness

from tests.patch_tree import apply_series, as_user, export_series, git
from vllm_ascend_spec.patches.vllm_ascend import SERIES

EDITED = {path for patch in SERIES.patches for path in patch.edits}
ADDED = {path for patch in SERIES.patches for path in patch.files}
# Upstream's own tests of the files that the series edits.
NEIGHBOURS = (
    "tests/ut/ops/test_gdn_attn_builder.py", "tests/ut/spec_decode/test_utils.py",
    "tests/ut/spec_decode/test_eagle_aclgraph_source_regression.py",
    "tests/ut/worker/test_attn_utils_v2.py", "tests/ut/worker/test_model_runner_v2_mamba.py",
)  # fmt: skip

pytestmark = pytest.mark.skipif(harness.why_not() is not None, reason=str(harness.why_not()))


@pytest.fixture
def patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source, tree = Path(os.environ["VLLM_ASCEND_SRC"]), tmp_path / "tree"
    as_user(monkeypatch)
    patches = export_series("vllm-ascend", source, tmp_path / "out")
    assert len(patches) == len(SERIES.patches)
    for folder in ("vllm_ascend", "tests/ut"):
        shutil.copytree(source / folder, tree / folder)
    (tree / "tests/__init__.py").touch()
    apply_series(tree, patches, EDITED - ADDED)
    monkeypatch.setenv("VLLM_ASCEND_SRC", str(tree))
    return tree


def run(tmp_path: Path, *arguments: str) -> CompletedProcess[str]:
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    return harness.python(folder, *arguments, plugin=False)


def test_series_applies_and_tests_pass_on_the_patched_tree(patched: Path, tmp_path: Path) -> None:
    titles = git(patched, "log", "--reverse", "--format=%s").splitlines()[1:]
    assert titles == [patch.title for patch in SERIES.patches]
    tests = sorted(path for path in ADDED if Path(path).name.startswith("test_"))
    paths = [str(patched / path) for path in (*tests, *NEIGHBOURS)]
    ran = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


def test_values_of_the_added_operators(patched: Path, tmp_path: Path) -> None:
    ran = run(tmp_path, str(Path(__file__).with_name("patched_operators.py")))
    assert ran.returncode == 0, ran.stderr[-4000:]
    seen = json.loads(ran.stdout[ran.stdout.index('{"ragged"') :])
    assert seen["ragged"]["output"] < 1e-5 and seen["ragged"]["states"] < 1e-5
    assert seen["ragged"]["changed"] == 3 + 1 + 4 + 0 + 2
    assert max(seen["max_softmax"].values()) < 1e-5
