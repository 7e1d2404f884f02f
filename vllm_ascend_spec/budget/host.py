"""The host's own time of a step, learnt where the device had to wait for it.

A step cannot follow the one before it faster than the host gets it ready. On small models and few
requests that is what a step costs: rows are free there, and what the device would take decides
nothing. Learnt by octaves of requests, for the scheduler's work grows with them.
"""

from __future__ import annotations

from collections import deque

WINDOW = 15


class HostTime:
    """Time from one step's start to the next one's, in ns, of steps that found the device idle."""

    def __init__(self, max_requests: int) -> None:
        octaves = max_requests.bit_length() + 1
        self._periods: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(octaves)]
        self._least = [0.0] * octaves

    def least(self, requests: int) -> float:
        """No step of so many requests is over sooner; 0 where the host was never waited for."""
        return self._least[self._octave(requests)]

    def observe(self, requests: int, period_ns: float, device_waited: bool) -> None:
        """A step's period. One without a wait shows that the host can be that fast.

        The lower quartile counts: an engine that had nothing to do for a while looks like a slow
        host, and a slow host never looks fast.
        """
        octave = self._octave(requests)
        periods = self._periods[octave]
        if not device_waited and period_ns >= self._least[octave]:
            return
        periods.append(period_ns)
        self._least[octave] = float(round(sorted(periods)[len(periods) // 4]))

    def _octave(self, requests: int) -> int:
        return min(requests.bit_length(), len(self._least) - 1)
