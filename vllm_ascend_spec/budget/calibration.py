"""Calibration: from a drafter's raw score to the chance that the draft token is accepted.

One logistic map per sampling class and position, `sigmoid(slope * logit(score) + bias)`, where
`1 / slope` is the temperature of the sequential temperature scaling in the DSpark paper (arXiv
2607.05147). It is refitted online from what verification shows. Position i is observed only if it
was verified and every position before it was accepted: the rest is censored and changes nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_ascend_spec.budget.survival import ONE, SCORE_LEVELS, Grid, Ints, Scores, to_grid

BINS = 32
SAMPLING_CLASSES = 3
MEMORY = 4096  # observations kept per class and position: older ones fade as new ones come
REFIT_AFTER = 128
PRIOR = (6.0, 3.0)  # precision of slope and bias around the cold start, in units of the Hessian
CLOSE_PRIOR = (40.0, 20.0)  # of a part around the fit of the whole
MIN_SLOPE = 0.05  # a higher score never means a lower chance

Real = npt.NDArray[np.float64]


def sampling_class(temperature: float, top_p: float = 1.0) -> int:
    """0 greedy, 1 mild sampling (temperature < 0.8 or top-p < 0.95), 2 free sampling."""
    if temperature < 1e-5:
        return 0
    return 1 if temperature < 0.8 or top_p < 0.95 else 2


def log_odds(probability: npt.ArrayLike) -> Real:
    """log(p / (1 - p)), finite for 0 and 1 (half a score step away from them)."""
    edge = 0.5 / SCORE_LEVELS
    clipped = np.clip(np.asarray(probability, dtype=np.float64), edge, 1.0 - edge)
    return np.asarray(np.log(clipped) - np.log1p(-clipped), dtype=np.float64)


def sigmoid(x: Real) -> Real:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float64)


_SCORE_LOG_ODDS = log_odds(np.arange(SCORE_LEVELS) / (SCORE_LEVELS - 1))
_EDGES = np.linspace(_SCORE_LOG_ODDS[0], _SCORE_LOG_ODDS[-1], BINS + 1)
_BIN = np.clip(np.searchsorted(_EDGES, _SCORE_LOG_ODDS, side="right") - 1, 0, BINS - 1)
_CENTRE = 0.5 * (_EDGES[1:] + _EDGES[:-1])
# What slope and bias are multiplied with, and the products of these two, as a fit needs them.
_LINE = np.stack([_CENTRE, np.ones(BINS)])
_CURVATURE = np.stack([_CENTRE * _CENTRE, _CENTRE, np.ones(BINS)], axis=-1)


class OnlineCalibration:
    """Maps scores to acceptance chances and learns from verified drafts.

    slope, bias: float [K], where learning starts: scores taken at their word, or what
    `fit_temperatures` found (slope = 1 / temperature).
    """

    def __init__(
        self,
        draft_tokens: int,
        slope: npt.ArrayLike = 1.0,
        bias: npt.ArrayLike = 0.0,
    ) -> None:
        start = np.empty((draft_tokens, 2))
        start[:, 0], start[:, 1] = slope, bias
        self.draft_tokens = draft_tokens
        self._start: Real = start
        self.fitted: Real = np.repeat(start[None], SAMPLING_CLASSES, axis=0)
        shape = (SAMPLING_CLASSES, self.draft_tokens, BINS)
        self._seen, self._accepted = np.zeros(shape), np.zeros(shape)
        self._pending = 0
        self.version = 0  # changes with every refit
        self._table: Grid = np.zeros((SAMPLING_CLASSES, self.draft_tokens, SCORE_LEVELS), np.uint16)
        self._row = (np.arange(self.draft_tokens) * SCORE_LEVELS).astype(np.int64)
        self._tabulate()

    @classmethod
    def resumed(cls, fitted: Real) -> OnlineCalibration:
        """A calibration that was learnt before: slope and bias, float [class, K, 2]."""
        found = cls(fitted.shape[1], fitted[0, :, 0], fitted[0, :, 1])
        found.fitted[:] = fitted
        found._tabulate()
        return found

    def apply(self, scores: Scores, classes: Ints) -> Grid:
        """scores [R, K], sampling classes int [R] -> acceptance chances [R, K] on the grid.

        Score 0 stays 0: it also stands for NaN and for a draft token that does not exist.
        """
        index = scores + self._row
        if classes.any():
            index += (classes * (self.draft_tokens * SCORE_LEVELS))[:, None]
        return self._table.reshape(-1).take(index)

    def observe(self, scores: Scores, classes: Ints, verified: Ints, accepted: Ints) -> int:
        """Learn from one verification; returns the number of uncensored observations.

        verified, accepted: draft tokens per request, int [R]; accepted counts no bonus token.
        """
        positions = np.arange(self.draft_tokens)
        known = (positions < verified[:, None]) & (positions <= accepted[:, None])
        rows, columns = np.nonzero(known)
        if not rows.size:
            return 0
        cell = (classes[rows] * self.draft_tokens + columns) * BINS + _BIN[scores[rows, columns]]
        yes = columns < accepted[rows]
        shape = self._seen.shape
        self._seen += np.bincount(cell, minlength=self._seen.size).reshape(shape)
        self._accepted += np.bincount(cell[yes], minlength=self._seen.size).reshape(shape)
        self._pending += rows.size
        # Often at first, then after each quarter of the memory: a refit is not for every step.
        if self._pending >= max(REFIT_AFTER, min(float(self._seen.sum()), 4.0 * MEMORY) / 4.0):
            self.refit()
        return int(rows.size)

    def refit(self) -> None:
        """Fit everything together, each position around that, each class around its position.

        What all positions have in common moves a position that is hardly ever drafted, too.
        """
        self._pending = 0
        self.version += 1
        excess = MEMORY / np.maximum(self._seen.sum(axis=-1, keepdims=True), MEMORY)
        self._seen *= excess
        self._accepted *= excess
        seen, accepted = self._seen.sum(axis=0), self._accepted.sum(axis=0)
        middle = self._start.mean(axis=0, keepdims=True)
        common = _fit(seen.sum(axis=0)[None], accepted.sum(axis=0)[None], middle, PRIOR) - middle
        pooled = _fit(seen, accepted, self._start + common, CLOSE_PRIOR)
        lines = (SAMPLING_CLASSES * self.draft_tokens, BINS)
        around = np.tile(pooled, (SAMPLING_CLASSES, 1))
        each = _fit(self._seen.reshape(lines), self._accepted.reshape(lines), around, CLOSE_PRIOR)
        self.fitted[:] = each.reshape(self.fitted.shape)
        self._tabulate()

    @property
    def table(self) -> Grid:
        """Chances [class, K, score] on the grid: what a device needs to rank by what is planned."""
        return self._table

    @property
    def temperatures(self) -> Real:
        """1 / slope, float [class, K]."""
        return np.asarray(1.0 / self.fitted[..., 0])

    def _tabulate(self) -> None:
        # A class at a time: tables of all of them are too large for memory that is used again, and
        # a fit in the middle of a step would pay for fresh pages.
        for table, fitted in zip(self._table, self.fitted, strict=True):
            slope, bias = fitted[:, 0:1], fitted[:, 1:2]
            table[:] = to_grid(sigmoid(slope * _SCORE_LOG_ODDS + bias))
        self._table[..., 0] = 0


def _fit(seen: Real, accepted: Real, start: Real, prior: tuple[float, float]) -> Real:
    """Logistic regression on binned counts [K, BINS] with a Gaussian prior: Newton, vectorised.

    Returns [K, 2] (slope, bias). Strictly concave because of the prior, so few damped steps do.
    """
    parameters, step = start.copy(), np.empty_like(start)
    weight = np.asarray(prior)
    for _ in range(6):
        chance = sigmoid(parameters @ _LINE)
        expected = seen * chance
        gradient = (accepted - expected) @ _LINE.T - weight * (parameters - start)
        a, b, c = ((expected * (1.0 - chance)) @ _CURVATURE).T
        a, c = a + weight[0], c + weight[1]
        slope, bias = gradient.T
        step[:, 0], step[:, 1] = c * slope - b * bias, a * bias - b * slope
        step /= (a * c - b * b)[:, None]
        parameters += np.maximum(np.minimum(step, 1.0), -1.0)
        parameters[:, 0] = np.maximum(parameters[:, 0], MIN_SLOPE)
    return parameters


class Reliability:
    """Predicted survival against what happened, by position: the reliability diagram and ECE.

    A verified position has a known outcome even behind a rejection: its prefix was not accepted.
    """

    def __init__(self, draft_tokens: int, bins: int = 16, memory: int = MEMORY) -> None:
        self._bins, self._memory = bins, memory
        self.seen, self.predicted, self.accepted = np.zeros((3, draft_tokens, bins))

    def observe(self, survival: Grid, verified: Ints, accepted: Ints) -> None:
        """survival [R, K] as it was when the rows were chosen; verified, accepted int [R]."""
        rows, columns = np.nonzero(np.arange(survival.shape[1]) < verified[:, None])
        values = survival[rows, columns].astype(np.float64) / ONE
        cell = columns * self._bins + np.minimum((values * self._bins).astype(np.int64), 15)
        shape, size = self.seen.shape, self.seen.size
        yes = columns < accepted[rows]
        self.seen += np.bincount(cell, minlength=size).reshape(shape)
        self.predicted += np.bincount(cell, values, minlength=size).reshape(shape)
        self.accepted += np.bincount(cell[yes], minlength=size).reshape(shape)
        fade = self._memory / np.maximum(self.seen.sum(axis=1, keepdims=True), self._memory)
        for counts in (self.seen, self.predicted, self.accepted):
            counts *= fade

    def expected_calibration_error(self) -> Real:
        """ECE by position, float [K]; NaN where nothing was verified."""
        total = self.seen.sum(axis=1)
        gap = np.abs(self.predicted - self.accepted).sum(axis=1)
        return np.where(total > 0, gap / np.maximum(total, 1.0), np.nan)


def expected_calibration_error(
    predicted: Real, happened: npt.NDArray[np.bool_], bins: int = 15
) -> float:
    """Mean |predicted - observed| over equal-width bins, weighted by their counts."""
    if not predicted.size:
        return float("nan")
    cell = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    gap = np.bincount(cell, predicted - happened, minlength=bins)
    return float(np.abs(gap).sum() / predicted.size)


def fit_temperatures(
    scores: npt.ArrayLike, verified: npt.ArrayLike, accepted: npt.ArrayLike
) -> tuple[Real, Real, Real]:
    """Sequential temperature scaling: left to right, each position's temperature is the one that
    minimises the ECE of the cumulative product, with the earlier ones frozen (arXiv 2607.05147).

    scores [N, K] in [0, 1], verified and accepted int [N]. Rows that were not verified as far as a
    position are left out there. Returns (temperatures [K], ECE before [K], ECE after [K]); a
    position without data keeps temperature 1.
    """
    raw = np.nan_to_num(np.asarray(scores, dtype=np.float64))
    depth, reached = np.asarray(verified), np.asarray(accepted)
    x = log_odds(raw)
    candidates = np.geomspace(0.2, 5.0, 97)
    temperatures = np.ones(raw.shape[1])
    before, after = np.full((2, raw.shape[1]), np.nan)
    plain, prefix = np.ones(raw.shape[0]), np.ones(raw.shape[0])
    for position in range(raw.shape[1]):
        known = depth > position
        plain = plain * sigmoid(x[:, position])
        if known.any():
            outcome = reached[known] > position
            before[position] = expected_calibration_error(plain[known], outcome)
            errors = [
                expected_calibration_error(prefix[known] * sigmoid(x[known, position] / t), outcome)
                for t in candidates
            ]
            temperatures[position] = candidates[int(np.argmin(errors))]
            after[position] = min(errors)
        prefix = prefix * sigmoid(x[:, position] / temperatures[position])
    return temperatures, before, after
