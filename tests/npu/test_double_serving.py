"""What serving adds, on the double: several NPUs, a prefix cache, sampling, and the commands."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from npu_double import harness, judge
from npu_double.cases import RunCase, case, ran_well, right
from npu_double.harness import Case
from npu_double.record import Record

from vllm_ascend_spec.budget import surface as surface_files
from vllm_ascend_spec.budget.surface import StepKind
from vllm_ascend_spec.zoo import Zoo

WHY_NOT = harness.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

TEMPERATURE, TOP_P = 1.0, 0.95
# After the zoo's own prompts the model is all but certain, and samples say nothing.
OPEN_PROMPTS = (
    "import os", "def main(", "Return the number of", "List the tools of a carpenter", "class ",
)  # fmt: skip


@pytest.mark.parametrize("lane", ["L0", "L1"])
def test_two_npus_take_the_same_decisions(
    lane: str, run_case: RunCase, surfaces: Path, record: Record
):
    """Each rank has its own scheduler and planner; one row's difference would hang a collective."""
    whole = case("hybrid", "dspark", graphs=lane == "L1", surfaces=surfaces, ranks=2)
    answer, judgement = right(run_case(replace(whole, prompts=whole.prompts[:3])))
    record.engine(f"hybrid-dspark adaptive, lane {lane}, 2 NPUs", answer, judgement)
    assert len(answer["others"]) == 1
    assert answer["engine"]["lane"] == lane and answer["engine"]["ranks"] == 2
    assert judge.ragged_steps(answer) >= 1


def test_a_rank_that_decides_otherwise_is_seen(surfaces: Path, tmp_path: Path, record: Record):
    whole = case("dense", "dspark", surfaces=surfaces, mutation="ranks_decide_apart", ranks=2)
    small = replace(whole, prompts=whole.prompts[:2], max_tokens=(8, 8))
    seen = _parts(small, tmp_path)
    record.fault("dense-dspark adaptive, 2 NPUs: ranks decide apart", seen)
    assert seen


def _parts(case: Case, folder: Path) -> bool:
    """Whether ranks stop, hang until a collective gives up, or come to different steps."""
    try:
        answer = harness.run(case, folder)
    except harness.ChildError:
        return True
    ranks = (answer, *answer["others"])
    return any(r["error"] for r in ranks) or any(r["steps"] != answer["steps"] for r in ranks)


def with_prefix_cache(
    target: str, surfaces: Path, prompts: tuple[str, ...], cuts: tuple[int, ...], **engine: Any
) -> Case:
    """Two rounds of the same prompts; in the second one their beginnings are cached."""
    base = case(target, "dspark", surfaces=surfaces)
    cached = base.engine | {"enable_prefix_caching": True} | engine
    return replace(
        base, engine=cached, prompts=prompts, prompt_tokens=cuts, max_tokens=(14,), rounds=2
    )


def long_text() -> str:
    return "".join(prompt.text + (prompt.reference or "") for prompt in Zoo().prompts()[20:30])


def test_a_cached_prefix_of_a_dense_model(run_case: RunCase, surfaces: Path, record: Record):
    # Of two whole blocks of 128 the last is dropped, as for every drafter that reads states.
    short = [prompt.text for prompt in Zoo().prompts()[2:4]]
    made = with_prefix_cache(
        "dense", surfaces, (long_text(), *short), (262, 24, 60), max_model_len=320
    )
    answer, judgement = right(run_case(made))
    record.engine("dense-dspark adaptive, lane L0, cached prefix", answer, judgement)
    assert answer["cached_tokens"] == [0, 0, 0, 128, 0, 0]
    assert judge.ragged_steps(answer) >= 1


def test_a_cached_prefix_of_a_hybrid_model(run_case: RunCase, surfaces: Path, record: Record):
    """Its recurrent state is cached by block, and trimmed rows cross the edge of one."""
    # A block is as large as a state: 256 tokens, and a step of a prompt ends at a block's edge.
    short = [prompt.text for prompt in Zoo().prompts()[2:4]]
    made = with_prefix_cache(
        "hybrid", surfaces, (long_text(), *short), (762, 24, 60),
        max_model_len=1024, max_num_batched_tokens=320,
    )  # fmt: skip
    answer, judgement = right(run_case(made))
    record.engine("hybrid-dspark adaptive, lane L0, cached prefix", answer, judgement)
    assert answer["cached_tokens"] == [0, 0, 0, 256, 0, 0]
    lengths = {length for step in answer["steps"] for length in step["lengths"]}
    assert 762 in lengths and max(lengths) > 768
    assert judge.ragged_steps(answer) >= 1


