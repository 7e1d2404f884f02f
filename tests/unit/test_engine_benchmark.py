"""The engine benchmarks' arithmetic: what is compared with what, and what counts as met."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine import (
    acceptance,
    adaptive,
    arms,
    cases,
    driver,
    groups,
    plot,
    shapes,
    table,
    turns,
)
from benchmarks.engine.cases import Case
from benchmarks.results import Result, Row


def window(tokens_per_s: float) -> dict[str, Any]:
    times = dict.fromkeys(("step_ms", "thread_ms", "process_ms"), 1.0)
    return {"tokens_per_s": tokens_per_s, "counters": {}, **times}


def test_conditional_chances_multiply_to_the_unconditional_ones():
    for rates in (acceptance.EASY, acceptance.HARD):
        chances = acceptance.conditional(rates)
        assert [math.prod(chances[: i + 1]) for i in range(7)] == pytest.approx(rates)


def test_adaptive_is_held_against_the_best_upstream_arm_of_the_same_load():
    speeds = {
        "no speculation": 100.0,
        "K = 7": 80.0,
        "K = 7 with replay states": 120.0,
        "adaptive": 98.0,
        "adaptive with vLLM's planner": 99.5,
    }
    windows = {name: [window(v)] for name, v in speeds.items()}
    rows = adaptive.compared(windows, Case(512, 8), ["no speculation", "K = 7"])
    ratios = {row.case.split(", ", 2)[2]: row for row in rows if row.metric.startswith("over")}
    assert ratios["adaptive"].value == 0.98
    assert ratios["adaptive"].met is False
    assert ratios["adaptive with vLLM's planner"].met is None
    assert "no speculation" in ratios["adaptive"].metric
    assert ratios["K = 7 with replay states"].value == 1.2


def test_fixed_lengths_are_compared_where_upstreams_adaptive_arm_is_better(tmp_path: Path):
    setting = arms.Setting("dense", "dspark", 4, [3], [Case(8, 64)], 1, tmp_path)
    speeds = {"K = 3": 100.0, groups.VLLM_ADAPTIVE: 110.0, "adaptive": 121.0}
    windows = {name: [window(v)] for name, v in speeds.items()}
    rows = adaptive.compared(windows, Case(8, 64), setting.upstream())
    assert [row.value for row in rows if row.metric.startswith("over")] == [1.21, 1.1]
    grouped = [row.model_copy(update={"case": f"group 1, {row.case}"}) for row in rows]
    assert [row.value for row in adaptive.worth(grouped)] == [1.21]


def test_an_arm_that_was_not_measured_misses_a_bar():
    asked = {"K = 3": [Case(8, 64)], "K = 7": [Case(8, 1)], "adaptive": [Case(8, 64), Case(8, 1)]}
    (row,) = adaptive.missing(asked, ["K = 3"], Case(8, 64))
    assert row.case == "64 requests, 8 tokens, adaptive" and row.met is False


def test_a_gain_counts_against_the_best_arm_of_all_groups():
    def ratio(group: int, load: int, value: float) -> Row:
        case = f"group {group}, {load} requests, 512 tokens, adaptive"
        return Row(case=case, metric="over upstream's best arm (K = 3)", value=value, unit="x")

    rows = [ratio(1, 8, 1.3), ratio(2, 8, 1.05), ratio(1, 64, 1.12), ratio(2, 64, 1.2)]
    (found,) = adaptive.worth(rows)
    assert (found.value, found.met) == (1.12, True)
    assert found.case.startswith("64 requests")
    metric = "over upstream's best arm (adaptive with vLLM's planner)"
    beside_vllms = ratio(3, 64, 1.01).model_copy(update={"metric": metric})
    assert adaptive.worth([*rows, beside_vllms]) == [found]


def test_an_arm_may_be_left_out_of_large_loads():
    asked = [Case(512, 256), Case(512, 64)]
    (group,) = groups.parsed("no speculation, K = 7:64", asked, ["no speculation", "K = 7"])
    assert group == {"no speculation": asked, "K = 7": [Case(512, 64)]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("K=7, adaptive", "no arm is called 'K=7', but K = 7, adaptive"),
        ("K = 7:8, adaptive", "'K = 7:8' leaves none of the loads"),
        ("K = 7:x, adaptive", "'K = 7:x' should end in the largest load"),
    ],
)
def test_groups_that_cannot_run_are_refused(given: str, said: str):
    with pytest.raises(ValueError, match=f"--groups: {said}"):
        groups.parsed(given, [Case(512, 64)], ["K = 7", "adaptive"])


def test_a_kept_arm_rests_in_a_group_that_does_not_name_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    case = Case(8, 1)
    setting = arms.Setting("hybrid", "dspark", 4, [3], [case], 1, tmp_path)
    kept = SimpleNamespace(name="adaptive")
    other = SimpleNamespace(name="K = 3", close=lambda: None)
    monkeypatch.setattr(adaptive, "start", lambda requests, folder: [other])
    monkeypatch.setattr(adaptive, "measure", lambda arm, case, repeats: [window(1.0)])
    monkeypatch.setattr(adaptive.Run, "_write", lambda run: None)
    run = adaptive.Run(setting, [{"K = 3": [case]}], tmp_path)
    assert run._group(1, 0, [kept]) == [kept]
    assert {row.case for row in run.found()} == {f"group 1, {case}, K = 3"}


def test_each_arm_of_the_last_group_is_traced_at_its_smallest_and_its_largest_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    monkeypatch.setattr(adaptive.Run, "_write", lambda run: None)
    asked: list[str] = []

    def answer(**command: Any) -> dict[str, float]:
        asked.append(command["name"])
        return {"host_waits": 0.0, "kernel_ms": 1.0}

    served = [Case(8, 64), Case(8, 16), Case(8, 1)]
    setting = arms.Setting("hybrid", "dspark", 4, [3], served, 1, tmp_path)
    run = adaptive.Run(setting, [{"K = 3": served, "adaptive": served[:1]}], tmp_path)
    running = [SimpleNamespace(name=name, ask=answer) for name in run.groups[0]]
    run._trace(running, run.groups[0], tmp_path / "traces")
    assert asked == ["K__3_1_8", "K__3_64_8", "adaptive_64_8"]
    waits = [row for row in run.found() if row.metric.startswith("calls that wait")]
    assert [row.met for row in waits] == [None, None, True]


def test_more_gpus_than_there_are_is_said_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert adaptive._gpus(0) == 1
    with pytest.raises(ValueError, match="--gpus: 2 wanted, and torch sees 1"):
        adaptive._gpus(2)


def test_arms_run_on_the_devices_that_the_command_may_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert adaptive._device(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5f")
    assert [adaptive._device(gpu) for gpu in (0, 1)] == ["3", "GPU-5f"]


def test_upstreams_own_adaptive_arm_is_one_to_beat_where_it_runs(tmp_path):
    def upstream(target: str) -> list[str]:
        return arms.Setting(target, "dspark", 4, [3], [Case(8, 1)], 1, tmp_path).upstream()

    assert upstream("hybrid") == ["no speculation", "K = 3"]
    assert upstream("dense") == ["no speculation", "K = 3", "adaptive with vLLM's planner"]


def test_lengths_share_a_list_of_loads_or_have_one_each():
    assert cases.parsed("8,32", "1,4") == [Case(8, 4), Case(8, 1), Case(32, 4), Case(32, 1)]
    assert cases.parsed("8,32", "4,1; 2") == [Case(8, 4), Case(8, 1), Case(32, 2)]
    with pytest.raises(ValueError, match="--loads has 3 lists for 2 lengths"):
        cases.parsed("8,32", "1;2;3")
    with pytest.raises(ValueError, match="whole numbers from 1 on"):
        cases.parsed("8,0", "1")
    with pytest.raises(ValueError, match="--loads: 'many' is not a list"):
        cases.parsed("8", "many")


def test_a_request_lives_through_the_first_window_and_all_that_count():
    case = Case(1024, 64)
    assert case.all_steps(3) == cases.SETTLE + 32 + 3 * (cases.BREATH + 32)
    assert acceptance.emitted(1) == pytest.approx(1 + (0.90 + 0.55) / 2)


def test_an_engine_that_takes_no_turns_keeps_its_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns, "_allocator", lambda: pytest.fail("asked for the allocator"))
    turns.give_back()
    turns.take()


def test_the_cache_of_an_arm_holds_its_states():
    shape = shapes.hybrid(32)
    none, seven, replay = (
        shapes.cache_mib(shape, 256, 1024, *of) for of in ((0, False), (7, False), (7, True))
    )
    assert none < replay < seven / 2


def test_shapes_keep_three_gdn_layers_to_one_of_attention():
    layers = shapes.hybrid(32)["layer_types"]
    assert layers.count("linear_attention") == 24
    assert layers[3] == layers[31] == "full_attention"
    assert shapes.drafter("dflash", 32)["block_size"] == 8
    assert shapes.drafter("dspark", 32)["block_size"] == 7


def test_an_engine_that_hangs_ends_with_the_command(tmp_path: Path):
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    command = (
        "import pathlib; from benchmarks.engine import driver\n"
        f"driver.sys.executable = {str(hanging)!r}\n"
        f"print(driver.Arm('one', {{}}, pathlib.Path({str(tmp_path)!r}))._process.pid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=30
    )
    time.sleep(0.2)
    state = Path(f"/proc/{int(done.stdout)}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"  # nobody may reap it here


def test_an_engine_that_is_gone_can_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver.sys, "executable", "/bin/false")
    gone = driver.Arm("gone", {}, tmp_path)
    gone._process.wait(10)
    assert gone.ask(do="window") is None
    gone.close()


def test_spread_and_median_of_three_repeats():
    assert driver.median([3.0, 1.0, 2.0]) == 2.0
    assert driver.spread([9.0, 10.0, 11.0]) == pytest.approx(0.1)


def test_a_table_holds_the_adaptive_arm_against_the_nearest_of_upstreams_arms():
    groups_of_load = [
        {"adaptive": (100.0, 0.0), "no speculation": (50.0, 0.004), "K = 3": (80.0, 0.02)},
        {"adaptive": (90.0, 0.0), "K = 7": (89.0, 0.0), "K = 7 with replay states": (95.0, 0.0)},
    ]
    assert table.over_fixed(groups_of_load) == pytest.approx(90 / 89)
    assert table.over_fixed([{"K = 3": (1.0, 0.0)}]) is None
    head, _, row = table.lines({64: groups_of_load[:1]})
    assert head == "| requests | none | K = 3 | adaptive | over the best |"
    assert row == "| 64 | 50 | 80 ±2 % | 100 | 1.250 |"


def test_vllms_adaptive_arm_is_a_rival_of_its_own_in_a_table():
    beside = {"adaptive": (99.0, 0.0), "K = 7": (90.0, 0.0), groups.VLLM_ADAPTIVE: (110.0, 0.0)}
    head, _, row = table.lines({1: [beside]})
    assert head.endswith("| adaptive | over the best | over vLLM's |")
    assert row.endswith("| 99 | 1.100 | 0.900 |")


def test_the_plot_compares_arms_of_one_group_alone(tmp_path):
    def rows(group: int, **speeds: float) -> list[Row]:
        return [
            Row(
                case=f"group {group}, 64 requests, 1024 tokens, {arm.replace('_', ' ')}",
                metric="throughput",
                value=speed,
                unit="tok/s",
                spread=0.02,
            )
            for arm, speed in speeds.items()
        ]

    file = tmp_path / "result.json"
    Result(
        name="engine/adaptive",
        device="none",
        repeats=3,
        versions={},
        rows=rows(1, K_1=50, adaptive=100) + rows(2, K_1=60, adaptive=80) + rows(3, K_7=10),
    ).write(file)
    found = plot.over_adaptive(plot.points([file]))
    assert found == {1024: {"K 1": {64: [(0.5, 0.04), (0.75, 0.04)]}}}


def memory(name: str, served: Sequence[Case]) -> tuple[float, float]:
    """An arm takes 20 besides its cache, which grows with the load, for a fixed arm with K."""
    load = max(case.load for case in served)
    cache = load * 0.1 if name == "adaptive" else load * 0.1 * int(name)
    return 20, 20 + cache


def test_groups_hold_what_fits_beside_the_largest_cache():
    asked = [Case(8, 256), Case(8, 64), Case(8, 16)]
    assert (
        groups.packed(["1", "2", "4"], "adaptive", asked, 110, memory)
        == [
            {"adaptive": asked, "1": asked},  # 3 x 20 and the cache of "2", 51, would be too much
            {"adaptive": asked, "2": asked},
            {"adaptive": asked, "4": asked[1:]},  # its cache would take 102 alone
        ]
    )
    assert groups.packed(["1", "2", "4"], "adaptive", asked[1:], 110, memory) == [
        {"adaptive": asked[1:], "1": asked[1:], "2": asked[1:], "4": asked[1:]}
    ]


def test_an_arm_that_fits_nowhere_is_named_with_what_to_lower():
    with pytest.raises(ValueError, match=r"1 at 16 requests, 8 tokens takes 22 .* --loads"):
        groups.packed(["1"], "adaptive", [Case(8, 16), Case(8, 256)], 41, memory)


def test_memory_is_estimated_within_a_tenth_of_what_engines_took_on_an_h200(tmp_path):
    """Engines with caches of their own, 16 layers, 256 requests, 88 steps: 84 come nearest."""
    asked = [Case(1024, 256), Case(1024, 1)]
    setting = arms.Setting("hybrid", "dspark", 16, [1, 3], asked, 1, tmp_path)
    assert Case(1024, 256).all_steps(1) == 84
    seen = {"no speculation": 19.2, "K = 3": 49.1, "adaptive": 45.3}
    for name, gib in seen.items():
        assert setting.memory_gib(name, asked)[1] == pytest.approx(gib, rel=0.1)


def test_a_request_has_the_state_and_the_rows_of_its_arm(tmp_path):
    asked = [Case(1024, 64), Case(1024, 1)]
    setting = arms.Setting("hybrid", "dspark", 16, [1, 3], asked, 3, tmp_path)
    found = setting.request("K = 3", asked, {"CUDA_VISIBLE_DEVICES": "1"})
    assert found["engine"]["speculative_config"]["num_speculative_tokens"] == 3
    assert found["engine"]["compilation_config"]["cudagraph_capture_sizes"][-1] == 256
    assert found["turns"] and found["environment"] == {"CUDA_VISIBLE_DEVICES": "1"}
    assert not found["engine"]["enable_prefix_caching"]
    cached = arms.Setting("hybrid", "dspark", 16, [3], asked, 3, tmp_path, prefix_caching=True)
    with_cache = cached.request("K = 3", asked, {})["engine"]
    assert with_cache["enable_prefix_caching"]
    assert with_cache["kv_cache_memory_bytes"] > found["engine"]["kv_cache_memory_bytes"]
    own = setting.request("adaptive", asked, {})
    assert own["engine"]["additional_config"]["ascend_spec"]["gdn_state"] == "replay"
    with pytest.raises(ValueError, match="--target"):
        arms.Setting("plain", "dspark", 16, [1], asked, 3, tmp_path)
    with pytest.raises(ValueError, match="--method is 'mtp', not dspark or dflash"):
        arms.Setting("hybrid", "mtp", 16, [1], asked, 3, tmp_path)
    with pytest.raises(ValueError, match=r"--fixed: .* at most 7"):
        arms.Setting("hybrid", "dspark", 16, [1, 8], asked, 3, tmp_path)
