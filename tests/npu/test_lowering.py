"""Every Triton kernel lowers for Ascend 910B and 910_93, within on-chip memory.

Needs the environment that tools/npu_env.sh makes; skipped, with the command, where it is absent.
What passes here has been compiled down to HIVM, not to machine code, and has never run on an NPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
os.environ.setdefault("TRITON_INTERPRET", "1")  # the launches are recorded, on CPU tensors

from lowering_cases import CASES, Case  # noqa: E402
from recording import Launch  # noqa: E402
from test_ascend_lint import lint  # noqa: E402

CHIPS = ["Ascend910B3", "Ascend910_9391"]
# Prefix caching with replay states takes 64-bit addresses as pointers, and vllm-ascend has neither.
# The norm belongs to vLLM's layer; vllm-ascend has its own.
NOT_ON_ASCEND = {"pages.py", "gated_norm.py"}
ADVISORY_CHIP = "Ascend950PR_9589"


def environment() -> Path:
    """Where tools/npu_env.sh put the compilers."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    default = Path(cache_home, "vllm_ascend_spec", "npu_lowering")
    return Path(os.environ.get("VLLM_ASCEND_SPEC_NPU_ENV") or default)


needs_compilers = pytest.mark.skipif(
    not (environment() / "bin/python").exists(),
    reason=f"no Ascend compilers in {environment()}: run tools/npu_env.sh",
)


@cache
def launches(case: Case) -> dict[str, Launch]:
    found = case.launches()
    assert found, f"{case.name} launched nothing"
    return {f"{case.name}: {launch.kernel}": launch for launch in found}


def lowered(named: dict[str, Launch], chip: str) -> dict[str, dict[str, object]]:
    variables = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    run = subprocess.run(
        [str(environment() / "bin/python"), str(HERE / "lower.py"), str(ROOT), chip],
        input=json.dumps({name: asdict(launch) for name, launch in named.items()}),
        capture_output=True, text=True, timeout=600, env=variables,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@needs_compilers
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_lowers(case: Case, chip: str) -> None:
    for name, result in lowered(launches(case), chip).items():
        assert result["error"] is None, f"{name}: {result['error']}"
        assert result["scalar_accesses"] <= case.scalar_accesses, (
            f"{name}: {result['scalar_accesses']} single-element accesses in loops, "
            f"{case.scalar_accesses} expected ({case.why or 'none'})"
        )


@needs_compilers
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xfail(reason="Ascend 950 is advisory: triton-ascend 3.2.0 predates it", strict=False)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_lowers_for_the_950(case: Case) -> None:
    results = lowered(launches(case), ADVISORY_CHIP)
    assert {name: result["error"] for name, result in results.items() if result["error"]} == {}


@needs_compilers
def test_what_cannot_lower_is_reported() -> None:
    def fault(kernel: str) -> Launch:
        return Launch("lowering_faults", kernel, {"p": "*fp32", "n": "i32"}, {})

    named = {kernel: fault(kernel) for kernel in ("breaks", "overflows", "copies", "gathers")}
    results = lowered(named, CHIPS[0])
    assert "Break" in str(results["breaks"]["error"])
    assert "ub overflow" in str(results["overflows"]["error"])
    assert results["copies"] | {"seconds": 0} == {"error": None, "scalar_accesses": 0, "seconds": 0}
    assert results["gathers"]["error"] is None and results["gathers"]["scalar_accesses"] > 0


def test_every_launched_kernel_has_a_case() -> None:
    paths = [path for path in (ROOT / "kernels").rglob("*.py") if path.name not in NOT_ON_ASCEND]
    sources = [path.read_text("utf-8") for path in paths]
    kernels = {
        node.name
        for source in sources
        for node in lint.ast.walk(lint.ast.parse(source))
        if isinstance(node, lint.ast.FunctionDef) and lint.is_jit(node)
    }
    launched = {n for source in sources for n in lint.launched(lint.ast.parse(source))} & kernels
    covered = {launch.kernel for case in CASES for launch in launches(case).values()}
    assert launched - covered == set()
