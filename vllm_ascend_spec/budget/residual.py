"""Online correction of measured prices by what steps really took.

Every (context octave, bucket) keeps its last `WINDOW` log ratios of real to predicted time, at
first all 0, and is corrected by their median. So one outlier moves nothing, however large; a real
change moves its bucket after WINDOW // 2 + 1 steps; and no bucket ever moves another one. A bucket
that a correction has made too dear to visit cannot show that it has recovered, hence corrections
fade with the time since the last visit.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from vllm_ascend_spec.budget.survival import Exact

WINDOW = 7
UNITY = 1_000_000  # corrections are whole parts per million, so that ranks can share them
OCTAVES = 24
LIMIT = math.log(64.0)


class Residuals:
    """Corrections [octave, bucket]. half_life: steps after which an unvisited one has halved."""

    def __init__(self, buckets: int, half_life: int = 2048) -> None:
        self._buckets = buckets
        self._half_life = half_life
        self._ratios = np.zeros((OCTAVES, buckets, WINDOW), dtype=np.float32)
        self._median = np.zeros((OCTAVES, buckets), dtype=np.float64)
        self._visits = np.zeros((OCTAVES, buckets), dtype=np.int64)
        self._visited = np.zeros((OCTAVES, buckets), dtype=np.int64)
        self._factor = np.ones((OCTAVES, buckets))
        self._step = 0
        self.version = 0  # changes with every correction

    @staticmethod
    def octave(context: float) -> int:
        """A correction learnt at one context length says nothing about one eight times longer."""
        return min(int(max(context, 1.0)).bit_length(), OCTAVES - 1)

    def observe(self, context: float, bucket: int, predicted_ns: float, real_ns: float) -> None:
        """Record a step. predicted_ns: the surface's price without correction."""
        self._step += 1
        if self._step % (self._half_life // 16 or 1) == 0:
            self._fade()
        if not (predicted_ns > 0 and real_ns > 0 and math.isfinite(real_ns)):
            return
        cell = (self.octave(context), bucket)
        ratio = math.log(real_ns / predicted_ns)
        ring = self._ratios[cell]
        ring[self._visits[cell] % WINDOW] = min(max(ratio, -LIMIT), LIMIT)
        self._visits[cell] += 1
        self._visited[cell] = self._step
        self.version += 1
        median = self._median[cell] = sorted(ring.tolist())[WINDOW // 2]
        self._factor[cell] = round(UNITY * math.exp(median)) / UNITY

    def factors(self, context: float) -> Exact:
        """Corrections [buckets] at this context: whole parts per million, as a factor."""
        factors: Exact = self._factor[self.octave(context)]
        return factors

    def _fade(self) -> None:
        self.version += 1
        age = self._step - self._visited
        remaining = self._median * np.exp2(-age / self._half_life)
        self._factor[:] = np.rint(UNITY * np.exp(remaining)) / UNITY
        # Long unvisited: forget the ring too, or the first new visit would bring it all back.
        self._ratios[age > 4 * self._half_life] = 0.0
        self._median[age > 4 * self._half_life] = 0.0

    def export(self) -> npt.NDArray[np.int64]:
        """Integers [octave, bucket] for the other ranks: only one rank's clock may decide."""
        return np.rint(self._factor * UNITY).astype(np.int64)

    def restore(self, factors: npt.NDArray[np.int64]) -> None:
        """Take over another rank's corrections; ValueError when the shape differs."""
        if factors.shape != self._factor.shape:
            raise ValueError(f"corrections of shape {factors.shape}, here {self._factor.shape}")
        self.version += 1
        self._factor[:] = factors / UNITY
