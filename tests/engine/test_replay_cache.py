"""Prefix caching with replay states: what is cached is the state at a block's end, exactly.

Prompts stop a few tokens before the end of a block, so that a step of verified rows goes over it;
what was said is then asked again from just behind that end, which starts from the block's page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from conftest import ENGINE
from harness import Batch, Case, Cases, decode_steps, real_differences
from tokenizers import Tokenizer

from vllm_ascend_spec.zoo import Zoo

END = 256  # of the first block: tokens that attention caches in the bytes of a page of states
ANSWER, AGAIN = 24, 10
LENGTHS = (END - 2, END - 3) * 4
ARMS = [("mtp", False), ("dspark", True)]
SETTINGS = {
    "max_num_batched_tokens": 1024,
    "enable_prefix_caching": True,
    "prefix_cache_retention_interval": END,  # vLLM keeps the states of prompts alone by default
    "additional_config": {"ascend_spec": {"gdn_state": "replay"}},
}


@dataclass(frozen=True)
class Asked:
    """The first round's prompts with the right answers, and what to ask behind the block's end."""

    prompts: list[list[int]]
    plain: dict[str, Any]

    def starts(self) -> list[int]:
        """Length of each prompt of the second round: a few tokens of it are computed anew."""
        return [END + 1 + i % 2 for i in range(len(self.prompts))]

    def batches(self) -> dict[str, Batch]:
        said = zip(self.prompts, self.plain["answers"], self.starts(), strict=True)
        again = [{"ids": (ids + answer["tokens"])[:start]} for ids, answer, start in said]
        first = [{"ids": ids} for ids in self.prompts]
        behind = Batch(again, max_tokens=(AGAIN,))
        return {"first": Batch(first, max_tokens=(ANSWER,)), "again": behind, "once more": behind}

    def expected_again(self) -> dict[str, Any]:
        """The part of the first answers that the second round has to say."""
        said = zip(self.prompts, self.plain["answers"], self.starts(), strict=True)
        parts = [(answer, start - len(ids)) for ids, answer, start in said]
        return {
            "answers": [
                {name: answer[name][at : at + AGAIN] for name in ("tokens", "gaps")}
                for answer, at in parts
            ]
        }


@pytest.fixture(scope="module")
def asked(zoo: Zoo, prompts: list[dict[str, Any]], cases: Cases) -> Asked:
    tokenizer = Tokenizer.from_file(str(zoo.target("hybrid") / "tokenizer.json"))
    short = [prompt.get("ids") or tokenizer.encode(prompt["text"]).ids for prompt in prompts]
    # Repeated up to the length, so that each ends as its own text does and is answered as such.
    chosen = [
        (ids * (END // len(ids) + 1))[-length:] for ids, length in zip(short, LENGTHS, strict=False)
    ]
    first = Batch([{"ids": ids} for ids in chosen], max_tokens=(ANSWER,), logprobs=True)
    model = str(zoo.target("hybrid"))
    plain = cases.start(
        Case(model, None, {"first": first}, ENGINE | {"max_num_batched_tokens": 1024})
    )
    return Asked(chosen, plain.result()["batches"]["first"])


def run(
    method: str, adaptive: bool, asked: Asked, zoo: Zoo, cases: Cases, mutation: str | None = None
) -> dict[str, Any]:
    speculative = zoo.speculative_config("hybrid", method, adaptive=adaptive)
    # Otherwise a hit leaves the last block out, which is the one that a verified step has filled.
    speculative["disable_eagle_block_drop"] = True
    model = str(zoo.target("hybrid"))
    case = Case(model, speculative, asked.batches(), ENGINE | SETTINGS, mutation)
    return cases.start(case).result()["batches"]


def crossings(asked: Asked, batch: dict[str, Any]) -> list[tuple[int, int]]:
    """(rows accepted up to the block's end, rows beyond) of the step that reached it."""
    found = []
    for ids, steps in zip(asked.prompts, decode_steps(batch), strict=True):
        computed = len(ids)
        for step in steps:
            after = computed + step["accepted"] + 1
            if computed < END <= after:
                found.append((END - computed, after - END))
            computed = after
    return found


@pytest.mark.parametrize(("method", "adaptive"), ARMS)
def test_a_block_filled_by_a_verified_step_serves_a_prefix(
    method: str, adaptive: bool, asked: Asked, zoo: Zoo, cases: Cases
):
    found = run(method, adaptive, asked, zoo, cases)
    assert real_differences(asked.plain, found["first"]) == []
    crossed = crossings(asked, found["first"])
    assert len(crossed) == len(asked.prompts)
    assert sum(upto > 1 and beyond > 0 for upto, beyond in crossed) >= 2, crossed
    for batch in ("again", "once more"):
        hits = [answer["cached_tokens"] for answer in found[batch]["answers"]]
        assert hits.count(END) >= len(asked.prompts) - 1, hits  # a near tie may say other words
        assert real_differences(asked.expected_again(), found[batch]) == []


@pytest.mark.parametrize("mutation", ["replay_never_settles"])
def test_wrong_states_in_the_cache_are_noticed(mutation: str, asked: Asked, zoo: Zoo, cases: Cases):
    found = run("dspark", True, asked, zoo, cases, mutation)
    assert real_differences(asked.plain, found["first"]) == []  # the cached page alone is wrong
    assert any(answer["cached_tokens"] == END for answer in found["again"]["answers"])
    assert real_differences(asked.expected_again(), found["again"])


def test_a_state_left_behind_is_noticed(asked: Asked, zoo: Zoo, cases: Cases):
    """Requests that enter a block without their state."""
    found = run("dspark", True, asked, zoo, cases, "replay_never_moves")
    assert real_differences(asked.plain, found["first"])
