"""State that moves: prefix caching, and requests that lose their blocks and start again."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import RunArm
from harness import Batch, differences, real_differences

ARMS = [("mtp", False), ("dspark", True)]
# Attention and recurrent state share pages of 256 tokens; a hit is at least two of them.
SHARED_PREFIX = 1040
# Room for two of the four requests once they need their second page of attention cache.
FEW_BLOCKS = 36


@pytest.fixture(scope="module")
def shared(prompts: list[dict[str, Any]]) -> dict[str, Batch]:
    """The same long prompts twice: the second time their prefix lies in the cache."""
    long = [{**prompt, "length": SHARED_PREFIX} for prompt in prompts[:3]]
    batch = Batch(long, max_tokens=(20, 14))
    return {"first": batch, "again": batch}


@pytest.fixture(scope="module")
def growing(prompts: list[dict[str, Any]]) -> dict[str, Batch]:
    """Prompts that need a second page of attention cache soon after they began to decode."""
    long = [{**prompt, "length": 240} for prompt in prompts[:6]]
    return {"growing": Batch(long, max_tokens=(40,))}


@pytest.mark.parametrize(("method", "adaptive"), ARMS)
def test_a_prefix_out_of_the_cache_changes_nothing(
    method: str, adaptive: bool, shared: dict[str, Batch], run_arm: RunArm
):
    settings = {
        "asked": shared,
        "enable_prefix_caching": True,
        "max_model_len": 1536,
        "max_num_batched_tokens": 1024,
    }
    run_arm("hybrid", method, adaptive=adaptive, wait=False, **settings)
    plain = run_arm("hybrid", "none", **settings)["batches"]
    cached = run_arm("hybrid", method, adaptive=adaptive, **settings)["batches"]
    assert all(answer["cached_tokens"] == 0 for answer in cached["first"]["answers"])
    assert all(answer["cached_tokens"] > 0 for answer in cached["again"]["answers"])
    for batch in ("first", "again"):
        assert real_differences(plain[batch], cached[batch]) == []
    assert real_differences(plain["first"], cached["again"]) == []


@pytest.mark.parametrize(("method", "adaptive"), ARMS)
def test_a_preempted_request_starts_from_nothing(
    method: str, adaptive: bool, growing: dict[str, Batch], run_arm: RunArm
):
    arm = {"adaptive": adaptive, "asked": growing}
    few = {"num_gpu_blocks_override": FEW_BLOCKS}
    run_arm("hybrid", method, **arm, wait=False)
    run_arm("hybrid", method, **arm, **few, wait=False)
    plain = run_arm("hybrid", "none", asked=growing)["batches"]["growing"]
    roomy = run_arm("hybrid", method, **arm)["batches"]["growing"]
    tight = run_arm("hybrid", method, **arm, **few)["batches"]["growing"]
    assert tight["preemptions"] > roomy["preemptions"] == 0
    assert real_differences(plain, tight) == []
    # What is computed anew is computed in other chunks, so a near tie may fall the other way.
    assert {d.prompt for d in differences(roomy, tight)} <= {
        d.prompt for d in differences(plain, tight)
    } | {d.prompt for d in differences(plain, roomy)}
