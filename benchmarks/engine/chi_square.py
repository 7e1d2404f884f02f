"""Does a stream of tokens come from the distributions that it should come from?

Every token has a distribution of its own, given its prefix. Tokens are put into cells, and the
counts less what was expected are compared with their exact covariance, the sum of
`diag(p) - p p^T` over the tokens: with the distributions right the differences are martingale
differences, whatever drafting and trimming did in between as long as it looked at the past alone,
and the statistic is chi-square with as many degrees of freedom as the covariance has rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
EDGE = 1e-4  # a nucleus that is summed in float32 may end so much later


@dataclass(frozen=True)
class Verdict:
    """tokens: how many were counted. p_value: chance of a larger statistic by luck alone."""

    tokens: int
    statistic: float
    degrees: int
    p_value: float


def processed(logits: Array, temperature: float, top_p: float) -> Array:
    """Probabilities float64 [N, V] after temperature and nucleus sampling.

    Of equal logits at the edge of the nucleus, those with the higher token id are kept first, as
    a stable ascending sort cuts them.
    """
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=1, keepdims=True)
    chances = np.exp(scaled)
    chances /= chances.sum(axis=1, keepdims=True)
    if top_p >= 1.0:
        return chances
    order = np.argsort(logits, axis=1, kind="stable")
    below = np.take_along_axis(chances, order, 1).cumsum(axis=1)
    cut = below <= 1.0 - top_p
    cut[:, -1] = False
    kept = np.ones_like(cut)
    np.put_along_axis(kept, order, ~cut, 1)
    chances = np.where(kept, chances, 0.0)
    return np.asarray(chances / chances.sum(axis=1, keepdims=True))


def test(chances: Array, tokens: Array, strata: Array, least: float = 25.0) -> Verdict:
    """Counts of each token in each stratum against expectation.

    chances: float64 [N, V]; tokens: int [N]; strata: int [N], known before the token was drawn.
    Tokens expected fewer than `least` times in a stratum share a cell, with the rarest of the
    others where they are too few together: one token in a cell in which hardly any is expected is
    no surprise worth the statistic. What cannot come at all keeps its cell, and one of it is the
    end; `impossible` looks at every row for itself. A stratum of fewer than 4 * `least` tokens is
    left out.
    """
    from scipy.stats import chi2

    statistic, degrees = 0.0, 0
    for stratum in np.unique(strata):
        inside = strata == stratum
        p, drawn = chances[inside], tokens[inside]
        expected = p.sum(axis=0)
        if expected.sum() < 4 * least:
            continue
        cell = _cells(expected, least)
        merged = p @ np.eye(int(cell.max()) + 1)[cell]
        counts = np.bincount(cell[drawn], minlength=merged.shape[1])
        difference = counts - merged.sum(axis=0)
        covariance = np.diag(merged.sum(axis=0)) - merged.T @ merged
        values, vectors = np.linalg.eigh(covariance)
        # Cells add up to all tokens, so one direction has no variance at least.
        real = values > 1e-6 * max(float(values[-1]), 1e-30)
        projected = difference @ vectors
        stray = float(np.abs(projected[~real]).max(initial=0.0))
        if stray > 0.5:  # a token that cannot be drawn was drawn
            return Verdict(tokens.size, float("inf"), int(real.sum()), 0.0)
        statistic += float((projected[real] ** 2 / values[real]).sum())
        degrees += int(real.sum())
    p_value = float(chi2.sf(statistic, degrees)) if degrees else 1.0
    return Verdict(tokens.size, statistic, degrees, p_value)


def _cells(expected: Array, least: float) -> Array:
    """Cell of each token, int [V], by how often it is expected in the stratum, float [V]."""
    rare = expected < least
    cell = np.cumsum(~rare) - 1
    shared = int(cell[-1]) + 1
    if shared and 0.0 < expected[rare].sum() < least:
        shared = int(cell[~rare][expected[~rare].argmin()])
    return np.asarray(np.where(rare, shared, cell))


def impossible(logits: Array, tokens: Array, temperature: float, top_p: float) -> int:
    """How many tokens lie outside of their nucleus.

    logits: float [N, V]; tokens: int [N]. Room is left for `EDGE`, and for a sampler that keeps
    another one of equal logits.
    """
    chances = processed(logits, temperature, min(top_p + EDGE, 1.0))
    lowest = np.where(chances > 0, logits, np.inf).min(axis=1)
    drawn = np.take_along_axis(logits, tokens[:, None].astype(np.int64), 1)[:, 0]
    return int((drawn < lowest).sum())


def ranks(chances: Array, tokens: Array) -> tuple[Array, Array]:
    """The same with tokens named by their rank, likeliest first: float64 [N, V], int [N].

    A fault that hits the drafted token hits every token id alike, but mostly the highest rank.
    """
    order = np.argsort(-chances, axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(order.shape[1])[None], 1)
    drawn = np.take_along_axis(place, tokens[:, None].astype(np.int64), 1)[:, 0]
    return np.take_along_axis(chances, order, 1), drawn


def strata(offset: Array, verified: Array, drafted: Array) -> Array:
    """How each token came about, int [N], known before it is drawn: 4 * origin + place.

    origin: 0 a row with a draft token, 1 the token after a draft that was verified whole, 2 the
    token after a draft that was trimmed, 3 no draft at all. place: offset in the step, at most 3.
    """
    origin = np.where(offset < verified, 0, np.where(verified < drafted, 2, 1))
    origin = np.where(drafted == 0, 3, origin)
    return np.asarray(origin * 4 + np.minimum(offset, 3))
