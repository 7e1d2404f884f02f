"""Bad input at the command line: one line that names the mend, exit code 2, no engine started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_spec.zoo import Zoo

TIMEOUT_S = 120
GENERATE = ["generate", "--platform", "cpu", "-p", "x"]


def complaint(*arguments: str | Path) -> str:
    """What the command line says when it refuses `arguments`; fails unless it is one line."""
    command = [sys.executable, "-c", "from vllm_ascend_spec.cli import main; main()"]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr[-4000:]
    assert len(errors) == 1, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    assert "Loading safetensors" not in done.stderr
    return errors[0]


def copied(source: Path, destination: Path, **changes: object) -> Path:
    """A checkpoint with the weights of `source` and `changes` in its configuration."""
    destination.mkdir()
    config = json.loads((source / "config.json").read_text()) | changes
    (destination / "config.json").write_text(json.dumps(config))
    (destination / "model.safetensors").symlink_to(source / "model.safetensors")
    return destination


@pytest.fixture
def hybrid(zoo: Zoo) -> Path:
    return zoo.target("hybrid")


def test_a_drafter_that_is_not_there(hybrid: Path, tmp_path: Path):
    missing = tmp_path / "missing"
    said = complaint(*GENERATE, hybrid, "--method", "dspark", "--draft", missing)
    assert f"{missing} does not exist" in said


def test_a_drafter_of_another_method(hybrid: Path, zoo: Zoo):
    drafter = zoo.drafter("hybrid", "dflash")
    assert drafter is not None
    said = complaint(*GENERATE, hybrid, "--method", "dspark", "--draft", drafter)
    assert 'Set method to "dflash"' in said and str(drafter / "config.json") in said


def test_a_drafter_that_reads_layers_beyond_the_target(hybrid: Path, zoo: Zoo, tmp_path: Path):
    source = zoo.drafter("hybrid", "dspark")
    assert source is not None
    drafter = copied(source, tmp_path / "deep", target_layer_ids=[0, 2, 30])
    said = complaint(*GENERATE, hybrid, "--method", "dspark", "--draft", drafter)
    assert "target_layer_ids names layers [30]" in said and "belongs to another target" in said


def test_the_server_refuses_before_it_starts(hybrid: Path, zoo: Zoo, tmp_path: Path):
    source = zoo.drafter("hybrid", "dspark")
    assert source is not None
    drafter = copied(source, tmp_path / "wide", target_hidden_size=256)
    speculative = {"method": "dspark", "model": str(drafter), "num_speculative_tokens": 7}
    said = complaint(
        "serve", hybrid, "--platform", "cpu", "--speculative-config", json.dumps(speculative)
    )
    assert "target_hidden_size is 256" in said and "hidden_size 128" in said
