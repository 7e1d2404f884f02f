"""vllm-ascend's own Model Runner V2 with this plugin, on the double: right tokens by every method.

Needs VLLM_ASCEND_SRC and the environment of `tools/npu_env.sh double`; skipped, with the reason,
where they are absent. An engine takes half a minute, so each case runs once a session.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from npu_double import harness
from npu_double.harness import Case, Judgement
from npu_double.record import Record

from vllm_ascend_spec.zoo import Zoo

WHY_NOT = harness.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

ARMS = [
    ("dense", "none"),
    ("dense", "dspark"),
    ("hybrid", "none"),
    ("hybrid", "mtp"),
    ("hybrid", "eagle3"),
    ("hybrid", "dflash"),
    ("hybrid", "dspark"),
]
ADAPTIVE = [
    ("dense", "dspark"),
    ("hybrid", "dspark"),
    ("hybrid", "dflash"),
    ("hybrid", "mtp"),
    ("hybrid", "eagle3"),
]
SPECULATORS = {
    "none": None,
    "mtp": "AscendMTPSpeculator",
    "eagle3": "AscendEagleSpeculator",
    "dflash": "AscendDFlashSpeculator",
    "dspark": "AscendDSparkSpeculator",
}
PROMPTS = 5
DRAFT_TOKENS = 7

Ran = tuple[dict[str, Any], Judgement | None]
RunCase = Callable[[Case], Ran]


@pytest.fixture(scope="session")
def record() -> Iterator[Record]:
    record = Record()
    yield record
    record.write()


@pytest.fixture(scope="session")
def run_case(tmp_path_factory: pytest.TempPathFactory) -> RunCase:
    """Answer and judgement of a case; run once a session. No judgement where it raised."""
    known: dict[str, Ran] = {}

    def run_case(case: Case) -> Ran:
        key = repr(case)
        if key not in known:
            answer = harness.run(case, tmp_path_factory.mktemp("double"))
            known[key] = (answer, None if answer["error"] else harness.judge(case.model, answer))
        return known[key]

    return run_case


def case(target: str, method: str, **changes: Any) -> Case:
    zoo = Zoo()
    texts = tuple(prompt.text for prompt in zoo.prompts()[:PROMPTS])
    speculative = zoo.speculative_config(target, method, DRAFT_TOKENS)
    return replace(Case(str(zoo.target(target)), speculative, texts), **changes)


def right(ran: Ran) -> tuple[dict[str, Any], Judgement]:
    """The answer of a run that ended well, with every operator's value known."""
    answer, judgement = ran
    assert answer["error"] is None, answer["error"]["traceback"][-3000:]
    assert answer["missing"] == [], "operators without a reference: their values are garbage"
    assert judgement is not None
    return answer, judgement


