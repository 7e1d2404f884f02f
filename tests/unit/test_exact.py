"""The exactness command around its engines: what it compares, counts and survives."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.engine import exact, exact_arms
from benchmarks.engine.exact_arms import DRAFT_LENGTHS, MAX_REQUESTS, Asked
from vllm_ascend_spec.budget import surface as surfaces
from vllm_ascend_spec.budget.confidence import cold_start
from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.residual import LIMIT
from vllm_ascend_spec.budget.surface import StepKind
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.zoo import DRAFT_TOKENS

COUNTERS = {
    "requests": 10, "drafted": 40, "verified": 30, "accepted": 12, "emitted": 22,
    "expected_accepted": 11.0, "predicted_ms": 0.0, "real_ms": 0.0,
}  # fmt: skip


def answer(*tokens: list[int], gap: float = 0.5) -> dict[str, Any]:
    return {
        "tokens": list(tokens),
        "gaps": [[gap] * len(one) for one in tokens],
        "counters": COUNTERS,
    }


def asked(name: str, *tokens: list[int], log: str = "", gap: float = 0.5) -> Asked:
    return Asked(name, answer(*tokens, gap=gap), log)


LOG = """
/x/vllm/v1/worker/gpu/a.py:12: UserWarning: called a synchronizing CUDA operation (Triggered internally at x.cpp:303.)
  y = x.item()
