"""Survival of draft tokens: prefix products of acceptance chances, on an integer grid.

A draft token is emitted only if every draft token before it was accepted, so what counts is the
survival `p_i = c_1 * ... * c_i`. Survivals are kept as integers in units of 2**-16: two ranks that
hold the same confidences take the same decision whatever their compilers, vector widths and
summation orders, because nothing after the rounding to the grid is a floating-point sum.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

GRID_BITS = 16
ONE = 1 << GRID_BITS  # survival 1.0; the largest stored value is ONE - 1
SCORE_LEVELS = 1024  # raw drafter scores are kept in steps of 1/1023

Grid: TypeAlias = npt.NDArray[np.uint16]
Scores: TypeAlias = npt.NDArray[np.uint16]
Ints: TypeAlias = npt.NDArray[np.int64]
# Integers below 2**53 held as float64: sums are exact in any order, and division is the fastest.
Exact: TypeAlias = npt.NDArray[np.float64]
Floats: TypeAlias = npt.NDArray[np.floating]


def quantise_scores(
    confidence: npt.ArrayLike, available: npt.ArrayLike | None = None
) -> tuple[Scores, int]:
    """Raw confidences [R, K] in [0, 1] -> (scores uint16 [R, K] in 0..1023, invalid count).

    NaN, infinite and out-of-range values become 0 and are counted; what that means for their
    request is `RequestMemory.record`'s affair.
    available: draft tokens per request, int [R]; what lies beyond is 0 and not counted.
    """
    values = np.asarray(confidence, dtype=np.float32)
    # NaN compares false: one test covers NaN and both infinities.
    valid = (values >= 0.0) & (values <= 1.0)
    if available is None:
        invalid = values.size - int(np.count_nonzero(valid))
    else:
        exists = np.arange(values.shape[-1]) < np.asarray(available)[..., None]
        invalid = int(np.count_nonzero(exists > valid))
        valid &= exists
    rounded: npt.NDArray[np.float32] = np.where(valid, values, np.float32(0)) * np.float32(
        SCORE_LEVELS - 1
    )
    rounded += np.float32(0.5)
    return rounded.astype(np.uint16), invalid


def valid_rows(confidence: npt.ArrayLike, available: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """bool [R]: requests whose confidences [R, K] are numbers in [0, 1] as far as `available`."""
    values = np.asarray(confidence, dtype=np.float32)
    exists = np.arange(values.shape[-1]) < np.asarray(available)[..., None]
    valid = ((values >= 0.0) & (values <= 1.0)) | ~exists
    return np.asarray(valid.all(axis=-1))


def to_grid(probability: npt.ArrayLike) -> Grid:
    """Probabilities -> units of 2**-16, rounded; NaN and values outside [0, 1] become 0."""
    values = np.asarray(probability, dtype=np.float64)
    clean = np.where((values >= 0.0) & (values <= 1.0), values, 0.0)
    grid: Grid = np.minimum(np.rint(clean * ONE), ONE - 1).astype(np.uint16)
    return grid


def from_grid(grid: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Units of 2**-16 -> probabilities, float64."""
    return np.asarray(grid, dtype=np.float64) / ONE


def prefix_products(confidence: Grid, out: Grid | None = None) -> Grid:
    """Acceptance chances [R, K] on the grid -> survivals [R, K] on the grid.

    The product truncates, and the largest chance is ONE - 1, so survival falls strictly until it
    is 0: a request's rows always rank in the order of their positions. Loses at most K * 2**-16.
    """
    survival = np.empty_like(confidence) if out is None else out
    if confidence.shape[1] == 0:
        return survival
    # By position, so that each product is one call on whole lines of one type.
    running = confidence.T.astype(np.uint32, order="C")
    for before, line in pairwise(running):
        line *= before
        line >>= GRID_BITS
    survival[:] = running.T
    return survival


class Ranking:
    """Orders the draft rows of a batch: best survival first, ties by (position, request index).

    One integer key carries survival, position and request, so the order is total and a plain sort
    gives it. max_requests * draft_tokens may be at most 2**16.
    """

    def __init__(self, max_requests: int, draft_tokens: int) -> None:
        if max_requests * draft_tokens > ONE:
            raise ValueError(
                f"max_requests * draft_tokens is {max_requests * draft_tokens}, at most {ONE} "
                "rows can be ranked: lower max_num_seqs or num_speculative_tokens"
            )
        self.max_requests = max_requests
        self.draft_tokens = draft_tokens
        positions = np.arange(draft_tokens, dtype=np.uint32)
        requests = np.arange(max_requests, dtype=np.uint32)
        self._slot = requests[:, None] + positions * np.uint32(max_requests)
        self._position = positions.astype(np.int64)
        self._flags = np.zeros((draft_tokens, max_requests), dtype=np.bool_)

    def order(self, survival: Grid, available: Ints) -> tuple[Ints, npt.NDArray[np.intp]]:
        """survival [R, K], available int [R] -> (survivals [N] falling, slots [N]).

        N = sum(available); survivals are integers on the grid; slot = position * max_requests +
        request.
        """
        requests = survival.shape[0]
        key = np.subtract(ONE - 1, survival, dtype=np.uint32)
        key <<= GRID_BITS
        key |= self._slot[:requests]
        # Rows that do not exist go; the comparison is spared where all exist.
        if int(available.sum()) < key.size:
            key = key[self._position < available[:, None]]
        key = key.reshape(-1)
        key.sort()
        slots = np.bitwise_and(key, ONE - 1, dtype=np.intp, casting="unsafe")
        key >>= GRID_BITS
        return np.subtract(ONE - 1, key, dtype=np.int64), slots

    def table(self, counts: Ints) -> npt.NDArray[np.bool_]:
        """Rows per request [R] -> bool [K * max_requests], true at the slots of those rows.

        Valid until the next call; what it holds for requests beyond R is meaningless.
        """
        self._flags[:, : counts.shape[0]] = self._position[:, None] < counts
        return self._flags.reshape(-1)


def split(survival: Grid, available: npt.ArrayLike, budget: int) -> npt.NDArray[np.int32]:
    """The host's oracle for the device packing: how many draft rows each request gets.

    survival [R, K] on the grid, available int [R], budget rows in all. Returns int32 [R]: the
    `budget` best rows of the batch, which are a prefix of every request. Rows of survival 0 are
    given out last, for the total is fixed before the device sees the fresh confidences.
    Raises ValueError when the budget is negative or exceeds what is available.
    """
    counts = np.asarray(available, dtype=np.int64)
    requests, draft_tokens = survival.shape
    total = int(np.minimum(counts, draft_tokens).sum())
    if not 0 <= budget <= total:
        raise ValueError(f"budget {budget} outside 0..{total}, the draft rows in hand")
    _, slots = Ranking(max(requests, 1), max(draft_tokens, 1)).order(survival, counts)
    chosen = slots[:budget] % max(requests, 1)
    return np.bincount(chosen, minlength=requests).astype(np.int32)


def query_start_loc(draft_lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Draft rows per request [R] -> query start locations [R + 1]; each request adds its anchor."""
    starts = np.zeros(draft_lengths.shape[0] + 1, dtype=np.int32)
    np.cumsum(draft_lengths + 1, out=starts[1:])
    return starts