@pytest.fixture(params=ARMS, ids=[f"{target}-{method}" for target, method in ARMS])
def arm(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


def test_tokens_are_the_models_own(arm: tuple[str, str], run_case: RunCase, record: Record):
    answer, judgement = right(run_case(case(*arm)))
    record.engine("-".join(arm), answer, judgement)
    assert [len(tokens) for tokens in answer["tokens"]] == [16, 12, 20, 16, 12]
    assert judgement.right, judgement.gaps


def test_vllm_ascends_own_parts_run(arm: tuple[str, str], run_case: RunCase):
    target, method = arm
    engine = right(run_case(case(*arm)))[0]["engine"]
    speculator = engine["speculator"] and engine["speculator"].rpartition(".")[2]
    assert speculator == SPECULATORS[method]
    assert engine["platform"] == "vllm_ascend_spec.engine.ascend_platform.AscendSpecPlatform"
    assert engine["runner"].startswith("vllm_ascend.worker.v2.model_runner.")
    assert engine["async_scheduling"] and engine["device"] == "npu:0"
    backends = {name.rpartition(".")[2] for name in engine["backends"]}
    gdn = {"AscendGDNAttentionBackend"} if target == "hybrid" else set()
    assert backends == {"AscendAttentionBackend"} | gdn


def test_drafts_are_accepted_and_rejected(arm: tuple[str, str], run_case: RunCase):
    """Otherwise verification was not put to the test."""
    if arm[1] == "none":
        pytest.skip("nothing drafts")
    counters = right(run_case(case(*arm)))[0]["counters"]
    assert counters["draft_tokens"] > counters["accepted_tokens"] > 0


def test_prompts_longer_than_a_step_run_beside_rows_that_verify(run_case: RunCase):
    answer, _ = right(run_case(case("hybrid", "dspark")))
    mixed = [step for step in answer["steps"] if len(set(step["prefill"])) == 2]
    assert any(max(step["rows"]) > DRAFT_TOKENS + 1 for step in mixed)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("none", "multiple values for keyword argument 'is_prefilling'"),
        ("mtp", "has no attribute 'seq_lens'"),
    ],
)
def test_without_its_repair_a_hybrid_model_stops(
    method: str, message: str, run_case: RunCase, record: Record
):
    """The two defects that the plugin repairs are in this vllm-ascend: each by itself stops it."""
    without = {"none": "without_prefilling_repair", "mtp": "without_lengths_repair"}[method]
    answer, _ = run_case(case("hybrid", method, mutation=without))
    seen = answer["error"] is not None and message in answer["error"]["message"]
    record.fault(f"hybrid-{method} {without.replace('_', ' ')}", seen)
    assert seen, answer["error"]


@pytest.fixture(scope="session")
def adaptive(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """`adaptive(target, method, ...)`: the case with adaptive verification on lane L0."""
    folder = tmp_path_factory.mktemp("surfaces")

    def adaptive(target: str, method: str, **changes: Any) -> Case:
        surface = harness.cost_surface(folder, target, method, DRAFT_TOKENS)
        options = {"adaptive": True, "cost_surface": str(surface)}
        engine = {"additional_config": {"ascend_spec": options}}
        return case(target, method, engine=engine, **changes)

    return adaptive


@pytest.mark.parametrize(("target", "method"), ADAPTIVE)
def test_adaptive_tokens_are_the_models_own(
    target: str, method: str, adaptive: Callable[..., Case], run_case: RunCase, record: Record
):
    answer, judgement = right(run_case(adaptive(target, method)))
    record.engine(f"{target}-{method} adaptive L0", answer, judgement)
    assert judgement.right, judgement.gaps
    lengths = harness.verified_lengths(answer)
    assert harness.ragged_steps(answer) >= 5, lengths
    assert {1, DRAFT_TOKENS + 1} <= {length for step in lengths for length in step}


@pytest.mark.parametrize(
    ("target", "method", "is_adaptive", "fault"),
    [
        ("hybrid", "dspark", False, "accepted_counts_stay_one"),
        ("hybrid", "eagle3", False, "host_lengths_are_optimistic"),
        ("hybrid", "dspark", True, "accepted_counts_stay_one"),
        ("hybrid", "eagle3", True, "host_lengths_are_optimistic"),
        ("hybrid", "dspark", True, "stock_operator_for_every_row"),
        ("hybrid", "dspark", True, "anchor_only_rows_as_prompt_chunks"),
        ("hybrid", "dspark", True, "rows_of_the_next_request"),
    ],
)
def test_a_fault_is_seen(
    target: str,
    method: str,
    is_adaptive: bool,
    fault: str,
    adaptive: Callable[..., Case],
    run_case: RunCase,
    record: Record,
):
    """The fault changes tokens or stops the engine; without it neither happens (tests above)."""
    make = adaptive if is_adaptive else case
    answer, judgement = run_case(make(target, method, mutation=fault))
    seen = answer["error"] is not None or (judgement is not None and not judgement.right)
    lane = " adaptive L0" if is_adaptive else ""
    record.fault(f"{target}-{method}{lane}: {fault.replace('_', ' ')}", seen)
    assert seen, (answer["steps"], judgement)
