"""Adaptive verification on a GPU: FULL graphs, hybrid model, every method, no wait for the device.

Skipped without CUDA. All engines run side by side; with cold caches most of the time is
compilation. One start serves test and figures:

    VLLM_ASCEND_SPEC_EXACT_JSON=out.json pytest tests/gpu/test_adaptive_engine.py -s

VLLM_ASCEND_SPEC_EXACT_SIZE (256x128: prompts x tokens), _METHODS (all of them) and _LOGS (a folder)
make it smaller or leave more behind.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine import exact
from benchmarks.engine.exact_arms import WITH_LENGTHS, Asked
from vllm_ascend_spec.zoo import DRAFT_TOKENS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

_VARIABLE = "VLLM_ASCEND_SPEC_EXACT"
METHODS = exact.chosen_methods(os.environ.get(f"{_VARIABLE}_METHODS", ",".join(exact.METHODS)))
ARMS = [f"{method} adaptive" for method in METHODS]
SHORT_ARMS = [f"{method} lengths" for method in METHODS if method in WITH_LENGTHS]


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Asked]:
    size = os.environ.get(f"{_VARIABLE}_SIZE", f"{exact.PROMPTS}x{exact.TOKENS}")
    prompts, tokens = map(int, size.split("x"))
    folder = Path(os.environ.get(f"{_VARIABLE}_LOGS") or tmp_path_factory.mktemp("logs"))
    result, found = exact.run(METHODS, folder, prompts, tokens)
    exact.tell(result, found)
    if path := os.environ.get(f"{_VARIABLE}_JSON"):
        result.write(Path(path))
    return found


def answer_of(arms: dict[str, Asked], name: str) -> dict[str, Any]:
    answer = arms[name].answer
    assert answer is not None, f"{name} gave no answer:\n{arms[name].log[-4000:]}"
    return answer


@pytest.mark.parametrize("name", [*ARMS, *SHORT_ARMS])
@pytest.mark.parametrize("reference", ["none", "fixed"])
def test_answers_differ_at_near_ties_only(reference: str, name: str, arms: dict[str, Asked]):
    other = "none" if reference == "none" else f"{name.split()[0]} fixed"
    gaps = exact.first_differences(answer_of(arms, other), answer_of(arms, name))
    assert max(gaps, default=0.0) <= exact.NEAR_TIE, json.dumps(gaps)


@pytest.mark.parametrize("method", METHODS)
def test_fixed_lengths_differ_from_no_speculation_at_near_ties_only(
    method: str, arms: dict[str, Asked]
):
    gaps = exact.first_differences(answer_of(arms, "none"), answer_of(arms, f"{method} fixed"))
    assert max(gaps, default=0.0) <= exact.NEAR_TIE, json.dumps(gaps)


@pytest.mark.parametrize("name", ARMS)
def test_drafts_are_trimmed(name: str, arms: dict[str, Asked]):
    counters = answer_of(arms, name)["counters"]
    assert 0 < counters["accepted"] < counters["verified"] < counters["drafted"]


@pytest.mark.parametrize("name", [*ARMS, *SHORT_ARMS])
def test_the_host_waits_nowhere_that_it_does_not_with_fixed_lengths(
    name: str, arms: dict[str, Asked]
):
    answer_of(arms, name)
    assert exact.added_places(arms, name) == {}


@pytest.mark.parametrize("name", SHORT_ARMS)
def test_short_drafts_are_made_and_accepted(name: str, arms: dict[str, Asked]):
    answer = answer_of(arms, name)
    made = exact.draft_tokens_made(answer)
    whole = exact.draft_tokens_made(answer_of(arms, name.replace("lengths", "adaptive")))
    assert 0 < made < min(whole, DRAFT_TOKENS - 1), (made, whole)
    assert 0 < answer["counters"]["accepted"] <= answer["counters"]["verified"]
