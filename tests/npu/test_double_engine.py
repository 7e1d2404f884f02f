"""vllm-ascend's own Model Runner V2 with this plugin, on the double: right tokens by every method.

Needs VLLM_ASCEND_SRC and the environment of `tools/npu_env.sh double`; skipped, with the reason,
where they are absent. An engine takes half a minute to a minute, and each case runs once a session.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from npu_double import harness, judge
from npu_double.cases import DRAFT_TOKENS, RunCase, case, right, went_wrong
from npu_double.record import Record

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
SPECULATING = [arm for arm in ARMS if arm[1] != "none"]
IN_TURN = "drafts_every_other_step"
SPECULATORS = {
    "none": None,
    "mtp": "AscendMTPSpeculator",
    "eagle3": "AscendEagleSpeculator",
    "dflash": "AscendDFlashSpeculator",
    "dspark": "AscendDSparkSpeculator",
}


@pytest.mark.parametrize(("target", "method"), ARMS)
def test_tokens_are_the_models_own(target: str, method: str, run_case: RunCase, record: Record):
    answer, judgement = right(run_case(case(target, method)))
    record.engine(f"{target}-{method} eager", answer, judgement)


@pytest.mark.parametrize(("target", "method"), ARMS)
def test_vllm_ascends_own_parts_run(target: str, method: str, run_case: RunCase):
    engine = right(run_case(case(target, method)))[0]["engine"]
    speculator = engine["speculator"] and engine["speculator"].rpartition(".")[2]
    assert speculator == SPECULATORS[method]
    assert engine["platform"] == "vllm_ascend_spec.engine.ascend_platform.AscendSpecPlatform"
    assert engine["runner"] == "vllm_ascend_spec.engine.ascend_runner.AscendSpecModelRunner"
    assert "vllm_ascend.worker.v2.model_runner.NPUModelRunner" in engine["runner_bases"]
    assert engine["async_scheduling"] and engine["device"] == "npu:0"
    backends = {name.rpartition(".")[2] for name in engine["backends"]}
    gdn = {"AscendGDNAttentionBackend"} if target == "hybrid" else set()
    assert backends == {"AscendAttentionBackend"} | gdn


@pytest.mark.parametrize(("target", "method"), SPECULATING)
def test_drafts_are_accepted_and_rejected(target: str, method: str, run_case: RunCase):
    """Otherwise verification was not put to the test."""
    counters = right(run_case(case(target, method)))[0]["counters"]
    assert counters["draft_tokens"] > counters["accepted_tokens"] > 0


def test_prompts_longer_than_a_step_run_beside_rows_that_verify(run_case: RunCase):
    answer, _ = right(run_case(case("hybrid", "dspark")))
    mixed = [step for step in answer["steps"] if len(set(step["prefill"])) == 2]
    assert any(max(step["rows"]) > DRAFT_TOKENS + 1 for step in mixed)


@pytest.mark.parametrize(("target", "method"), ARMS)
def test_replayed_graphs_give_the_models_own_tokens(
    target: str, method: str, run_case: RunCase, record: Record
):
    """Target and drafter in FULL graphs, each attention updated before its replay goes on."""
    answer, judgement = right(run_case(case(target, method, graphs=True)))
    record.engine(f"{target}-{method} graphs", answer, judgement)
    graphs = answer["graphs"]
    assert graphs["captures"] >= 3 and graphs["replays"] >= 10
    attention_layers = {"dense": 4, "hybrid": 1}[target]
    assert graphs["updates"] >= graphs["replays"] * min(attention_layers, 1)
    verifying = judge.verified_lengths(answer)
    assert any(len(lengths) == 3 for lengths in verifying), "no step was padded"


@pytest.mark.parametrize(("target", "method"), SPECULATING)
def test_adaptive_tokens_are_the_models_own(
    target: str, method: str, run_case: RunCase, surfaces: Path, record: Record
):
    """Lane L0: the host reads this step's confidences."""
    answer, judgement = right(run_case(case(target, method, surfaces=surfaces)))
    record.engine(f"{target}-{method} adaptive, lane L0", answer, judgement)
    lengths = judge.verified_lengths(answer)
    assert answer["engine"]["lane"] == "L0"
    assert judge.ragged_steps(answer) >= 5, lengths
    assert {1, DRAFT_TOKENS + 1} <= {length for step in lengths for length in step}


