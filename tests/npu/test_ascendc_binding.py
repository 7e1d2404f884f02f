"""csrc/ascend's torch binding, compiled and called: real torch_npu, doubles of CANN and AscendC.

It shows that the operator is registered, checks its arguments, puts the tiling into device memory
and hands the kernels the addresses that they expect. CANN's compiler and an NPU saw none of it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ascendc import DOUBLE, HERE, SOURCE, Problem, check, double_environment


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = next(iter((double_environment() / "lib").glob("python3*/site-packages/torch_npu")), None)
    if site is None or not (double_environment() / "fakeacl/libascendcl.so").exists():
        pytest.skip(f"no torch_npu in {double_environment()}: run `tools/npu_env.sh double`")
    torch_root, out = site.parent / "torch", tmp_path_factory.mktemp("binding") / "operators.so"
    headers = [
        SOURCE, DOUBLE, torch_root / "include", torch_root / "include/torch/csrc/api/include",
        site / "include", site / "include/third_party/acl/inc",
    ]  # fmt: skip
    folders = [torch_root / "lib", site / "lib"]
    command = [
        "g++", "-std=c++20", "-O1", "-fPIC", "-shared", *(f"-I{folder}" for folder in headers),
        str(SOURCE / "binding.cpp"), str(DOUBLE / "library.cpp"), "-o", str(out),
        *(f"-L{folder}" for folder in folders), "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_npu",
        # CANN's libraries below torch_npu are found where the child runs.
        "-Wl,--unresolved-symbols=ignore-in-shared-libs",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def arguments(problem: Problem) -> dict[str, Any]:
    return {
        "q": problem.q, "k": problem.k, "v": problem.v, "log_decay": problem.log_decay,
        "beta": problem.beta, "states": problem.states, "query_start_loc": problem.starts,
        "state_indices": problem.table, "num_accepted": problem.accepted, "scale": problem.scale,
    }  # fmt: skip


LENGTHS, ACCEPTED = [3, 1, 4, 0, 2], [1, 4, 2, 3, 0]
RIGHT = {
    "float32 states": Problem(LENGTHS, ACCEPTED, 4, torch.float32),
    "bfloat16 states": Problem(LENGTHS, ACCEPTED, 4, torch.bfloat16),
    "shape of real models": Problem(
        [10, 7], [3, 10], 10, torch.float32, heads=(1, 2), sizes=(128, 128)
    ),
}
# (argument, what is done to it, what the operator says)
WRONG = [
    ("q", lambda t: t.float(), "q must be BFloat16, is Float"),
    ("states", lambda t: t.half(), "states must be BFloat16, is Half"),
    ("num_accepted", lambda t: t.long(), "num_accepted must be Int, is Long"),
    ("query_start_loc", lambda t: t[:-1], "query_start_loc must be [6], is [5]"),
    ("beta", lambda t: t.t(), "beta must be contiguous"),
    ("v", lambda t: t[:, :3].contiguous(), "log_decay must be"),
    ("state_indices", lambda t: t.repeat(1, 5), "state columns must be 1 to 16"),
]


@pytest.fixture(scope="session")
def answers(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the operator makes of every problem, right and wrong ones: see ascendc_call.py."""
    folder = tmp_path_factory.mktemp("calls")
    given, found = folder / "given.pt", folder / "found.pt"
    calls = {name: arguments(problem) for name, problem in RIGHT.items()}
    for name, change, _ in WRONG:
        right = arguments(RIGHT["float32 states"])
        calls[name] = right | {name: change(right[name])}
    torch.save(calls, given)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TORCH"))}
    own = {
        "PYTHONPATH": str(HERE),
        "LD_LIBRARY_PATH": str(double_environment() / "fakeacl"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TASK_QUEUE_ENABLE": "0",
    }
    command = [str(double_environment() / "bin/python"), "-m", "npu_double.ascendc_call"]
    done = subprocess.run(
        [*command, str(library), str(given), str(found)],
        capture_output=True, text=True, timeout=300, env=inherited | own,
    )  # fmt: skip
    assert found.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return torch.load(found)


@pytest.mark.parametrize("name", RIGHT)
def test_the_operator_gives_the_oracles_values(
    answers: dict[str, dict[str, Any]], name: str
) -> None:
    answer = answers[name]
    assert "error" not in answer, answer["error"]
    check(RIGHT[name], (answer["out"], answer["states"]))


@pytest.mark.parametrize(("name", "said"), [(name, said) for name, _, said in WRONG])
def test_a_wrong_argument_is_named(
    answers: dict[str, dict[str, Any]], name: str, said: str
) -> None:
    assert said in answers[name].get("error", "accepted")
