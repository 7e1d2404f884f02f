"""What a step costs: `C(n) = V(rows, requests, context) + L(logits rows) + D(drafting) + O`.

The target's price is a staircase: a launch is padded to the next captured graph, so a row is free
up to the edge and dear past it. A size that no graph covers is priced as eager, by points measured
in eager mode; nothing is interpolated across that cliff. Prices are whole nanoseconds,
held exactly in float64.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vllm_ascend_spec.budget.host import HostTime
from vllm_ascend_spec.budget.residual import WINDOW, Residuals
from vllm_ascend_spec.budget.sheet import Sheet
from vllm_ascend_spec.budget.surface import StepKind, Surface
from vllm_ascend_spec.budget.survival import Exact, Ints

UNPRICED = float(1 << 50)  # dearer than any step (13 days), and sums stay exact


class TargetCost:
    """The target's forward pass in one step kind: graphs up to the ladder's end, eager beyond."""

    def __init__(self, graphs: Sheet | None, eager: Sheet | None, max_rows: int) -> None:
        self._graphs, self._eager, self._max_rows = graphs, eager, max_rows
        if graphs is not None:  # a step is priced when it is planned, and again when it has landed
            self._column = lru_cache(maxsize=8)(graphs.column)
        ladder = graphs.rows if graphs is not None else np.zeros(0, dtype=np.int64)
        self.largest = int(ladder[-1]) if ladder.size else 0
        rows = np.arange(max_rows + 1)
        covered = np.searchsorted(ladder, rows).astype(np.int64)
        # Eager launches share a correction by size class of 256 rows: they have no bucket.
        beyond = ladder.size + (rows - self.largest - 1) // 256
        self._bucket: Ints = np.where(rows <= self.largest, covered, beyond).astype(np.int64)
        self._rows = rows.astype(np.float64)
        self.residuals = Residuals(max(int(self._bucket[-1]), ladder.size) + 1)

    def prices(self, rows: int, count: int, requests: int, context: float) -> Exact:
        """Prices in ns [count + 1] of launches of rows, rows + 1, ..., rows + count rows."""
        if rows + count > self._max_rows:
            raise ValueError(
                f"{rows + count} rows in a step, the model was built for {self._max_rows}"
            )
        index = self._bucket[rows : rows + count + 1]
        return self._prices(rows, index, requests, context, self.residuals.factors(context))

    def observe(self, rows: int, requests: int, context: float, real_ns: float) -> None:
        """Record what a launch of `rows` rows really took."""
        index = self._bucket[rows : rows + 1]
        predicted = int(self._prices(rows, index, requests, context, None)[0])
        if predicted < UNPRICED:
            self.residuals.observe(context, int(index[0]), predicted, real_ns)

    def _prices(
        self, rows: int, index: Ints, requests: int, context: float, factors: Exact | None
    ) -> Exact:
        last = rows + index.shape[0] - 1
        column = None
        if self._graphs is not None and rows <= self.largest:
            column = self._column(requests, context)
            if factors is not None:
                column = column * factors[: column.shape[0]]
            column = np.rint(column)
            if last <= self.largest:
                return column.take(index)
        prices = np.full(index.shape, UNPRICED)
        graphed = max(self.largest - rows + 1, 0)
        if column is not None:
            prices[:graphed] = column.take(index[:graphed])
        if self._eager is not None:
            sizes = self._rows[rows + graphed : last + 1]
            beyond = _along(self._eager, sizes, requests, context)
            if factors is not None:
                beyond *= factors[index[graphed:]]
            prices[graphed:] = np.rint(beyond)
        return prices


class DrafterCost:
    """Drafting `depth` tokens for m requests, m = 0..max_requests.

    idle_ns: what a round without drafts takes, in which the drafter's cache is kept: not in the
    surface, learnt from the first rounds that skip. `prices` leaves it out.
    """

    def __init__(self, surface: Surface, max_requests: int) -> None:
        self._rows = max(surface.drafter_rows, 1)
        self._max_requests = max_requests
        # One drafting pass holds `drafter_rows` rows a request, so buckets are counted in requests.
        ladder = sorted({size // self._rows for size in surface.key.drafter_ladder} - {0})
        self._largest = ladder[-1] if ladder else 0
        self._sheets: dict[int, tuple[Sheet | None, Sheet | None]] = {}
        for depth in sorted({point.depth for point in surface.drafter}):
            by_kind = {
                kind: [
                    (p.requests, 1, p.context, p.ms)
                    for p in surface.drafter
                    if p.kind is kind and p.depth == depth
                ]
                for kind in (StepKind.FULL, StepKind.EAGER)
            }
            full, eager = by_kind[StepKind.FULL], by_kind[StepKind.EAGER]
            self._sheets[depth] = (
                Sheet(full, ladder) if full else None,
                Sheet(eager) if eager else None,
            )
        self._free = np.zeros(max_requests + 1)
        self._memo: dict[int, tuple[int, Exact]] = {}
        self._priced: dict[int, tuple[float, int, Exact]] = {}
        self.idle_ns = 0.0
        self._idle: deque[float] = deque(maxlen=WINDOW)
        # Requests share a correction by octave.
        self._octave = np.array([m.bit_length() for m in range(max_requests + 1)])
        self.residuals = Residuals(int(self._octave[-1]) + 1)

    @property
    def depths(self) -> tuple[int, ...]:
        """Draft lengths that were measured; empty for a lookup method, which costs nothing."""
        return tuple(self._sheets)

    def prices(self, depth: int, context: float) -> Exact:
        """Prices in ns [max_requests + 1] at the smallest measured depth that reaches `depth`."""
        if not self._sheets:
            return self._free
        corrections = self.residuals
        known = self._priced.get(depth)  # a plan asks several times
        if known is None or known[:2] != (context, corrections.version):
            factors = corrections.factors(context)[self._octave]
            prices: Exact = np.rint(self._measured(depth, context) * factors)
            known = self._priced[depth] = (context, corrections.version, prices)
        return known[2]

    def observe(self, count: int, whole: bool, depth: int, context: float, real_ns: float) -> None:
        """Record what a round took. count: requests drafted for; whole: all of the batch."""
        if count == 0:
            self._idle.append(real_ns)
            self.idle_ns = float(round(sorted(self._idle)[len(self._idle) // 2]))
        elif self._sheets:
            predicted = self._measured(depth, context).item(count)
            drafting = real_ns if whole else real_ns - self.idle_ns
            if predicted < UNPRICED and drafting > 0:
                self.residuals.observe(context, int(self._octave[count]), predicted, drafting)

    def _measured(self, depth: int, context: float) -> Exact:
        measured = min((d for d in self._sheets if d >= depth), default=max(self._sheets))
        # A drafter reads little context: 16 steps an octave are fine enough to remember.
        step = round(16.0 * math.log2(max(context, 1.0)))
        known = self._memo.get(measured)
        if known is None or known[0] != step:
            known = (step, self._compute(measured, 2.0 ** (step / 16.0)))
            self._memo[measured] = known
        return known[1]

    def _compute(self, depth: int, context: float) -> Exact:
        graphs, eager = self._sheets[depth]
        requests = np.arange(self._max_requests + 1)
        prices = np.full(requests.shape, UNPRICED)
        prices[0] = 0
        last = min(self._largest, self._max_requests) if graphs is not None else 0
        if graphs is not None and last:
            column = np.rint(graphs.column(1, context))
            prices[1 : last + 1] = column[np.searchsorted(graphs.rows, requests[1 : last + 1])]
        beyond = requests[last + 1 :].astype(np.float64)
        # A drafter without a ladder has no graphs: its points are launches of exactly that size.
        sheet = eager if eager is not None else (graphs if not self._largest else None)
        if sheet is not None and beyond.size:
            prices[last + 1 :] = np.rint(_along(sheet, beyond, 1, context))
        return prices


class CostModel:
    """Prices of a step, compiled from a surface. Pure arithmetic: no clock, no device.

    max_rows: rows the engine may launch (max_num_batched_tokens). max_requests: max_num_seqs.
    """

    def __init__(self, surface: Surface, max_requests: int, max_rows: int) -> None:
        self.surface = surface
        self.max_rows = max_rows
        eager = _sheet(surface, StepKind.EAGER, ())
        ladders = {StepKind.FULL: surface.key.full_ladder, StepKind.MIXED: surface.key.mixed_ladder}
        self._target = {
            kind: TargetCost(_sheet(surface, kind, ladder), eager, max_rows)
            for kind, ladder in ladders.items()
        }
        self._target[StepKind.EAGER] = TargetCost(None, eager, max_rows)
        self.drafter = DrafterCost(surface, max_requests)
        self._logits = _logits(surface, max_rows)
        self.host = HostTime(max_requests)
        self._added = float(round(surface.host.ms * 1e6))
        self._floor = float(round(surface.host.floor_ms * 1e6))

    def verify(
        self, kind: StepKind, rows: int, sampled: int, count: int, requests: int, context: float
    ) -> Exact:
        """Device time in ns [count + 1] of verifying 0..count draft rows, without drafting.

        rows: rows of the launch without any draft row; sampled: logits rows among them.
        """
        prices = self._target[kind].prices(rows, count, requests, context)
        prices += self._logits[sampled : sampled + count + 1]
        return prices

    def step(self, device: Exact, drafter_ns: float, requests: int = 1) -> Exact:
        """Target and drafter times in ns -> step times: never shorter than the host's own."""
        floor = max(self._floor, self.host.least(requests) - self._added)
        total = device + drafter_ns
        return np.maximum(total, floor) + self._added if floor > 0 else total + self._added

    def observe(
        self, kind: StepKind, rows: int, sampled: int, requests: int, context: float, real_ns: float
    ) -> None:
        """Record a measured step without drafting: `rows` in the launch, `sampled` logits rows."""
        forward = real_ns - self._added - float(self._logits[sampled])
        self._target[kind].observe(rows, requests, context, forward)

    def corrections(self) -> dict[StepKind, npt.NDArray[np.int64]]:
        """Learnt corrections as integers, for the ranks that do not measure."""
        return {kind: cost.residuals.export() for kind, cost in self._target.items()}

    def take_corrections(self, corrections: dict[StepKind, npt.NDArray[np.int64]]) -> None:
        """Use the measuring rank's corrections."""
        for kind, factors in corrections.items():
            self._target[kind].residuals.restore(factors)


def _sheet(surface: Surface, kind: StepKind, ladder: tuple[int, ...]) -> Sheet | None:
    points = [(p.rows, p.requests, p.context, p.ms) for p in surface.target if p.kind is kind]
    return Sheet(points, ladder) if points else None


def _along(sheet: Sheet, sizes: npt.NDArray[np.float64], requests: float, context: float) -> Exact:
    """Linear in rows between measured sizes, last slope beyond: eager launches are not padded."""
    column = sheet.column(requests, context)
    times = np.interp(sizes, sheet.rows, column)
    if sheet.rows.size > 1:
        slope = (column[-1] - column[-2]) / (sheet.rows[-1] - sheet.rows[-2])
        times += np.maximum(sizes - sheet.rows[-1], 0.0) * max(float(slope), 0.0)
    return np.asarray(times, dtype=np.float64)


def _logits(surface: Surface, max_rows: int) -> Exact:
    if not surface.logits:
        return np.zeros(max_rows + 1)
    sheet = Sheet([(point.rows, 1, 0, max(point.ms, 1e-9)) for point in surface.logits])
    return np.rint(_along(sheet, np.arange(max_rows + 1, dtype=np.float64), 1, 0))
