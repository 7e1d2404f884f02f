"""Drafts whose confidence is no number: verified whole, counted, and never learnt from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_spec.budget.controller import BudgetController
from vllm_ascend_spec.budget.planner import Limits
from vllm_ascend_spec.budget.survival import split, valid_rows

K, REQUESTS = 5, 6
SLOTS = np.arange(REQUESTS)
DRAFTED = np.full(REQUESTS, K)
BAD = [float("nan"), float("inf"), -float("inf"), -0.01, 1.01]


def controller() -> BudgetController:
    return BudgetController(Limits(K, REQUESTS, 64), None, np.full(K, 0.7))


def confidences(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.2, 0.9, (REQUESTS, K)).astype(np.float32)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("position", range(K))
def test_such_a_draft_ranks_before_all_others(bad: float, position: int):
    budget = controller()
    given_ = confidences()
    given_[3, position] = bad
    budget.record(SLOTS, given_, DRAFTED)
    assert budget.memory.unknown.tolist() == [False, False, False, True, False, False]
    assert split(budget.memory.newest, DRAFTED, K)[3] == K
    assert budget.counters.invalid == 1


def test_a_number_again_ends_it():
    budget = controller()
    given_ = confidences()
    given_[3] = float("nan")
    budget.record(SLOTS, given_, DRAFTED)
    budget.record(SLOTS, confidences(1), DRAFTED)
    assert not budget.memory.unknown.any()
    assert budget.counters.invalid == K


def test_a_request_that_takes_the_slot_is_known():
    budget = controller()
    budget.record(SLOTS, np.full((REQUESTS, K), np.nan), DRAFTED)
    budget.begin(3)
    assert budget.memory.unknown.tolist() == [True, True, True, False, True, True]


def test_what_is_planned_with_is_what_was_known_before():
    budget = controller()
    budget.record(SLOTS, confidences(), DRAFTED)
    typical = budget.memory.typical.copy()
    given_ = confidences(1)
    given_[2, 4] = float("nan")
    budget.record(SLOTS, given_, DRAFTED)
    assert np.array_equal(budget.memory.typical[2], typical[2])
    assert np.array_equal(budget.memory.expected(SLOTS)[2], typical[2])


def test_nothing_is_learnt_and_everything_is_counted():
    learning, control = controller(), controller()
    for round_ in range(60):
        given_ = confidences(round_)
        clean = control.record(SLOTS[:5], given_[:5], DRAFTED[:5])
        control.observe(clean, DRAFTED[:5], DRAFTED[:5], np.arange(5))
        given_[5, 1] = float("nan")
        drafts = learning.record(SLOTS, given_, DRAFTED)
        learning.observe(drafts, DRAFTED, DRAFTED, np.arange(REQUESTS))
    assert np.array_equal(learning.calibration.fitted, control.calibration.fitted)
    assert learning.calibration.version > 0
    assert learning.counters.verified == 60 * REQUESTS * K
    assert learning.counters.accepted == 60 * sum(range(REQUESTS))


def test_positions_that_were_not_drafted_may_hold_anything():
    given_ = confidences()
    given_[:, 3:] = float("nan")
    drafted = np.full(REQUESTS, 3)
    budget = controller()
    budget.record(SLOTS, given_, drafted)
    assert valid_rows(given_, drafted).all() and not budget.memory.unknown.any()
    assert budget.counters.invalid == 0


@given(st.lists(st.sampled_from([0.0, 0.3, 1.0, *BAD]), min_size=K, max_size=K))
def test_a_row_is_valid_only_if_each_number_is(row: list[float]):
    expected = all(0.0 <= value <= 1.0 for value in row)
    assert valid_rows(np.array([row]), np.array([K])).tolist() == [expected]
