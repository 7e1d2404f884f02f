"""Times of a step from events, and which steps may be compared with the one before."""

from __future__ import annotations

import pytest

from vllm_ascend_spec.engine import step_clock
from vllm_ascend_spec.engine.step_clock import RING, StepClock, StepTimes, Ticks

DEPTH = 4  # of `arrivals`, which needs an engine


class Event:
    """An event whose time is when it was recorded, in ms."""

    now = 0.0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self, stream: str) -> None:
        assert stream == "main"
        self.at = Event.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    monkeypatch.setattr(step_clock.torch.cuda, "Event", Event)
    monkeypatch.setattr(step_clock.torch.cuda, "current_stream", lambda: "main")
    return StepClock(enabled=True)


def ticks(clock: StepClock, start: float, alike: bool = True) -> Ticks | None:
    Event.now = start
    clock.start()
    Event.now = start + 4
    clock.target_done()
    Event.now = start + 5
    return clock.finish(alike)


def step(clock: StepClock, start: float, alike: bool = True) -> StepTimes | None:
    recorded = ticks(clock, start, alike)
    return None if recorded is None else recorded.read()


def test_the_distance_to_the_step_before_is_idle_time_and_period(clock: StepClock) -> None:
    assert step(clock, 0) == StepTimes(4, 5)
    assert step(clock, 7) == StepTimes(4, 5, idle_ms=2, period_ms=7)


def test_after_a_step_of_another_kind_there_is_no_period(clock: StepClock) -> None:
    step(clock, 0, alike=False)
    assert step(clock, 7) == StepTimes(4, 5)
    assert step(clock, 13) == StepTimes(4, 5, idle_ms=1, period_ms=6)


def test_after_a_step_that_was_not_timed_there_is_no_period(clock: StepClock) -> None:
    step(clock, 0)
    assert clock.finish() is None
    assert step(clock, 7) == StepTimes(4, 5)


def test_the_stream_is_asked_for_once_a_step(
    clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def current_stream() -> str:
        asked.append(Event.now)
        return "main"

    monkeypatch.setattr(step_clock.torch.cuda, "current_stream", current_stream)
    step(clock, 0)
    step(clock, 7)
    assert asked == [0, 7]


def test_steps_under_way_keep_their_events(clock: StepClock) -> None:
    """As many as the ring of arrivals holds, each with the one before it, in any round."""
    for first in (0, 100, 200):
        late = [ticks(clock, first + 7 * index) for index in range(DEPTH)]
        times = [StepTimes(4, 5, idle_ms=2, period_ms=7)] * (DEPTH - 1)
        assert [entry.read() for entry in late if entry is not None][1:] == times


def test_events_are_made_once_and_never_read_for_another_step(clock: StepClock) -> None:
    made = Event.made
    first = ticks(clock, 0)
    for index in range(1, RING):
        assert step(clock, 9 * index) is not None
    assert first is not None and first.read() == StepTimes(4, 5)
    second = ticks(clock, 9 * RING)
    assert first.read() is None, "its events are those of another step now"
    for index in range(RING - 1):
        step(clock, 1000 + 9 * index)
    assert second is not None and second.read() == StepTimes(4, 5), "the one before it has gone"
    assert Event.made == made


def test_on_a_host_without_timers_nothing_is_timed() -> None:
    assert step(StepClock(enabled=False), 0) is None
