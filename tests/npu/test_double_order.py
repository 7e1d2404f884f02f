"""Who waits for whom on the fake AscendCL: copies to the host, graph replays, task updates.

That a captured attention goes on only once its update's event was recorded is in the replay itself
(`npu_double/graphs.py`): a missing or misplaced event leaves a graph waiting.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from npu_double import harness, judge
from npu_double.cases import DRAFT_TOKENS, case, right
from npu_double.harness import Call

WHY_NOT = harness.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def names(calls: list[Call]) -> list[str]:
    return [call.name for call in calls]


def test_confidences_reach_the_host_on_a_stream_of_their_own(tmp_path: Path):
    trace = tmp_path / "calls.txt"
    done = harness.python(tmp_path, "-m", "npu_double.streams", FAKE_ACL_TRACE=str(trace))
    assert done.returncode == 0, done.stderr
    calls = harness.read_calls(trace)
    start = max(i for i, call in enumerate(calls) if call.name == "StreamWaitEvent") - 1
    drafted, waits, first, second, sent, read = calls[start : start + 6]
    assert names([drafted, waits, first, second, sent, read]) == [
        "RecordEvent", "StreamWaitEvent", "MemcpyAsync", "MemcpyAsync", "RecordEvent",
        "SynchronizeEvent",
    ]  # fmt: skip
    assert waits.event == drafted.event and waits.stream != drafted.stream
    assert {waits.stream} == {first.stream, second.stream, sent.stream}
    assert read.event == sent.event


# Tasks of the target's graphs, and of each kind of graph that its drafter has.
ARMS = {
    "dense dspark adaptive": (4, [1]),
    "hybrid mtp": (1, [1, DRAFT_TOKENS - 1]),
}


@pytest.fixture(scope="module", params=ARMS)
def arm(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def answer(arm: str, surfaces: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Target and drafter in FULL graphs; four requests that end one after another."""
    target, method, *adaptive = arm.split()
    base = case(target, method, graphs=True, surfaces=surfaces if adaptive else None)
    traced = replace(base, prompts=base.prompts[:4], max_tokens=(20, 30, 24, 18), trace=True)
    answer = harness.run(traced, tmp_path_factory.mktemp("order"))
    return right((answer, judge.judge(traced.model, answer)))[0]


@pytest.fixture(scope="module")
def calls(answer: dict[str, Any]) -> list[Call]:
    return answer["calls"]


@pytest.fixture(scope="module")
def captured(calls: list[Call]) -> dict[int, list[int]]:
    """Tasks of each captured graph, in order."""
    graphs: dict[int, list[int]] = {}
    tasks: list[int] = []
    for call in calls:
        if call.name == "CaptureBegin":
            tasks = []
        elif call.name == "TaskGroupEnd":
            assert call.event is not None
            tasks.append(call.event)
        elif call.name == "CaptureEnd":
            assert call.event is not None
            graphs[call.event] = tasks
    return graphs


def replays(calls: list[Call]) -> list[list[Call]]:
    """Each replay with what follows it, up to the next."""
    starts = [i for i, call in enumerate(calls) if call.name == "GraphExecute"]
    return [calls[start:end] for start, end in zip(starts, [*starts[1:], len(calls)], strict=True)]


Lengths = tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def given(
    answer: dict[str, Any], calls: list[Call], captured: dict[int, list[int]]
) -> list[tuple[int, list[Lengths]]]:
    """Graph and lengths of each replay: of queries and of keys, for each of its tasks."""
    lengths = iter(answer["updated_lengths"])
    return [
        (execute.event, [next(lengths) for _ in captured[execute.event]])
        for execute, *_ in replays(calls)
    ]


def test_the_target_and_the_drafter_are_both_captured(arm: str, captured: dict[int, list[int]]):
    layers = Counter(len(tasks) for tasks in captured.values())
    target, drafter = ARMS[arm]
    # One, two and four requests of each; a drafting loop has its whole step in a graph.
    assert layers == sum((Counter({kind: 3}) for kind in (target, *drafter)), Counter())
    every = [task for tasks in captured.values() for task in tasks]
    assert len(every) == len(set(every))


def test_each_replay_is_updated_task_by_task_and_only_its_own(
    calls: list[Call], captured: dict[int, list[int]]
):
    for execute, *after in replays(calls):
        assert execute.event is not None
        updated = [call.event for call in after if call.name == "TaskUpdateBegin"]
        assert updated == captured[execute.event]


def test_every_captured_graph_replays_with_other_lengths(
    answer: dict[str, Any],
    captured: dict[int, list[int]],
    given: list[tuple[int, list[Lengths]]],
):
    told = iter(answer["captured_lengths"])
    first = {graph: [next(told) for _ in tasks] for graph, tasks in captured.items()}
    assert next(told, None) is None
    replayed = {graph for graph, _ in given}
    assert replayed == captured.keys()
    assert all(lengths != first[graph] for graph, lengths in given)
    other: dict[int, set[str]] = defaultdict(set)
    for graph, lengths in given:
        other[graph].add(repr(lengths))
    assert sum(len(lengths) >= 2 for lengths in other.values()) >= len(captured) - 1


def test_the_targets_lengths_are_those_of_its_step(
    arm: str, answer: dict[str, Any], given: list[tuple[int, list[Lengths]]]
):
    layers, drafter = ARMS[arm]
    if layers in drafter:
        pytest.skip("the drafter has graphs of as many tasks")
    steps = iter(step for step in answer["steps"] if not any(step["prefill"]))
    ragged = 0
    for lengths in (lengths for _, lengths in given if len(lengths) == layers):
        assert all(other == lengths[0] for other in lengths), "all layers are told the same"
        queries, keys = lengths[0]
        # A step without a graph has no replay; the others come in their order.
        step = next(s for s in steps if _launched(s, queries, keys))
        ragged += len(set(step["rows"])) > 1
        real = len(step["rows"])
        assert all(length == 0 for length in keys[real:]), "padding attends to nothing"
    assert ragged >= 3


def _launched(step: dict[str, Any], queries: list[int], keys: list[int]) -> bool:
    real = len(step["rows"])
    starts = list(itertools.accumulate(step["rows"]))
    return starts == queries[:real] and step["host_lengths"] == keys[:real]


def test_an_update_ends_before_the_next_begins_on_one_stream(calls: list[Call]):
    updates = [call for call in calls if call.name.startswith("TaskUpdate")]
    assert names(updates) == ["TaskUpdateBegin", "TaskUpdateEnd"] * (len(updates) // 2)
    assert len({call.stream for call in updates}) == 1


def test_the_update_stream_waits_for_the_inputs_before_a_replay(calls: list[Call]):
    update_stream = next(call.stream for call in calls if call.name == "TaskUpdateBegin")
    for index, call in enumerate(calls):
        if call.name != "GraphExecute":
            continue
        recorded, waits = calls[index - 2 : index]
        assert names([recorded, waits]) == ["RecordEvent", "StreamWaitEvent"]
        assert recorded.stream == call.stream and waits.stream == update_stream
        assert waits.event == recorded.event