(EngineCore pid=3) /x/vllm/b.py:7: UserWarning: Tensor.copy_: a non_blocking H2D copy that may be silently synchronous (the CPU tensor is not pinned). Implicit GPU<->CPU sync detected - use a pinned, densely laid out CPU tensor, or wrap with gpu_sync_allowed()
/x/vllm/v1/worker/gpu/a.py:12: UserWarning: called a synchronizing CUDA operation (Triggered internally at x.cpp:303.)
/x/vllm/c.py:1: UserWarning: something else
"""  # noqa: E501


def test_the_first_difference_carries_the_gap_of_the_first_named_arm():
    one = {"tokens": [[1, 2, 3], [4, 5, 6]], "gaps": [[9.0, 0.1, 9.0], [9.0, 9.0, 9.0]]}
    other = {"tokens": [[1, 7, 8], [4, 5, 6]]}
    assert exact.first_differences(one, other) == [0.1]
    rows = exact.compared("case", one, other)
    assert [row.value for row in rows] == [1, 0.1]
    assert rows[1].met


def test_a_difference_that_is_no_near_tie_misses_the_bar():
    one = {"tokens": [[1]], "gaps": [[2.0]]}
    assert exact.compared("case", one, {"tokens": [[2]]})[1].met is False
    upstreams = exact.compared("case", one, {"tokens": [[2]]}, judged=False)[1]
    assert (upstreams.value, upstreams.met) == (2.0, None)


def test_both_kinds_of_waits_are_counted_by_place():
    assert exact.synchronising_places(LOG) == {"worker/gpu/a.py:12": 2, "x/vllm/b.py:7": 1}


def test_waits_that_fixed_lengths_have_too_are_not_the_plugins():
    fixed = asked("mtp fixed", [1], log=LOG.split("\n(")[0])
    arms = {"mtp fixed": fixed, "mtp adaptive": asked("mtp adaptive", [1], log=LOG)}
    assert exact.added_places(arms, "mtp adaptive") == {"x/vllm/b.py:7": 1}
    arms["mtp fixed"] = Asked("mtp fixed")
    assert exact.added_places(arms, "mtp adaptive").total() == 3


def test_a_failed_arm_is_named_and_the_others_are_compared():
    arms = {
        name: asked(name, [1, 2], gap=0.125)
        for name in ("none", "mtp fixed", "mtp adaptive", "mtp lengths", "eagle3 adaptive")
    } | {"eagle3 fixed": Asked("eagle3 fixed"), "mtp adaptive": asked("mtp adaptive", [1, 3])}
    result = exact.result_of(["mtp", "eagle3"], arms, "device", 1, 2, "replay")
    cases = {row.case for row in result.rows if row.metric.startswith("largest")}
    assert cases == {
        "mtp fixed against none", "mtp adaptive against none", "mtp adaptive against mtp fixed",
        "mtp lengths against none", "mtp lengths against mtp fixed", "eagle3 adaptive against none",
    }  # fmt: skip
    assert exact.tell(result, arms) == ["eagle3 fixed gave no answer"]
    gaps = [row.value for row in result.rows if row.case == "mtp adaptive against mtp fixed"]
    assert gaps == [1, 0.125]


def test_a_real_difference_of_the_plugins_arm_is_a_missed_bar():
    names = ("ngram fixed", "ngram adaptive")
    arms = {"none": asked("none", [1, 2]), **{name: asked(name, [1, 3]) for name in names}}
    result = exact.result_of(["ngram"], arms, "device", 1, 2, "replay")
    assert exact.tell(result, arms) == [
        "ngram adaptive against none: largest top-2 gap where they part is 0.5"
    ]


def arm(do: Callable[[], Any]) -> Any:
    return SimpleNamespace(ask=lambda **_: do(), close=lambda: None)


def test_arms_are_asked_at_once_and_fail_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    together = threading.Barrier(2)

    def answers() -> dict[str, Any]:
        together.wait(1.0)
        return answer([1])

    def lost() -> Any:
        raise BrokenPipeError

    behaviour: dict[str, list[Any]] = {
        "one": [arm(answers)], "two": [arm(answers)], "never started": [],
        "died": [arm(lambda: None)], "broke": [arm(lost)], "hung": [arm(lambda: time.sleep(5))],
    }  # fmt: skip
    (tmp_path / "died.log").write_text("CUDA error")
    monkeypatch.setattr(exact_arms, "start", lambda wanted, _: behaviour[next(iter(wanted))])
    began = time.monotonic()
    found = exact_arms.ask({name: {} for name in behaviour}, tmp_path, 1.0, do="answers")
    assert time.monotonic() - began < 2.0
    assert {name for name, one in found.items() if one.answer} == {"one", "two"}
    assert found["died"].log == "CUDA error"


def test_every_arm_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    host = exact_arms.Host("a GPU", {}, lambda method: {"cost_surface": f"{method}.json"})
    arms = exact_arms.requests(list(exact_arms.METHODS), host)
    assert len(arms) == 1 + 2 * len(exact_arms.METHODS) + len(exact_arms.WITH_LENGTHS)
    options = {n: a["engine"]["additional_config"]["ascend_spec"] for n, a in arms.items()}
    assert options["eagle3 lengths"]["cost_surface"] == "eagle3.json"
    assert options["eagle3 lengths"]["draft_lengths"] == list(DRAFT_LENGTHS)
    assert options["eagle3 adaptive"]["gdn_state"] == "replay"
    assert options["eagle3 fixed"]["gdn_state"] == "native"
    assert arms["none"]["environment"]["OMP_NUM_THREADS"] == "3"
    assert "VLLM_GPU_SYNC_CHECK" not in arms["none"]["environment"]
    drafter = arms["draft_model adaptive"]["engine"]["speculative_config"]
    assert drafter["model"].endswith("dense") and drafter["enable_adaptive_verification"]


def test_with_prefix_caching_arms_show_what_a_cache_and_what_fixed_k_alone_do(tmp_path: Path):
    host = exact_arms.Host("nowhere", {}, lambda _: {})
    arms = exact_arms.requests(["dspark"], host, prefix_caching=True)
    cached = {name: arm["engine"]["enable_prefix_caching"] for name, arm in arms.items()}
    assert cached == {
        "none": False, "none cached": True, "dspark fixed": True, "dspark fixed uncached": False,
        "dspark adaptive": True,
    }  # fmt: skip
    upstreams = {("none", "none cached"), ("none", "dspark fixed uncached")}
    assert upstreams <= set(exact.comparisons(["dspark"], list(arms)))
    assert "none cached" not in exact_arms.requests(["dspark"], host)


@pytest.mark.parametrize("correction", [1.0, math.exp(-LIMIT)])
def test_short_drafts_pay_by_the_assumed_costs(
    correction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also once all prices are corrected as far as they can be, and the host takes 100 ms."""
    engine = SimpleNamespace(version="0.32.0")
    monkeypatch.setattr("vllm_ascend_spec.engine.versions.require_engine", lambda: engine)
    path = tmp_path / "costs.json"
    surfaces.save(exact_arms.assumed_costs("mtp", "a GPU"), path)
    cost = CostModel(surfaces.load(path), MAX_REQUESTS, 8192)
    chances = cold_start("mtp", DRAFT_TOKENS).cumprod()

    def rate(depth: int) -> float:
        target = cost.verify(StepKind.FULL, 32, 32, 32 * depth, 32, 200.0)[-1]
        drafter = cost.drafter.prices(depth, 200.0)[32]
        step = max(correction * (target + drafter), 100e6)
        return float((1 + chances[:depth].sum()) / step)

    best = max((*DRAFT_LENGTHS, DRAFT_TOKENS), key=rate)
    assert best in DRAFT_LENGTHS, {d: rate(d) for d in (*DRAFT_LENGTHS, DRAFT_TOKENS)}


@pytest.mark.parametrize("given", ["suffix", "mpt"])
def test_methods_that_do_not_run_are_refused(given: str):
    with pytest.raises(UserError, match=r"--methods: .*(Choose out of|did you mean 'mtp')"):
        exact.chosen_methods(f"mtp,{given}")


@pytest.mark.parametrize("option", ["--methods= ,", "--adaptive-state=replai"])
def test_options_that_compare_nothing_are_refused(option: str):
    app = typer.Typer()
    app.command()(exact.main)
    found = CliRunner().invoke(app, [option])
    assert found.exit_code == 2 and option.split("=")[0] in found.output
