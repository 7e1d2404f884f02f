"""Which captured graph runs a launch, or why none does. Pure Python: no torch, no engine.

Target and drafter are dispatched apart. With 16 requests and 7 draft tokens the target verifies
16 x 8 = 128 rows, a DSpark drafter computes 16 x 7 = 112, and its context still grows by the
target's 128 states; one dispatcher for both hands the drafter a graph of the wrong size.

A launch's kind comes from what its rows are. A prompt's last chunk of K + 1 tokens has a verify
row's shape and would read another request's accepted count in a verify graph (vllm-ascend #12255).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from .keys import GraphKey, Kind, Phase, Role

# A decode row is a verify row without a draft token. A mixed graph holds code for any rows.
SERVED_BY: dict[Kind, tuple[Kind, ...]] = {
    Kind.DECODE: (Kind.DECODE, Kind.VERIFY, Kind.MIXED),
    Kind.VERIFY: (Kind.VERIFY, Kind.MIXED),
    Kind.DRAFT: (Kind.DRAFT,),
    Kind.MIXED: (Kind.MIXED,),
}


@dataclass(frozen=True)
class Capture:
    """A captured graph and what it can hold.

    longest: most rows of one request, None for any number. ragged: requests may have different
    lengths, 0 included; otherwise each has exactly `longest` rows. padding_needs_request: rows of
    padding must belong to a padding request, as in NPU attention in TND layout, whose last
    cumulative length has to equal the row count.
    """

    key: GraphKey
    longest: int | None
    ragged: bool
    padding_needs_request: bool = False

    def __post_init__(self) -> None:
        key = self.key
        if self.longest is None:
            if not self.ragged:
                raise ValueError(f"{key}: requests of equal length need `longest`")
            return
        capacity = key.requests * self.longest
        if self.longest < 1 or capacity < key.rows:
            raise ValueError(
                f"{key}: {key.requests} requests of {self.longest} rows cannot fill {key.rows} rows"
            )
        if not self.ragged and capacity != key.rows:
            raise ValueError(
                f"{key}: {key.requests} requests of {self.longest} rows each are {capacity} rows"
            )


@dataclass(frozen=True)
class Batch:
    """A launch to be dispatched. shortest, longest: rows of its shortest and longest request."""

    role: Role
    kind: Kind
    rows: int
    requests: int
    shortest: int
    longest: int

    def __post_init__(self) -> None:
        bounds = self.requests * self.shortest, self.requests * self.longest
        if self.requests < 1 or self.shortest < 0 or not bounds[0] <= self.rows <= bounds[1]:
            raise ValueError(
                f"{self.rows} rows cannot be {self.requests} requests of {self.shortest} to "
                f"{self.longest} rows"
            )
        if self.kind is Kind.DRAFT and self.role is Role.TARGET:
            raise ValueError("only a drafter launches draft rows")


class Reason(Enum):
    """Why a launch is eager; the later, the nearer it was to a graph."""

    NO_GRAPHS = 0
    KIND = 1
    ROWS = 2
    REQUESTS = 3
    LENGTHS = 4
    PADDING = 5


@dataclass(frozen=True)
class Replay:
    """Run the graph `key`, of which `padding_rows` and `padding_requests` are not in the batch."""

    key: GraphKey
    padding_rows: int
    padding_requests: int

    @property
    def rows(self) -> int:
        """Rows that run, padding included: what the launch costs."""
        return self.key.rows


@dataclass(frozen=True)
class Eager:
    """Run without a graph, and why."""

    rows: int
    reason: Reason
    message: str


Launch = Replay | Eager


@dataclass(frozen=True)
class StepLaunches:
    """Both launches of a step. context_rows: target states to add to the drafter's context."""

    target: Launch
    drafter: Launch
    context_rows: int


def classify(role: Role, rows: Sequence[int], phases: Sequence[Phase]) -> Batch:
    """The batch of requests with `rows[i]` rows, which are `phases[i]`.

    Raises:
        ValueError: no request, lists of different length, or a decode phase of other than one row.
    """
    if not rows or len(rows) != len(phases):
        raise ValueError(f"{len(rows)} row counts for {len(phases)} phases: one each, one or more")
    for index, (count, phase) in enumerate(zip(rows, phases, strict=True)):
        if phase is Phase.DECODE and count != 1:
            raise ValueError(f"request {index} decodes {count} rows: with draft tokens it verifies")
    present = set(phases)
    if Phase.DRAFT in present and len(present) > 1:
        raise ValueError("draft rows and target rows cannot share a launch")
    if Phase.PREFILL in present:
        kind = Kind.MIXED
    else:
        kind = next(k for k in (Kind.DRAFT, Kind.VERIFY, Kind.DECODE) if Phase(k.value) in present)
    return Batch(role, kind, sum(rows), len(rows), min(rows), max(rows))


