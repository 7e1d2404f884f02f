"""A simulated engine to judge the planner by: what a step costs, and what would be accepted.

Nothing here is a measurement. The hybrid shape is laid through the step times that issue 4 reports
for an H200 (no speculation and fixed K = 7 at 64, 128, 256 requests); drafter time and the share of
context are assumed, and the same for every policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_ascend_spec.budget.surface import (
    DrafterPoint,
    StepKind,
    Surface,
    SurfaceKey,
    TargetPoint,
)

LADDER = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, 2049, 64)]
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1024, 8192)
# Unconditional acceptance by position (issue 4): half of the requests each.
EASY = (0.90, 0.80, 0.72, 0.65, 0.59, 0.54, 0.49)
HARD = (0.55, 0.30, 0.17, 0.09, 0.05, 0.03, 0.02)
# Reported step times less the assumed drafter: (rows, ms) at short context.
HYBRID = (
    (1, 5.5),
    (64, 7.84),
    (128, 10.14),
    (256, 14.92),
    (512, 24.2),
    (1024, 46.8),
    (2048, 100.0),
)


def hybrid_ms(rows: float, requests: int, context: int) -> float:
    """Qwen3.5-9B shape: 8 of 32 layers read a KV cache of 4 KiB a token and layer."""
    sizes, times = zip(*HYBRID, strict=True)
    return float(np.interp(rows, sizes, times)) + 7.6e-6 * requests * max(context - 512, 0)


def dense_ms(rows: float, requests: int, context: int) -> float:
    """Qwen3-8B shape on a roofline: 16 GB of weights, 700 TFLOP/s, 144 KiB of KV a token."""
    return 1.0 + max(3.9, 0.023 * rows) + 33e-6 * requests * context


def parallel_drafter_ms(requests: int, depth: int) -> float:
    """One pass over depth + 1 rows a request."""
    return 0.8 + 0.0015 * requests * (depth + 1)


def sequential_drafter_ms(requests: int, depth: int) -> float:
    """One small pass a token."""
    return depth * (0.35 + 0.002 * requests)


@dataclass(frozen=True)
class Shape:
    """A target and a drafter, with the draft lengths that the drafter can be run at."""

    name: str
    target_ms: Callable[[float, int, int], float]
    drafter_ms: Callable[[int, int], float]
    depths: tuple[int, ...]


SHAPES = {
    "hybrid+parallel": Shape("hybrid+parallel", hybrid_ms, parallel_drafter_ms, (1, 3, 5, 7)),
    "hybrid+sequential": Shape("hybrid+sequential", hybrid_ms, sequential_drafter_ms, (1, 3, 5, 7)),
    "dense+parallel": Shape("dense+parallel", dense_ms, parallel_drafter_ms, (1, 3, 5, 7)),
}


def surface(shape: Shape, draft_tokens: int = 7, noise: float = 0.0, seed: int = 0) -> Surface:
    """The surface that `profile` would write for this shape; noise: relative, of each point."""
    random = np.random.default_rng(seed)

    def measured(ms: float) -> float:
        return ms * float(np.exp(noise * random.standard_normal()))

    target = [
        TargetPoint(
            kind=StepKind.FULL,
            rows=rows,
            requests=requests,
            context=context,
            ms=measured(shape.target_ms(rows, requests, context)),
        )
        for rows in LADDER
        for requests in REQUESTS
        for context in CONTEXTS
        if requests <= rows <= requests * (draft_tokens + 1)
    ]
    drafter = [
        DrafterPoint(
            requests=requests,
            depth=depth,
            context=1024,
            ms=measured(shape.drafter_ms(requests, depth)),
        )
        for requests in (1, *range(8, 257, 8))
        for depth in (1, 3, 5, 7)
    ]
    key = SurfaceKey(
        model=shape.name,
        dtype="bfloat16",
        device="simulated",
        engine="simulated",
        method="dflash",
        draft_tokens=draft_tokens,
        full_ladder=LADDER,
        drafter_ladder=[8 * size for size in (1, *range(8, 257, 8))],
    )
    return Surface(key=key, target=target, drafter=drafter, drafter_rows=8)


def logit(p: np.ndarray) -> np.ndarray:
    return np.log(p) - np.log1p(-p)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


class Acceptance:
    """Requests with rates of their own, drafts that are easier or harder, and noisy confidences.

    difficulty: standard deviation, in log-odds, of one draft's difficulty. noise: of a confidence
    around the draft's true chance. slope, offset: how wrong raw confidences are as a whole.
    """

    def __init__(
        self,
        requests: int,
        seed: int,
        difficulty: float = 0.7,
        noise: float = 0.5,
        slope: float = 1.0,
        offset: float = 0.0,
        profiles: tuple[tuple[float, ...], ...] = (EASY, HARD),
        lifetime: int = 150,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.difficulty, self.noise = difficulty, noise
        self.slope, self.offset, self.lifetime = slope, offset, lifetime
        self.kind = np.arange(requests) % len(profiles)
        self.become(profiles)

    def become(self, profiles: tuple[tuple[float, ...], ...]) -> None:
        """Every request changes to these unconditional acceptance profiles."""
        chances = [np.array(p) / np.array((1.0, *p[:-1])) for p in profiles]
        self._profiles = np.stack([logit(c) for c in chances])
        self.kind %= len(profiles)
        self.rates = self._profiles[self.kind]

    def turnover(self) -> np.ndarray:
        """Requests that end are replaced by others; returns their slots."""
        ended = np.flatnonzero(self.random.random(self.kind.size) < 1.0 / self.lifetime)
        # The slots of ended requests swap their kinds, so the shares of the kinds stay as they are.
        self.kind[ended] = self.random.permutation(self.kind[ended])
        self.rates[ended] = self._profiles[self.kind[ended]]
        return ended

    def draw(self) -> tuple[np.ndarray, np.ndarray]:
        """True acceptance chances [R, K] of this round's drafts, and raw confidences [R, K]."""
        shape = self.rates.shape
        shared = self.random.standard_normal((shape[0], 1))
        own = self.random.standard_normal(shape)
        truth = self.rates + self.difficulty * (0.8 * shared + 0.6 * own)
        seen = truth + self.noise * self.random.standard_normal(shape)
        return sigmoid(truth), sigmoid(self.slope * seen + self.offset)
