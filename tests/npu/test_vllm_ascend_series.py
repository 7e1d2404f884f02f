"""The series for vllm-ascend against a given tree: applied, imported, its tests run, its values.

On the double: nothing here has run on an NPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from npu_double import harness, judge
from npu_double.cases import case

from tests.patch_tree import apply_series, as_user, export_series, git
from vllm_ascend_spec.patches.vllm_ascend import SERIES
from vllm_ascend_spec.zoo import Zoo

HERE = Path(__file__).parent
EDITED = {path for patch in SERIES.patches for path in patch.edits}
ADDED = {path for patch in SERIES.patches for path in patch.files}
# Upstream's own tests of the files that the series edits.
NEIGHBOURS = (
    "tests/ut/ops/test_gdn_attn_builder.py", "tests/ut/spec_decode/test_utils.py",
    "tests/ut/spec_decode/test_eagle_aclgraph_source_regression.py",
    "tests/ut/worker/test_attn_utils_v2.py", "tests/ut/worker/test_model_runner_v2_mamba.py",
)  # fmt: skip

pytestmark = pytest.mark.skipif(harness.why_not() is not None, reason=str(harness.why_not()))


def compilers() -> Path:
    """Where `tools/npu_env.sh` put the compilers."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    default = Path(cache_home, "vllm_ascend_spec", "npu_lowering")
    return Path(os.environ.get("VLLM_ASCEND_SPEC_NPU_ENV") or default)


@pytest.fixture
def patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source, tree = Path(os.environ["VLLM_ASCEND_SRC"]), tmp_path / "tree"
    as_user(monkeypatch)
    patches = export_series("vllm-ascend", source, tmp_path / "out")
    assert len(patches) == len(SERIES.patches)
    for folder in ("vllm_ascend", "tests/ut"):
        shutil.copytree(source / folder, tree / folder)
    (tree / "tests/__init__.py").touch()
    (tree / "csrc").mkdir()
    shutil.copy(source / "csrc/torch_binding.cpp", tree / "csrc")  # the double reads schemas there
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
    ran = run(tmp_path, str(HERE / "patched_operators.py"))
    assert ran.returncode == 0, ran.stderr[-4000:]
    seen = json.loads(ran.stdout[ran.stdout.index('{"ragged"') :])
    assert seen["ragged"]["output"] < 1e-5 and seen["ragged"]["states"] < 1e-5
    assert seen["ragged"]["changed"] == 3 + 1 + 4 + 0 + 2
    assert max(seen["max_softmax"].values()) < 1e-5


@pytest.mark.parametrize(
    ("method", "repair_left_out"),
    [("none", "without_prefilling_repair"), ("mtp", "without_lengths_repair")],
)
def test_the_series_mends_what_stops_a_hybrid_model(
    patched: Path, tmp_path: Path, method: str, repair_left_out: str
) -> None:
    """The plugin leaves its own repair out, and the patched tree needs none."""
    zoo = Zoo()
    texts = tuple(prompt.text for prompt in zoo.prompts()[:2])
    model, speculative = str(zoo.target("hybrid")), zoo.speculative_config("hybrid", method, 3)
    case = harness.Case(
        model, speculative, texts, max_tokens=(8, 6), mutation=repair_left_out
    )  # fmt: skip
    folder = tmp_path / "case"
    folder.mkdir()
    answer = harness.run(case, folder)
    assert answer["error"] is None, answer["error"]["traceback"][-3000:]
    assert judge.judge(model, answer).right


@pytest.mark.parametrize(("target", "method"), [("dense", "dspark"), ("hybrid", "eagle3")])
def test_graphs_keyed_by_the_series_replay_with_right_tokens(
    patched: Path, tmp_path: Path, target: str, method: str
) -> None:
    """Target and drafter in FULL graphs: every update reaches the graph that it is meant for."""
    base = case(target, method, graphs=True)
    small = replace(base, prompts=base.prompts[:2], max_tokens=(8, 6))
    folder = tmp_path / "case"
    folder.mkdir()
    answer = harness.run(small, folder)
    assert answer["error"] is None, answer["error"]["traceback"][-3000:]
    assert answer["graphs"]["replays"] > 0 and answer["graphs"]["updates"] > 0
    assert judge.judge(small.model, answer).right


def _lowerable(source: Path, target: Path, kernel: str) -> None:
    """The module without vLLM's import of Triton and without the heuristics around its kernel."""
    imports = "import triton, triton.language as tl"
    text = re.sub(r"from vllm.triton_utils import .*", imports, source.read_text())
    unwrapped = f"{kernel} = {kernel} if hasattr({kernel}, '__name__') else {kernel}.fn"
    target.write_text(f"{text}\n\n{unwrapped}\n")


@pytest.mark.skipif(
    not (compilers() / "bin/python").exists(), reason="no Ascend compilers: run tools/npu_env.sh"
)
@pytest.mark.parametrize("chip", ["Ascend910B3", "Ascend910_9391"])
def test_the_series_kernels_lower_for_an_npu(patched: Path, tmp_path: Path, chip: str) -> None:
    softmax, recurrence = "max_softmax_kernel", "fused_recurrent_gated_delta_rule_fwd_kernel"
    operators = patched / "vllm_ascend/ops/triton"
    _lowerable(operators / "spec_decode/max_softmax.py", tmp_path / "series_softmax.py", softmax)
    _lowerable(operators / "kda/fused_recurrent_kda.py", tmp_path / "series_kda.py", recurrence)
    pointers = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "g": "*fp32", "beta": "*bf16",
                "o": "*bf16", "h0": "*fp32", "ht": "*fp32", "cu_seqlens": "*i32",
                "ssm_state_indices": "*i32", "num_accepted_tokens": "*i32"}  # fmt: skip
    launches = {
        softmax: {
            "module": "series_softmax", "kernel": softmax,
            "signature": {"logits_ptr": "*bf16", "probs_ptr": "*fp32", "num_rows": "i32",
                          "vocab_size": "i32", "row_stride": "i32"},
            "constants": {"BLOCK_SIZE": 2048, "LOWEST": -1e30},
        },
        # As ragged_recurrent_gated_delta_rule launches it for 256 requests of 32 heads.
        recurrence: {
            "module": "series_kda", "kernel": recurrence,
            "signature": pointers | {"scale": "fp32", "N": "i64", "T": "i64"},
            "constants": {
                "B": 1, "H": 16, "HV": 32, "K": 128, "V": 128, "BK": 128, "BV": 32,
                "stride_init_state_token": 524288, "stride_final_state_token": 524288,
                "stride_indices_seq": 8, "stride_indices_tok": 1, "USE_INITIAL_STATE": True,
                "INPLACE_FINAL_STATE": True, "IS_BETA_HEADWISE": False,
                "USE_QK_L2NORM_IN_KERNEL": False, "IS_VARLEN": True,
                "IS_CONTINUOUS_BATCHING": True, "IS_SPEC_DECODING": True, "IS_KDA": False,
            },
        },
    }  # fmt: skip
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "PYTHON"))}
    done = subprocess.run(
        [str(compilers() / "bin/python"), str(HERE / "lower.py"), str(tmp_path), chip],
        input=json.dumps(launches), capture_output=True, text=True, timeout=300, env=inherited,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    errors = {name: found["error"] for name, found in json.loads(done.stdout).items()}
    assert errors == {softmax: None, recurrence: None}
