"""The CPU engine's way to run a launch's programs at once against Triton's own interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine import sampled
from vllm_ascend_spec.zoo import Zoo

ONE_BY_ONE = {"VLLM_ASCEND_SPEC_CPU_PROGRAMS": "one_by_one"}
ARMS = [
    sampled.Arm("dspark", requests=4),
    sampled.Arm("mtp", requests=4),
    sampled.Arm("ngram", adaptive=False, requests=4),
]


@pytest.mark.parametrize(
    "arm",
    [ARMS[0], *(pytest.param(arm, marks=pytest.mark.thorough) for arm in ARMS[1:])],
    ids=lambda arm: arm.name,
)
def test_tokens_logits_and_lengths_are_the_interpreters(arm: sampled.Arm, toy: Zoo, tmp_path: Path):
    request = sampled.request_of(arm, toy, "hybrid", 48, tmp_path / "run.npz")
    request["sampling"] = [{**s, "max_tokens": 9} for s in request["sampling"]]
    at_once = sampled.run(request)
    one_by_one = sampled.run(request, environment=ONE_BY_ONE)
    for column in ("request", "token", "logits", "offset", "verified", "drafted"):
        assert np.array_equal(at_once[column], one_by_one[column]), column
    assert (at_once["verified"] > 0).any()
