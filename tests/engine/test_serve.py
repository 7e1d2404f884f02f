"""`vllm-ascend-spec serve` on a CPU: an engine process of its own, set up like the offline one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import RunArm
from harness import Batch, real_differences

from vllm_ascend_spec.zoo import Zoo

START_S = 240


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "log.txt"


@pytest.fixture(scope="module")
def server(zoo: Zoo, log: Path) -> Iterator[str]:
    """Address of a server whose options, not its speculative config, turn adaptive on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-c", "from vllm_ascend_spec.cli import main; main()"),
        *("serve", str(zoo.target("hybrid")), "--platform", "cpu"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512"),
        *("--served-model-name", "hybrid"),
        *("--speculative-config", json.dumps(zoo.speculative_config("hybrid", "dspark"))),
        *("--additional-config", json.dumps({"ascend_spec": {"adaptive": True}})),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(log.parent)}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(process, address, log)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # The engine is a process of its own, and outlives a server that dies without warning.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    for _ in range(START_S):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=1)
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
        else:
            return
    pytest.fail(f"no server after {START_S} s: {log.read_text()[-4000:]}")


def complete(address: str, **request: Any) -> dict[str, Any]:
    body = {"model": "hybrid", "temperature": 0, "max_tokens": 16, "ignore_eos": True, **request}
    post = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(post, timeout=120) as answer:
        return json.loads(answer.read())


def test_answers_are_repeatable_and_of_full_length(server: str):
    first, again = (complete(server, prompt="Return the number of") for _ in range(2))
    assert first["usage"]["completion_tokens"] == 16
    assert first["choices"][0]["text"] == again["choices"][0]["text"]


def test_answers_equal_the_offline_ones_without_speculation(server: str, run_arm: RunArm):
    prompt = "Return the number of"
    asked = {"served": Batch([{"text": prompt}], max_tokens=(16,))}
    offline = run_arm("hybrid", "none", asked=asked)["batches"]["served"]
    served = complete(server, prompt=prompt, return_token_ids=True)["choices"][0]["token_ids"]
    assert len(served) == 16
    assert real_differences(offline, {"answers": [{"tokens": served}]}) == []


def test_engine_process_has_the_same_set_up(server: str, log: Path):
    complete(server, prompt="Return")
    lines = log.read_text().splitlines()
    engine = [line for line in lines if "EngineCore" in line]
    assert any("Using V2 Model Runner" in line for line in engine)
    assert any("Replaced vllm.v1.worker.gpu.model_runner:" in line for line in engine)
    assert any("plans with assumed step costs" in line for line in engine)


def test_drafts_are_verified(server: str):
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    drafted = [
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("vllm:spec_decode_num_draft_tokens_total")
    ]
    assert drafted and sum(drafted) > 0


def test_metrics_tell_trimmed_from_rejected(server: str):
    for _ in range(3):
        complete(server, prompt="List the tools of a carpenter.", max_tokens=64)
    with urllib.request.urlopen(f"{server}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    values = {
        line.split()[0]: float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("ascend_spec:")
    }
    assert values["ascend_spec:steps_total"] >= 32
    assert values["ascend_spec:drafted_total"] > 0
    assert values["ascend_spec:accepted_total"] <= values["ascend_spec:verified_total"]
    assert values["ascend_spec:verified_total"] <= values["ascend_spec:drafted_total"]
    assert "vllm:spec_decode_num_draft_tokens_total" in text
