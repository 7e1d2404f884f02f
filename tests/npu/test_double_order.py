"""Who waits for whom on the fake AscendCL: copies to the host, graph replays, task updates."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from npu_double import harness
from npu_double.cases import case, right
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


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """A dense target and its DSpark drafter in FULL graphs, two requests."""
    base = case("dense", "dspark", graphs=True)
    small = replace(base, prompts=base.prompts[:2], max_tokens=(16, 12), trace=True)
    answer = harness.run(small, tmp_path_factory.mktemp("order"))
    assert right((answer, harness.judge(small.model, answer)))
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


def test_the_target_and_the_drafter_are_both_captured(captured: dict[int, list[int]]):
    layers = sorted(len(tasks) for tasks in captured.values())
    assert set(layers) == {1, 4}, "the drafter has one attention layer, the target four"
    every = [task for tasks in captured.values() for task in tasks]
    assert len(every) == len(set(every))


def test_each_replay_is_updated_task_by_task_and_only_its_own(
    calls: list[Call], captured: dict[int, list[int]]
):
    seen = set()
    for execute, *after in replays(calls):
        assert execute.event is not None
        updated = [call.event for call in after if call.name == "TaskUpdateBegin"]
        assert updated == captured[execute.event]
        seen.add(len(updated))
    assert seen == {1, 4}, "both roles replay"


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