def drafting(requests: int, rows_per_request: int) -> Batch:
    """The drafter's pass: K query tokens a request in DSpark, K + 1 in DFlash, 1 in a loop."""
    rows = requests * rows_per_request
    return Batch(Role.DRAFTER, Kind.DRAFT, rows, requests, rows_per_request, rows_per_request)


class Dispatcher:
    """Finds the graph with the least padding among those captured for one role."""

    def __init__(self, role: Role, captures: Iterable[Capture]) -> None:
        self.role = role
        self._by_kind: dict[Kind, list[Capture]] = {kind: [] for kind in Kind}
        seen: set[GraphKey] = set()
        for capture in captures:
            if capture.key.role is not role:
                raise ValueError(f"{capture.key} in the dispatcher of the {role.value}")
            if capture.key in seen:
                raise ValueError(f"the {capture.key} is listed twice")
            seen.add(capture.key)
            self._by_kind[capture.key.kind].append(capture)
        for captured in self._by_kind.values():
            captured.sort(key=lambda capture: (capture.key.rows, capture.key.requests))
        self._any = bool(seen)

    def dispatch(self, batch: Batch) -> Launch:
        """The first kind that serves the batch and has a fitting graph; in it, least padding.

        A graph of the batch's own kind comes first even if a mixed one pads less: a mixed graph
        holds less of the step.
        """
        if batch.role is not self.role:
            raise ValueError(
                f"a {batch.role.value} batch at the dispatcher of the {self.role.value}"
            )
        nearest = Reason.KIND if self._any else Reason.NO_GRAPHS
        for kind in SERVED_BY[batch.kind]:
            for capture in self._by_kind[kind]:
                obstacle = _obstacle(capture, batch)
                if obstacle is None:
                    key = capture.key
                    return Replay(key, key.rows - batch.rows, key.requests - batch.requests)
                if obstacle.value > nearest.value:
                    nearest = obstacle
        return Eager(batch.rows, nearest, self._explain(nearest, batch))

    def _explain(self, reason: Reason, batch: Batch) -> str:
        served = [c for kind in SERVED_BY[batch.kind] for c in self._by_kind[kind]]
        most_rows = max((c.key.rows for c in served), default=0)
        most_requests = max((c.key.requests for c in served), default=0)
        what = f"{batch.kind.value} step of {batch.rows} rows, {batch.requests} requests"
        why = {
            Reason.NO_GRAPHS: f"no {self.role.value} graph was captured",
            Reason.KIND: f"no {self.role.value} graph was captured for {batch.kind.value} steps",
            Reason.ROWS: f"the largest graph has {most_rows} rows",
            Reason.REQUESTS: f"graphs with that many rows have {most_requests} requests at most",
            Reason.LENGTHS: f"requests of {batch.shortest} to {batch.longest} rows fit none of the "
            "graphs that are large enough",
            Reason.PADDING: "rows of padding need padding requests, and no graph that is large "
            "enough has them to spare",
        }
        return f"{what}: {why[reason]}"


def dispatch_step(
    target: Dispatcher, drafter: Dispatcher, batch: Batch, draft_rows_per_request: int
) -> StepLaunches:
    """Dispatch the target's batch and the draft that follows it, each by its own size.

    Padding of the target carries no token, so its context counts real rows only.
    """
    draft = drafting(batch.requests, draft_rows_per_request)
    return StepLaunches(target.dispatch(batch), drafter.dispatch(draft), batch.rows)


def padding_lengths(replay: Replay, longest: int) -> list[int]:
    """Rows of each padding request: together the padding, `longest` at most, full ones first."""
    if replay.padding_rows > replay.padding_requests * longest:
        raise ValueError(
            f"{replay.padding_rows} rows of padding exceed {replay.padding_requests} requests of "
            f"{longest} rows"
        )
    full, rest = divmod(replay.padding_rows, longest)
    lengths = [longest] * full + [rest] * (rest > 0)
    return lengths + [0] * (replay.padding_requests - len(lengths))


def _obstacle(capture: Capture, batch: Batch) -> Reason | None:
    """What keeps the batch out of the graph, the coarsest first."""
    key, longest = capture.key, capture.longest
    if batch.rows > key.rows:
        return Reason.ROWS
    if batch.requests > key.requests:
        return Reason.REQUESTS
    if longest is not None:
        if batch.longest > longest:
            return Reason.LENGTHS
        if not capture.ragged and batch.shortest < longest:
            return Reason.LENGTHS
    padding, spare = key.rows - batch.rows, key.requests - batch.requests
    if capture.padding_needs_request and padding:
        room = padding if longest is None else spare * longest
        if not spare or padding > room:
            return Reason.PADDING
    return None
