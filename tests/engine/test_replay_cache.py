"""Prefix caching with replay states: what is cached is the state at a block's end, exactly.

Prompts stop two or three tokens before the end of a block, so that a step of verified rows goes
over it. Then the block is asked for again with another token behind it: rows of the answer that
were not left out of the cached state would be seen.
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
LENGTHS = (END - 2, END - 3) * 4
ARMS = [("mtp", False), ("dspark", True)]
CHUNKS = {"max_num_batched_tokens": 1024}
SETTINGS = {
    **CHUNKS,
    "enable_prefix_caching": True,
    "prefix_cache_retention_interval": END,  # vLLM keeps the states of prompts alone by default
    "additional_config": {"ascend_spec": {"gdn_state": "replay"}},
}
FEW_BLOCKS = 24  # room for four prompts, not for four answers that need their second block


@dataclass(frozen=True)
class Asked:
    """Two rounds of prompts, and their answers without speculation and without a cache."""

    prompts: list[list[int]]
    first: Batch
    again: Batch
    plain_first: dict[str, Any]
    plain_again: dict[str, Any]


@pytest.fixture(scope="module")
def asked(zoo: Zoo, prompts: list[dict[str, Any]], cases: Cases) -> Asked:
    model = str(zoo.target("hybrid"))
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    short = [prompt.get("ids") or tokenizer.encode(prompt["text"]).ids for prompt in prompts]
    # Repeated up to the length, so that each ends as its own text does and is answered as such.
    chosen = [
        (ids * (END // len(ids) + 1))[-length:] for ids, length in zip(short, LENGTHS, strict=False)
    ]

    def plain(batch: Batch) -> dict[str, Any]:
        answered = cases.start(Case(model, None, {"plain": batch}, ENGINE | CHUNKS)).result()
        return answered["batches"]["plain"]

    first = Batch([{"ids": ids} for ids in chosen], max_tokens=(24,), logprobs=True)
    plain_first = plain(first)
    said = [
        ids + answer["tokens"] for ids, answer in zip(chosen, plain_first["answers"], strict=True)
    ]
    turned = [{"ids": [*ids[:END], (ids[END] + 37) % 400 + 5]} for ids in said]
    again = Batch(turned, max_tokens=(10,), logprobs=True)
    return Asked(chosen, first, again, plain_first, plain(again))


def run(
    method: str,
    adaptive: bool,
    asked: Asked,
    zoo: Zoo,
    cases: Cases,
    mutation: str | None = None,
    **engine: Any,
) -> dict[str, Any]:
    speculative = zoo.speculative_config("hybrid", method, adaptive=adaptive)
    # Otherwise a hit leaves the last block out, which is the one that a verified step has filled.
    speculative["disable_eagle_block_drop"] = True
    batches = {"first": asked.first, "again": asked.again, "once more": asked.again}
    model = str(zoo.target("hybrid"))
    case = Case(model, speculative, batches, ENGINE | SETTINGS | engine, mutation)
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
    assert real_differences(asked.plain_first, found["first"]) == []
    crossed = crossings(asked, found["first"])
    assert len(crossed) == len(asked.prompts)
    assert sum(beyond > 0 for _, beyond in crossed) >= 2, crossed
    assert any(upto > 1 and beyond > 0 for upto, beyond in crossed), crossed
    for batch in ("again", "once more"):
        hits = [answer["cached_tokens"] for answer in found[batch]["answers"]]
        assert hits.count(END) >= len(asked.prompts) - 1, hits  # a near tie may say other words
        assert real_differences(asked.plain_again, found[batch]) == []


@pytest.mark.parametrize(
    "mutation",
    [
        "replay_settles_too_many_rows",
        pytest.param("replay_never_settles", marks=pytest.mark.thorough),
    ],
)
def test_wrong_states_in_the_cache_are_noticed(mutation: str, asked: Asked, zoo: Zoo, cases: Cases):
    found = run("dspark", True, asked, zoo, cases, mutation)
    assert real_differences(asked.plain_first, found["first"]) == []  # what runs on is right
    assert any(answer["cached_tokens"] == END for answer in found["again"]["answers"])
    assert real_differences(asked.plain_again, found["again"])


@pytest.mark.thorough
def test_a_state_left_behind_is_noticed(asked: Asked, zoo: Zoo, cases: Cases):
    """Requests that enter a block without their state."""
    found = run("dspark", True, asked, zoo, cases, "replay_never_moves")
    assert real_differences(asked.plain_first, found["first"])


def test_preempted_requests_start_again_from_what_is_cached(asked: Asked, zoo: Zoo, cases: Cases):
    found = run("dspark", True, asked, zoo, cases, num_gpu_blocks_override=FEW_BLOCKS)
    assert found["first"]["preemptions"] > 0
    for batch, plain in (("first", asked.plain_first), ("again", asked.plain_again)):
        assert real_differences(plain, found[batch]) == []
