"""Device time of steps, from events on the main stream that are read after the step has landed."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepTimes:
    """ms from the row layout to the verdict, and to the end of drafting.

    idle_ms, period_ms: from the end and from the start of the step before to this one's row layout;
    None without one.
    """

    target_ms: float
    total_ms: float
    idle_ms: float | None = None
    period_ms: float | None = None


@dataclass(frozen=True)
class Ticks:
    """Three events of one step; start and end of the step before."""

    start: torch.cuda.Event
    target: torch.cuda.Event
    end: torch.cuda.Event
    before: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def read(self) -> StepTimes | None:
        """None where the device has not passed all three yet."""
        if not self.end.query():
            return None
        target, total = self.start.elapsed_time(self.target), self.start.elapsed_time(self.end)
        if self.before is None:
            return StepTimes(target, total)
        idle, period = (event.elapsed_time(self.start) for event in reversed(self.before))
        return StepTimes(target, total, idle, period)


class StepClock:
    """Records the three events of a step; does nothing where not `enabled`."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._stream: torch.cuda.Stream | None = None
        self._start: torch.cuda.Event | None = None
        self._target: torch.cuda.Event | None = None
        self._before: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def start(self) -> None:
        """The step's rows are known, its launches follow."""
        # Asked for once a step: torch asks for each event that is not given its stream.
        self._stream = torch.cuda.current_stream() if self._enabled else None
        self._start = self._mark()
        self._target = None

    def target_done(self) -> None:
        """The target has run and sampled."""
        self._target = self._mark()

    def finish(self, alike: bool = True) -> Ticks | None:
        """Drafting is done. None where this step was not timed from its start.

        alike: False where the next step's distance from this one says nothing about steps.
        """
        start, target = self._start, self._target
        self._start = self._target = None
        end = self._mark()
        self._stream = None
        before, self._before = self._before, None
        if start is None or target is None or end is None:
            return None
        self._before = (start, end) if alike else None
        return Ticks(start, target, end, before)

    def _mark(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
