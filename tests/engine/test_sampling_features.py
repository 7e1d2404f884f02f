"""What a request may ask for beside tokens, while its drafts are trimmed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from conftest import RunArm
from harness import Batch, decode_steps, differences, real_differences

PATTERN = r"(yes|no), [0-9]{3} times[.]"
STOP = "er"
TEXTS = [
    {"text": "<|im_start|>user\nList the tools of a carpenter.<|im_end|>\n<|im_start|>assistant\n"}
]
WITH_TEXT = {"detokenize": True, "ignore_eos": False}


@pytest.fixture(scope="module")
def asked(prompts: list[dict[str, Any]]) -> dict[str, Batch]:
    """Grammar, stop string, several samples and log-probabilities beside plain requests."""
    grammar = {**WITH_TEXT, "structured_outputs": {"regex": PATTERN}}
    return {
        "plain": Batch(prompts[:6], max_tokens=(24,), logprobs=True),
        "grammar": Batch(TEXTS * 4, max_tokens=(40,), sampling=grammar),
        "stop": Batch(TEXTS * 2, max_tokens=(60,), sampling={**WITH_TEXT, "stop": [STOP]}),
        "several": Batch(
            [*TEXTS, {"text": "import os"}],
            max_tokens=(16,),
            temperature=1.0,
            seed=7,
            sampling={"n": 3, "top_p": 0.9},
        ),
    }


@pytest.fixture(scope="module")
def plain(asked: dict[str, Batch], run_arm: RunArm) -> dict[str, Any]:
    run_arm("hybrid", "dspark", adaptive=True, asked=asked, wait=False)
    return run_arm("hybrid", "none", asked=asked)["batches"]


@pytest.fixture(scope="module")
def adaptive(asked: dict[str, Batch], plain: dict[str, Any], run_arm: RunArm) -> dict[str, Any]:
    return run_arm("hybrid", "dspark", adaptive=True, asked=asked)["batches"]


def test_drafts_are_trimmed_in_this_run(adaptive: dict[str, Any]):
    steps = [s for request in decode_steps(adaptive["plain"]) for s in request]
    assert any(0 < s["verified"] < 7 for s in steps)


def test_log_probabilities_are_those_of_the_target(plain: dict[str, Any], adaptive: dict[str, Any]):
    assert real_differences(plain["plain"], adaptive["plain"]) == []
    compared = 0
    for mine, theirs in zip(plain["plain"]["answers"], adaptive["plain"]["answers"], strict=True):
        for token, other, gap, found in zip(
            mine["tokens"], theirs["tokens"], mine["gaps"], theirs["gaps"], strict=True
        ):
            if token != other:
                break
            # Two bf16 logits of up to 30 are compared, where neighbours lie 0.125 apart.
            assert found == pytest.approx(gap, abs=0.26)
            compared += 1
    assert compared > 100


def test_a_grammar_holds_and_changes_nothing(plain: dict[str, Any], adaptive: dict[str, Any]):
    for answer in adaptive["grammar"]["answers"]:
        assert re.fullmatch(PATTERN, answer["text"]), answer["text"]
    tokens = [[a["tokens"] for a in run["grammar"]["answers"]] for run in (plain, adaptive)]
    assert tokens[0] == tokens[1]


def test_a_stop_string_ends_the_answer_at_the_same_place(
    plain: dict[str, Any], adaptive: dict[str, Any]
):
    texts = [[a["text"] for a in run["stop"]["answers"]] for run in (plain, adaptive)]
    assert texts[0] == texts[1]
    assert STOP not in texts[0][0] and len(texts[0][0]) < 200


def test_several_samples_of_a_prompt_are_whole_and_differ(adaptive: dict[str, Any]):
    found = [[a["tokens"], *a["others"]] for a in adaptive["several"]["answers"]]
    assert [len(sample) for samples in found for sample in samples] == [16] * 6
    assert all(len({tuple(sample) for sample in samples}) > 1 for samples in found)


def test_a_request_that_opted_out_verifies_its_whole_draft(run_arm: RunArm):
    """Among others that are trimmed, and with the same answer."""
    prompts = [{"text": "Return the number of"}, {"text": "import os"}, {"text": "def main("}]
    whole = {"extra_args": {"ascend_spec_adaptive": False}}
    asked = {
        "adaptive": Batch(prompts * 2, max_tokens=(24,)),
        "whole": Batch(prompts * 2, max_tokens=(24,), sampling=whole),
    }
    batches = run_arm("hybrid", "dspark", adaptive=True, asked=asked)["batches"]
    assert differences(batches["adaptive"], batches["whole"]) == []
    trimmed = [s["verified"] for r in decode_steps(batches["adaptive"]) for s in r]
    kept = [s["verified"] for r in decode_steps(batches["whole"]) for s in r]
    assert any(v < 7 for v in trimmed)
    # The last steps of an answer have fewer tokens left to draft for.
    assert sum(v == 7 for v in kept) > 0.9 * len(kept)