def sampled(surfaces: Path, lane: str = "L0", mutation: str | None = None) -> Case:
    base = case("hybrid", "dspark", graphs=lane == "L1", surfaces=surfaces, mutation=mutation)
    sampling = {"temperature": TEMPERATURE, "top_p": TOP_P}
    return replace(base, prompts=OPEN_PROMPTS, max_tokens=(16,), sampling=sampling)


@pytest.mark.parametrize("lane", ["L0", "L1"])
def test_samples_come_from_the_models_distribution(
    lane: str, run_case: RunCase, surfaces: Path, record: Record
):
    """Temperature and top-p, while drafts are trimmed."""
    made = sampled(surfaces, lane)
    answer, _ = run_case(made)
    assert ran_well(answer)
    found = judge.surprise(made.model, answer, TEMPERATURE, TOP_P)
    record.sampled(f"hybrid-dspark adaptive, lane {lane}, sampled", answer, found)
    assert found.right, found
    # Otherwise neither the measure nor rejection was put to the test.
    assert found.spread > 25
    counters = answer["counters"]
    assert counters["draft_tokens"] > counters["accepted_tokens"] > 0
    assert judge.ragged_steps(answer) >= 3


@pytest.mark.parametrize("fault", ["sampling_is_greedy", "every_draft_token_is_accepted"])
def test_a_fault_of_sampling_is_seen(fault: str, run_case: RunCase, surfaces: Path, record: Record):
    made = sampled(surfaces, mutation=fault)
    answer, _ = run_case(made)
    assert ran_well(answer)
    found = judge.surprise(made.model, answer, TEMPERATURE, TOP_P)
    record.fault(f"hybrid-dspark adaptive, sampled: {fault.replace('_', ' ')}", not found.right)
    assert not found.right, found


PROFILED = {
    "L0": (
        {"enforce_eager": True, "max_num_seqs": 1},
        {(StepKind.EAGER, rows, 1) for rows in (1, 2, 3, 4)},
    ),
    "L1": (
        {
            "enforce_eager": False,
            "max_num_seqs": 4,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [4, 8, 16],
            },
        },
        {(StepKind.FULL, 4, 1), *((StepKind.FULL, n, 4) for n in (4, 8, 16))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("lane", PROFILED)
def test_profile_times_every_size_and_the_engine_takes_its_file(lane: str, tmp_path: Path):
    """The times are the double's; that each size is launched, timed and found again is not."""
    arguments, wanted = PROFILED[lane]
    engine = arguments | {
        "max_model_len": 128, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 64 << 20,
        "dtype": "bfloat16",
    }  # fmt: skip
    out = tmp_path / "surface.json"
    done = harness.python(
        tmp_path, "-m", "npu_double.command", "profile", "dense", "--out", str(out),
        "--method", "dspark", "-k", "3", "--engine-args", json.dumps(engine),
        VLLM_ASCEND_SRC=os.environ["VLLM_ASCEND_SRC"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = surface_files.load(out)
    assert {(point.kind, point.rows, point.requests) for point in found.target} == wanted
    assert {point.requests for point in found.drafter} == {requests for _, _, requests in wanted}
    assert found.measured["lane"] == lane and found.host.floor_ms > 0
    assert all(point.ms > 0 for point in (*found.target, *found.logits, *found.drafter))

    options = {"adaptive": True, "cost_surface": str(out)}
    base = case("dense", "dspark")
    speculative = Zoo().speculative_config("dense", "dspark", 3)
    used = replace(
        base, speculative_config=speculative, prompts=base.prompts[:1], max_tokens=(6,),
        engine=engine | {"additional_config": {"ascend_spec": options}},
    )  # fmt: skip
    (tmp_path / "used").mkdir()
    answer = harness.run(used, tmp_path / "used")
    assert ran_well(answer) and judge.judge(used.model, answer).right
    assert answer["engine"]["lane"] == lane
