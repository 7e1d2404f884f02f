"""Adaptive verification on a GPU: FULL graphs, hybrid model, every method, no wait for the device.

Skipped without CUDA. Engines start side by side, which takes three to four minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine import exact
from benchmarks.engine.driver import Arm, start
from vllm_ascend_spec.zoo import Zoo

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

METHODS = ("mtp", "eagle3", "dflash", "dspark")
PROMPTS, TOKENS = 64, 96


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arm]:
    ready = start(exact.requests(list(METHODS)), tmp_path_factory.mktemp("logs"))
    return {arm.name: arm for arm in ready}


@pytest.fixture(scope="module")
def answers(arms: dict[str, Arm]) -> dict[str, Any]:
    from tokenizers import Tokenizer

    zoo = Zoo()
    tokenizer = Tokenizer.from_file(str(Path(zoo.target("hybrid")) / "tokenizer.json"))
    prompts = [
        tokenizer.encode(prompt.text, add_special_tokens=False).ids
        for prompt in zoo.prompts()[:PROMPTS]
    ]
    return {
        name: arm.ask(do="answers", prompts=prompts, new_tokens=TOKENS, logprobs=2)
        for name, arm in arms.items()
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reference", ["none", "fixed"])
def test_answers_differ_at_near_ties_only(method: str, reference: str, answers: dict[str, Any]):
    one = answers["none" if reference == "none" else f"{method} fixed"]
    gaps = exact.first_differences(one, answers[f"{method} adaptive"])
    assert max(gaps, default=0.0) <= exact.NEAR_TIE, json.dumps(gaps)


@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_trimmed_and_the_host_never_waits(
    method: str, arms: dict[str, Arm], answers: dict[str, Any]
):
    counters = answers[f"{method} adaptive"]["counters"]
    assert 0 < counters["accepted"] < counters["verified"] < counters["drafted"]
    assert exact.synchronising_calls(arms[f"{method} adaptive"]) == 0
