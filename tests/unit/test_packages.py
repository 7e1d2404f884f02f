"""Companions of torch that cannot load beside it are hidden, and only those."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from vllm_ascend_spec.engine import packages


def pretend(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(packages, "version", version)


@pytest.mark.parametrize(
    ("installed", "hidden"),
    [
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.1"}, 2),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "torchaudio": "2.11.1+cpu"}, 0),
        ({"torch": "2.13.0+cpu", "torchcodec": "0.17.0"}, 1),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, 0),
        ({"torch": "2.13.0+cu130", "torchvision": "0.28.0+cu130"}, 0),
        ({}, 0),
    ],
)
def test_what_counts_as_mismatched(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], hidden: int
):
    pretend(monkeypatch, installed)
    assert len(packages.mismatched()) == hidden


def test_image_processors_import_in_an_environment_as_pip_made_it():
    """What vLLM's Qwen3.5 reaches: transformers' image processors, which import torchvision."""
    if "torchvision" not in packages.mismatched():
        pytest.skip("torchvision matches torch here, or is not installed")
    code = (
        "from vllm_ascend_spec.engine import packages\n"
        "hidden = packages.hide_mismatched()\n"
        "import importlib.util\n"
        "assert all(importlib.util.find_spec(n) is None for n in hidden if n != 'torchvision')\n"
        "import torchvision, transformers.models.qwen2_vl.image_processing_qwen2_vl\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
