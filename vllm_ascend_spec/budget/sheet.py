"""A measured grid over (rows, requests, context) that answers for a whole axis of rows at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


class Sheet:
    """Times in ns on the grid of all measured coordinates; gaps are filled at construction.

    Between measured contexts and requests: linear. Beyond the measured contexts: the last slope,
    never a falling one (attention reads grow with context). Beyond the measured requests: the
    nearest. A gap is filled along context first, then along requests, then along rows.
    """

    def __init__(
        self,
        points: Iterable[tuple[int, int, int, float]],
        rows: Iterable[int] = (),
    ) -> None:
        """points: (rows, requests, context, ms), repeats averaged; rows: sizes that must exist."""
        measured = list(points)
        if not measured:
            raise ValueError("a sheet needs one measured point at least")
        self.rows = np.array(sorted({p[0] for p in measured} | set(rows)), dtype=np.int64)
        self.requests = sorted({float(p[1]) for p in measured})
        self.contexts = sorted({float(p[2]) for p in measured})
        shape = (self.rows.size, len(self.requests), len(self.contexts))
        total, count = np.zeros(shape), np.zeros(shape)
        for n, requests, context, ms in measured:
            cell = (
                int(np.searchsorted(self.rows, n)),
                self.requests.index(requests),
                self.contexts.index(context),
            )
            total[cell] += ms * 1e6
            count[cell] += 1
        times = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        times = _fill_along(times, 2, np.array(self.contexts), extrapolate=True)
        times = _fill_along(times, 1, np.array(self.requests))
        times = _fill_along(times, 0, self.rows.astype(np.float64))
        # One contiguous line of rows for each (requests, context): what `column` reads.
        self._times: Times = np.ascontiguousarray(times.transpose(1, 2, 0))

    def column(self, requests: float, context: float) -> Times:
        """Times [rows] in ns at this many requests and this mean context."""
        i, f = _locate(self.requests, requests)
        j, g = _locate(self.contexts, context, extrapolate=True)
        low: Times = self._times[i, j]
        if f:
            low = low + f * (self._times[i + 1, j] - low)
        if not g:
            return low
        high: Times = self._times[i, j + 1]
        if f:
            high = high + f * (self._times[i + 1, j + 1] - high)
        if g <= 1.0:
            inside: Times = low + g * (high - low)
            return inside
        # A noisy pair must not make a long context cheap: beyond the grid only upwards.
        beyond: Times = high + (g - 1.0) * np.maximum(high - low, 0.0)
        return beyond


def _locate(axis: list[float], value: float, extrapolate: bool = False) -> tuple[int, float]:
    """Cell and fraction of `value` on an ascending axis; the fraction exceeds 1 beyond its end."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    if value >= axis[-1] and not extrapolate:
        return len(axis) - 1, 0.0
    cell = min(bisect_right(axis, value) - 1, len(axis) - 2)
    return cell, (value - axis[cell]) / (axis[cell + 1] - axis[cell])


def _fill_along(times: Times, axis: int, coordinates: Times, extrapolate: bool = False) -> Times:
    lines = np.moveaxis(times, axis, -1)
    shape = lines.shape
    filled = [_fill(line, coordinates, extrapolate) for line in lines.reshape(-1, shape[-1])]
    return np.moveaxis(np.array(filled).reshape(shape), -1, axis)


def _fill(values: Times, axis: Times, extrapolate: bool) -> Times:
    """NaN gaps of a line: linear inside, nearest outside, or the last rising slope beyond."""
    known = np.flatnonzero(~np.isnan(values))
    if known.size in (0, values.size):
        return values
    filled = np.interp(axis, axis[known], values[known])
    if extrapolate and known.size > 1:
        last, before = known[-1], known[-2]
        slope = (values[last] - values[before]) / (axis[last] - axis[before])
        beyond = axis > axis[last]
        filled[beyond] = values[last] + max(float(slope), 0.0) * (axis[beyond] - axis[last])
    return np.asarray(filled, dtype=np.float64)
