"""The host's own time of a step, learnt where the device had to wait for it.

A step cannot follow the one before it faster than the host gets it ready. On small models and few
requests that is what a step costs: rows are free there, and what the device would take decides
nothing. Learnt by octaves of requests, for the scheduler's work grows with them.
"""

from __future__ import annotations

from collections import deque

WINDOW, MOST = 15, 12
FORGET = 1024  # steps without a wait after which the host may have become faster unseen


class HostTime:
    """Time from one step's start to the next one's, in ns, where the device keeps waiting.

    Single waits mean nothing: the engine may have had nothing to do. A floor taken from them would
    hold itself up, for no plan below it would ever look cheaper.
    """

    def __init__(self, max_requests: int) -> None:
        octaves = max_requests.bit_length() + 1
        self._periods: list[deque[float | None]] = [deque(maxlen=WINDOW) for _ in range(octaves)]
        self._least = [0.0] * octaves
        self._busy = [0] * octaves

    def least(self, requests: int) -> float:
        """No step of so many requests is over sooner; 0 where the device is not waiting."""
        return self._least[self._octave(requests)]

    def observe(self, requests: int, period_ns: float, device_waited: bool) -> None:
        """A step's period, and whether the device was idle before it."""
        octave = self._octave(requests)
        periods = self._periods[octave]
        periods.append(period_ns if device_waited else None)
        if device_waited:
            self._busy[octave] = 0
            waited = sorted(period for period in periods if period is not None)
            if len(waited) >= MOST:
                self._least[octave] = float(round(waited[len(waited) // 4]))
            return
        self._busy[octave] += 1
        faster = period_ns < self._least[octave]
        if faster or self._busy[octave] >= FORGET:
            self._least[octave] = float(round(period_ns)) if faster else 0.0

    def _octave(self, requests: int) -> int:
        return min(requests.bit_length(), len(self._least) - 1)
