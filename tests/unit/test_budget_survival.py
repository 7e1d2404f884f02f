"""Survivals on the integer grid, and the host's oracle of the packing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from vllm_ascend_spec.budget.survival import (
    ONE,
    Ranking,
    from_grid,
    prefix_products,
    quantise_scores,
    query_start_loc,
    split,
    to_grid,
)

SHAPES = st.tuples(st.integers(1, 7), st.integers(1, 6))
CONFIDENCES = SHAPES.flatmap(lambda shape: npst.arrays(np.float64, shape, elements=st.floats(0, 1)))


def survivals(confidence: np.ndarray) -> np.ndarray:
    return prefix_products(to_grid(confidence))


def test_survival_is_the_prefix_product() -> None:
    result = from_grid(survivals(np.array([[0.90, 0.80, 0.70, 0.50]])))
    np.testing.assert_allclose(result, [[0.90, 0.72, 0.504, 0.252]], atol=1e-4)


def test_budget_of_eight_splits_into_four_three_one() -> None:
    confidence = np.array(
        [[0.95, 0.9, 0.9, 0.9, 0.2], [0.9, 0.8, 0.8, 0.3, 0.9], [0.6, 0.5, 1, 1, 1]]
    )
    drafts = split(survivals(confidence), [5, 5, 5], 8)
    assert drafts.tolist() == [4, 3, 1]
    assert (drafts + 1).tolist() == [5, 4, 2]
    assert query_start_loc(drafts).tolist() == [0, 5, 9, 11]


def test_nan_and_out_of_range_count_as_zero_and_are_counted() -> None:
    confidence = np.array([[0.5, np.nan, 0.9], [np.inf, 0.9, 0.9], [-0.1, 1.1, -np.inf], [0, 1, 1]])
    scores, invalid = quantise_scores(confidence)
    assert invalid == 5
    assert scores.tolist() == [[512, 0, 921], [0, 921, 921], [0, 0, 0], [0, 1023, 1023]]
    assert (from_grid(survivals(confidence))[0] > 0).tolist() == [True, False, False]


def test_what_lies_beyond_the_draft_is_not_counted_as_invalid() -> None:
    confidence = np.full((3, 4), np.nan)
    confidence[1, :2] = 0.5
    scores, invalid = quantise_scores(confidence, [0, 2, 1])
    assert invalid == 1
    assert scores.sum(axis=1).tolist() == [0, 1024, 0]


def test_certain_drafts_still_rank_by_position() -> None:
    survival = survivals(np.ones((2, 5)))
    assert (np.diff(survival.astype(int), axis=1) < 0).all()
    assert split(survival, [5, 5], 5).tolist() == [3, 2]


def test_ties_break_by_position_then_request() -> None:
    survival = np.array([[9, 5], [9, 5], [9, 5]], dtype=np.uint16)
    assert [split(survival, [2, 2, 2], n).tolist() for n in range(7)] == [
        [0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
        [2, 2, 2],
    ]


def test_rows_without_survival_are_still_given_out() -> None:
    assert split(np.zeros((3, 2), dtype=np.uint16), [2, 0, 2], 3).tolist() == [2, 0, 1]


@pytest.mark.parametrize("budget", [-1, 4])
def test_a_budget_that_cannot_be_placed_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.3"):
        split(np.ones((2, 2), dtype=np.uint16), [2, 1], budget)


def test_too_many_rows_for_the_key_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        Ranking(8192, 16)


@given(CONFIDENCES, st.data())
def test_split_takes_the_best_rows_and_only_prefixes(
    confidence: np.ndarray, data: st.DataObject
) -> None:
    survival = survivals(confidence)
    requests, k = survival.shape
    available = np.array(
        data.draw(st.lists(st.integers(0, k), min_size=requests, max_size=requests))
    )
    budget = data.draw(st.integers(0, int(available.sum())))
    drafts = split(survival, available, budget)
    assert drafts.sum() == budget
    assert (drafts <= available).all()
    exists = np.arange(k) < available[:, None]
    taken = np.arange(k) < drafts[:, None]
    best = np.sort(survival[exists])[::-1][:budget]
    assert sorted(survival[taken].tolist(), reverse=True) == best.tolist()


@given(CONFIDENCES, st.data())
def test_more_confidence_never_takes_rows_away(confidence: np.ndarray, data: st.DataObject) -> None:
    requests, k = confidence.shape
    available = np.full(requests, k)
    budget = data.draw(st.integers(0, requests * k))
    request = data.draw(st.integers(0, requests - 1))
    raised = confidence.copy()
    raised[request] = np.maximum(raised[request], data.draw(st.floats(0, 1)))
    before = split(survivals(confidence), available, budget)
    after = split(survivals(raised), available, budget)
    assert after[request] >= before[request]
    others = np.arange(requests) != request
    assert (after[others] <= before[others]).all()


@given(st.permutations(range(6)), st.integers(0, 30), st.integers(0, 2**32 - 1))
def test_a_permuted_batch_gets_permuted_lengths(order: list[int], budget: int, seed: int) -> None:
    survival = prefix_products(
        np.random.default_rng(seed).permutation(60000)[:30].reshape(6, 5).astype(np.uint16) + 5000
    )
    if np.unique(survival).size < survival.size:
        return  # equal rows go to the smaller request index, which a permutation changes
    plain = split(survival, np.full(6, 5), budget)
    permuted = split(survival[order], np.full(6, 5), budget)
    assert permuted.tolist() == plain[order].tolist()


@given(npst.arrays(np.float32, (4, 5), elements=st.floats(width=32)))
def test_any_float_gives_falling_survivals_in_range(confidence: np.ndarray) -> None:
    scores, invalid = quantise_scores(confidence)
    good = (confidence >= 0) & (confidence <= 1)
    assert invalid == np.count_nonzero(~good)
    survival = survivals(scores / 1023).astype(int)
    assert survival.min() >= 0
    assert survival.max() < ONE
    assert ((np.diff(survival, axis=1) < 0) | (survival[:, 1:] == 0)).all()