def test_requests_that_accepted_drafts_may_get_none_next(
    run_case: RunCase, surfaces: Path, record: Record
):
    """The state of such a row lies in a later column, and its convolution's history too."""
    turns = case("hybrid", "dspark", surfaces=surfaces, mutation=IN_TURN)
    answer, judgement = right(run_case(turns))
    record.engine("hybrid-dspark adaptive, drafts every other step", answer, judgement)
    assert {1, DRAFT_TOKENS + 1} == {
        n for lengths in judge.verified_lengths(answer) for n in lengths
    }


@pytest.mark.parametrize(("target", "method"), SPECULATING)
def test_adaptive_tokens_are_the_models_own_in_graphs(
    target: str, method: str, run_case: RunCase, surfaces: Path, record: Record
):
    """Lane L1: confidences of the round before; rows of any length replay the target's graph."""
    answer, judgement = right(run_case(case(target, method, graphs=True, surfaces=surfaces)))
    record.engine(f"{target}-{method} adaptive, lane L1", answer, judgement)
    assert answer["engine"]["lane"] == "L1"
    assert judge.ragged_steps(answer) >= 5
    if target == "dense":
        # Four attention layers a target graph, one a drafter graph: updates tell them apart.
        graphs = answer["graphs"]
        of_the_target = (graphs["updates"] - graphs["replays"]) / 3
        pure = [step["rows"] for step in answer["steps"] if not any(step["prefill"])]
        assert of_the_target > sum(len(set(rows)) == 1 for rows in pure)


@pytest.mark.parametrize(
    ("method", "mutation", "message"),
    [
        ("none", "without_prefilling_repair", "multiple values for keyword argument"),
        ("mtp", "without_lengths_repair", "has no attribute 'seq_lens'"),
    ],
)
def test_without_its_repair_a_hybrid_model_stops(
    method: str, mutation: str, message: str, run_case: RunCase, record: Record
):
    """The defects are in this vllm-ascend: each by itself stops it."""
    answer, _ = run_case(case("hybrid", method, mutation=mutation))
    seen = answer["error"] is not None and message in answer["error"]["message"]
    record.fault(f"hybrid-{method} eager: {mutation.replace('_', ' ')}", seen)
    assert seen, answer["error"]


@pytest.mark.parametrize(
    ("method", "graphs", "is_adaptive", "fault"),
    [
        ("dspark", False, False, "accepted_counts_stay_one"),
        ("eagle3", False, False, "host_lengths_are_optimistic"),
        ("dspark", False, True, "accepted_counts_stay_one"),
        ("eagle3", False, True, "host_lengths_are_optimistic"),
        ("dspark", False, True, "stock_operator_for_every_row"),
        ("dspark", False, True, f"{IN_TURN}+rows_are_what_vllm_ascend_takes_them_for"),
        ("dspark", False, True, "rows_of_the_next_request"),
        ("dspark", True, False, "rows_are_what_vllm_ascend_takes_them_for"),
        ("dspark", True, False, "captured_attention_is_not_updated"),
        ("dspark", True, False, "captured_attention_keeps_its_lengths"),
    ],
)
def test_a_fault_is_seen(
    method: str,
    graphs: bool,
    is_adaptive: bool,
    fault: str,
    run_case: RunCase,
    surfaces: Path,
    record: Record,
):
    """The fault changes tokens or stops the engine; without it neither happens (tests above)."""
    where = surfaces if is_adaptive else None
    ran = run_case(case("hybrid", method, graphs=graphs, surfaces=where, mutation=fault))
    seen = went_wrong(ran)
    arm = f"hybrid-{method} {'graphs' if graphs else 'eager'}{', adaptive' * is_adaptive}"
    record.fault(f"{arm}: {fault.replace('_', ' ')}", seen)
    assert seen, ran[1]
