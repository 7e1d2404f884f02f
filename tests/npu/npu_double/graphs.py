"""Captured graphs that replay on the double: their operators are kept on a tape and run again.

torch_npu captures and replays as ever, which computes nothing here. Beside it a tape keeps what
ran during the capture: operators, kernel launches, and the external events at which a captured
attention waits until its arguments have been updated. A replay runs the tape up to the first event
that is not set; recording the event (`graph_task_update_end`, then `event.record`) lets it go on.
So a missing, late or wrong update shows in the tokens, as on a device it would in a hang or worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Again = Callable[[], None]


@dataclass
class Task:
    """Operators between graph_task_group_begin and end: what an update replaces."""

    again: list[Again] = field(default_factory=list)


@dataclass
class Wait:
    """A graph stops here until the event is recorded, and clears it on the way."""

    event: Any


@dataclass
class Tape:
    """What one capture did, in order."""

    entries: list[Task | Wait | Again] = field(default_factory=list)

    def run(self, is_set: Callable[[Any], bool], clear: Callable[[Any], None]) -> Iterator[Any]:
        """Runs everything again; yields each event that is not set yet."""
        for entry in self.entries:
            if isinstance(entry, Wait):
                while not is_set(entry.event):
                    yield entry.event
                clear(entry.event)
            elif isinstance(entry, Task):
                for again in entry.again:
                    again()
            else:
                entry()


class Graphs:
    """The tapes of a process.

    counts: captures, replays and updates seen. lengths: those that each update gave attention, of
    queries (cumulative) and of keys, in the order of the updates; captured_lengths: those that it
    was captured with.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lengths: list[tuple[list[int], list[int]]] = []
        self.captured_lengths: list[tuple[list[int], list[int]]] = []
        self._tapes: dict[int, tuple[Any, Tape]] = {}  # the graph is kept: ids are used again
        self._tasks: dict[int, tuple[Any, Task]] = {}
        self._set: set[int] = set()
        self._events: dict[int, Any] = {}
        self._paused: list[Iterator[Any]] = []
        self._tape: Tape | None = None
        self._group: Task | None = None
        self._updated: Task | None = None

    @property
    def capturing(self) -> bool:
        return self._tape is not None

    @property
    def updating(self) -> bool:
        """Between update begin and end an operator is not run: it gives a task new arguments."""
        return self._updated is not None

    @property
    def grouping(self) -> bool:
        """Inside a task group: what runs is what updates will replace."""
        return self._group is not None

    def waiting(self) -> int:
        """Replays that stand at an event which nobody recorded."""
        return len(self._paused)

    def note(self, again: Again) -> None:
        """Keep what just ran, if it was captured or updates a captured task."""
        if self._updated is not None:
            self._updated.again.append(again)
        elif self._group is not None:
            self._group.again.append(again)
        elif self._tape is not None:
            self._tape.entries.append(again)

    def note_lengths(self, arguments: dict[str, Any]) -> None:
        """What attention is told in an update, or in a capture."""
        queries, keys = arguments["actual_seq_lengths"], arguments["actual_seq_lengths_kv"]
        told = self.lengths if self.updating else self.captured_lengths
        told.append((list(queries), list(keys)))

    def install(self) -> None:
        """Follow torch_npu's graphs, task groups and external events."""
        from torch_npu import npu
        from torch_npu.npu import graphs, streams

        for owner, name, follow in (
            (graphs.NPUGraph, "capture_begin", self._capture_begin),
            (graphs.NPUGraph, "capture_end", self._capture_end),
            (graphs.NPUGraph, "replay", self._replay),
            (streams.ExternalEvent, "wait", self._wait),
            (streams.ExternalEvent, "record", self._record),
        ):
            setattr(owner, name, _after(getattr(owner, name), follow))
        for name, follow in (
            ("graph_task_group_begin", self._group_begin),
            ("graph_task_group_end", self._group_end),
            ("graph_task_update_begin", self._update_begin),
            ("graph_task_update_end", self._update_end),
        ):
            setattr(npu, name, _after(getattr(npu, name), follow))

    def _capture_begin(self, _: Any, graph: Any, *__: Any, **___: Any) -> None:
        self._tape = Tape()
        self._tapes[id(graph)] = (graph, self._tape)
        self.counts["captures"] += 1

    def _capture_end(self, _: Any, graph: Any) -> None:
        self._tape = None

    def _replay(self, _: Any, graph: Any) -> None:
        self.counts["replays"] += 1
        assert not self._paused, "a graph was replayed while another one waits for an update"
        tape = self._tapes[id(graph)][1]
        self._proceed(tape.run(self._is_set, self._clear))

    def _wait(self, _: Any, event: Any, *__: Any) -> None:
        if self._tape is not None:
            self._events[id(event)] = event
            self._tape.entries.append(Wait(event))

    def _record(self, _: Any, event: Any, *__: Any) -> None:
        self._set.add(id(event))
        paused, self._paused = self._paused, []
        for replay in paused:
            self._proceed(replay)

    def _group_begin(self, _: Any, stream: Any) -> None:
        assert self._tape is not None
        self._group = Task()
        self._tape.entries.append(self._group)

    def _group_end(self, handle: Any, stream: Any) -> None:
        assert self._group is not None
        self._tasks[id(handle)] = (handle, self._group)
        self._group = None

    def _update_begin(self, _: Any, stream: Any, handle: Any) -> None:
        self._updated = self._tasks[id(handle)][1]
        self._updated.again.clear()
        self.counts["updates"] += 1

    def _update_end(self, _: Any, stream: Any) -> None:
        assert self._updated is not None and self._updated.again, "an update without an operator"
        self._updated = None

    def _is_set(self, event: Any) -> bool:
        return id(event) in self._set

    def _clear(self, event: Any) -> None:
        self._set.discard(id(event))

    def _proceed(self, replay: Iterator[Any]) -> None:
        if next(replay, None) is not None:
            self._paused.append(replay)


def _after(original: Any, follow: Callable[..., None]) -> Any:
    """`original`, then `follow(its result, *its arguments)`."""

    def followed(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        follow(result, *args, **named)
        return result

    return followed
