"""The CPU engine's twins do what vLLM's own Triton kernels do under the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = (
    "gather_block_tables",
    "compute_slot_mappings",
    "zero_kv_blocks",
    "precopy_mamba",
    "postprocess_mamba",
)


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    """One line a kernel; the interpreter must be on before Triton is imported."""
    script = Path(__file__).with_name("compare_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), *KERNELS],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # Against Triton's own interpreter, not the plugin's way to run all programs at once.
        env=os.environ | {"VLLM_ASCEND_SPEC_CPU_PROGRAMS": "one_by_one"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.partition(":")[0] in KERNELS]
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize("kernel", KERNELS)
def test_twin_equals_the_kernel(kernel: str, outcome: dict[str, str]):
    assert outcome[kernel] == "equal"
