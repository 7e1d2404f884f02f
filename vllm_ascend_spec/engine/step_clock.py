"""Device time of steps, from events on the main stream that are read after the step has landed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Steps whose events are kept. At most four are on their way to the host (`arrivals.DEPTH`), and
# each looks back at the one before it.
RING = 8


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


class Marks:
    """Three events of a step, recorded again by a later one. step: the number of the last."""

    def __init__(self) -> None:
        self.step = 0
        self.start, self.target, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(3))


@dataclass(frozen=True)
class Ticks:
    """A step's marks and its number; the same of the step before it."""

    marks: Marks
    step: int
    before: tuple[Marks, int] | None = None

    def read(self) -> StepTimes | None:
        """None where the device has not passed all three yet, or a later step has taken them."""
        marks = self.marks
        if marks.step != self.step or not marks.end.query():
            return None
        target, total = marks.start.elapsed_time(marks.target), marks.start.elapsed_time(marks.end)
        if self.before is None or self.before[0].step != self.before[1]:
            return StepTimes(target, total)
        before = self.before[0]
        idle, period = (event.elapsed_time(marks.start) for event in (before.end, before.start))
        return StepTimes(target, total, idle, period)


class StepClock:
    """Records the three events of a step; does nothing where not `enabled`."""

    def __init__(self, enabled: bool) -> None:
        # Making an event, and asking for the stream to record it in, cost the host more each than
        # recording: both are spared.
        self._ring = [Marks() for _ in range(RING)] if enabled else []
        self._step = 0
        self._stream: torch.cuda.Stream | None = None  # of the step that is being timed
        self._target_is_done = False
        self._before: tuple[Marks, int] | None = None

    def start(self) -> None:
        """The step's rows are known, its launches follow."""
        if not self._ring:
            return
        self._stream = torch.cuda.current_stream()
        self._step += 1
        marks = self._marks()
        marks.step = self._step
        marks.start.record(self._stream)
        self._target_is_done = False

    def target_done(self) -> None:
        """The target has run and sampled."""
        if self._stream is not None:
            self._marks().target.record(self._stream)
            self._target_is_done = True

    def finish(self, alike: bool = True) -> Ticks | None:
        """Drafting is done. None where this step was not timed from its start.

        alike: False where the next step's distance from this one says nothing about steps.
        """
        stream, self._stream = self._stream, None
        before, self._before = self._before, None
        if stream is None or not self._target_is_done:
            return None
        marks = self._marks()
        marks.end.record(stream)
        self._before = (marks, self._step) if alike else None
        return Ticks(marks, self._step, before)

    def _marks(self) -> Marks:
        return self._ring[self._step % RING]
