"""Confidences: calibration online and offline, censoring, drift, memory, n-gram statistics."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_spec.budget import calibration as fits
from vllm_ascend_spec.budget.accounting import Counters
from vllm_ascend_spec.budget.calibration import (
    OnlineCalibration,
    Reliability,
    expected_calibration_error,
    fit_temperatures,
    log_odds,
    sampling_class,
    sigmoid,
)
from vllm_ascend_spec.budget.confidence import (
    COLD_STARTS,
    MatchStatistics,
    RequestMemory,
    cold_start,
    constant_acceptance,
    match_scores,
)
from vllm_ascend_spec.budget.survival import from_grid, quantise_scores, to_grid
from vllm_ascend_spec.drafters.methods import METHODS

K = 4
GREEDY = np.zeros(64, dtype=np.int64)


def rounds(
    count: int,
    slope: float,
    bias: float,
    calibration: OnlineCalibration,
    verified: int = K,
    classes: np.ndarray = GREEDY,
    seed: int = 0,
    reliability: Reliability | None = None,
) -> None:
    """Rounds of 64 requests whose scores are wrong: the truth is sigmoid(slope * logit + bias)."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        scores, _ = quantise_scores(random.uniform(0.05, 0.95, (64, K)))
        truth = sigmoid(slope * log_odds(scores / 1023) + bias)
        accepted = (random.random((64, K)) < truth)[:, :verified].cumprod(axis=1).sum(axis=1)
        if reliability is not None:
            chances = from_grid(calibration.apply(scores, classes))
            reliability.observe(to_grid(chances.cumprod(axis=1)), np.full(64, verified), accepted)
        calibration.observe(scores, classes, np.full(64, verified), accepted)


def error(
    calibration: OnlineCalibration, slope: float, bias: float, sampling: int = 0
) -> np.ndarray:
    """Largest error of the calibrated chance by position, over scores 0.1 .. 0.9."""
    scores, _ = quantise_scores(np.repeat(np.linspace(0.1, 0.9, 9)[:, None], K, axis=1))
    truth = sigmoid(slope * log_odds(scores / 1023) + bias)
    classes = np.full(9, sampling)
    return np.abs(from_grid(calibration.apply(scores, classes)) - truth).max(axis=0)


def test_uncalibrated_scores_are_taken_at_their_word() -> None:
    scores, _ = quantise_scores([[0.9, 0.8, 0.5, 0.1]])
    chances = from_grid(OnlineCalibration(K).apply(scores, np.zeros(1, dtype=np.int64)))
    np.testing.assert_allclose(chances, [[0.9, 0.8, 0.5, 0.1]], atol=2e-3)


def test_a_zero_score_stays_zero() -> None:
    """NaN and missing draft tokens are score 0: no bias may bring them back."""
    calibration = OnlineCalibration(K, bias=5.0)
    assert calibration.apply(np.zeros((1, K), np.uint16), np.zeros(1, np.int64)).sum() == 0


@pytest.mark.parametrize(("slope", "bias"), [(0.5, -1.0), (2.0, 1.0), (1.0, 0.0)])
def test_learns_from_a_bad_start(slope: float, bias: float) -> None:
    calibration, reliability = OnlineCalibration(K), Reliability(K)
    before = error(calibration, slope, bias)
    rounds(120, slope, bias, calibration, reliability=reliability)
    # The last position is reached by few drafts: a tenth as much data as the first.
    assert (error(calibration, slope, bias) < [0.04, 0.05, 0.07, 0.1]).all()
    assert slope == 1.0 or before.min() > 0.15
    late = Reliability(K)
    rounds(60, slope, bias, calibration, seed=1, reliability=late)
    assert late.expected_calibration_error().max() < 0.03


def test_follows_drift() -> None:
    calibration = OnlineCalibration(K)
    rounds(200, 1.0, 1.0, calibration)
    assert error(calibration, 1.0, -1.0)[0] > 0.3
    rounds(300, 1.0, -1.0, calibration, seed=2)
    assert error(calibration, 1.0, -1.0)[0] < 0.06


def test_what_is_not_verified_says_nothing() -> None:
    """Trimmed positions are not rejections: their own data stay empty, and nothing turns worse."""
    calibration = OnlineCalibration(K)
    rounds(100, 1.0, 0.0, calibration, verified=2)
    assert calibration._seen.sum(axis=(0, 2))[2:].tolist() == [0.0, 0.0]
    assert error(calibration, 1.0, 0.0).max() < 0.06


def test_a_position_behind_a_rejection_is_censored() -> None:
    calibration = OnlineCalibration(K)
    scores = np.full((3, K), 512, dtype=np.uint16)
    seen = calibration.observe(
        scores, np.zeros(3, np.int64), np.array([4, 4, 0]), np.array([1, 4, 0])
    )
    assert seen == 2 + 4
    assert calibration._seen.sum(axis=(0, 2)).tolist() == [2, 2, 1, 1]
    assert calibration._accepted.sum(axis=(0, 2)).tolist() == [2, 1, 1, 1]


def test_positions_that_are_never_drafted_follow_the_others() -> None:
    calibration = OnlineCalibration(K)
    rounds(100, 1.0, 2.0, calibration, verified=2)
    assert error(calibration, 1.0, 2.0)[3] < error(OnlineCalibration(K), 1.0, 2.0)[3] / 3


def test_sampling_classes_are_calibrated_apart() -> None:
    assert [sampling_class(t, p) for t, p in [(0, 1), (0.7, 1), (1, 0.9), (1, 1)]] == [0, 1, 1, 2]
    calibration = OnlineCalibration(K)
    for seed in range(40):
        rounds(3, 1.0, 1.5, calibration, seed=seed)
        rounds(3, 1.0, -0.5, calibration, classes=np.full(64, 2), seed=100 + seed)
    assert error(calibration, 1.0, 1.5, sampling=0).max() < 0.1
    assert error(calibration, 1.0, -0.5, sampling=2).max() < 0.1


def test_a_fit_is_where_the_likelihood_with_its_prior_is_highest() -> None:
    random = np.random.default_rng(0)
    seen = random.integers(0, 80, (6, fits.BINS)).astype(float)
    accepted = random.binomial(seen.astype(int), 0.2 + 0.6 * np.arange(fits.BINS) / fits.BINS)
    start = np.tile([1.0, 0.0], (6, 1))
    found = fits._fit(seen, accepted.astype(float), start, fits.CLOSE_PRIOR)

    def likelihood(slope: np.ndarray, bias: np.ndarray) -> np.ndarray:
        chance = sigmoid(slope[:, None] * fits._CENTRE + bias[:, None])
        data = accepted * np.log(chance) + (seen - accepted) * np.log(1 - chance)
        strange = fits.CLOSE_PRIOR[0] * (slope - 1) ** 2 + fits.CLOSE_PRIOR[1] * bias**2
        return np.asarray(data.sum(axis=1) - strange / 2)

    best = likelihood(*found.T)
    for slope, bias in [(0.01, 0.0), (-0.01, 0.0), (0.0, 0.01), (0.0, -0.01), (0.01, -0.01)]:
        assert (likelihood(found[:, 0] + slope, found[:, 1] + bias) < best).all()


def test_a_higher_score_never_means_a_lower_chance() -> None:
    calibration = OnlineCalibration(K)
    random = np.random.default_rng(3)
    for _ in range(50):  # scores that mean the opposite of what they say
        scores = random.integers(1, 1024, (64, K)).astype(np.uint16)
        accepted = (random.random((64, K)) < 1 - scores / 1023).cumprod(axis=1).sum(axis=1)
        calibration.observe(scores, GREEDY, np.full(64, K), accepted)
    every = np.repeat(np.arange(1, 1024, dtype=np.uint16)[:, None], K, axis=1)
    chances = calibration.apply(every, np.zeros(1023, np.int64)).astype(int)
    assert (np.diff(chances, axis=0) >= 0).all()


def test_sequential_temperatures_find_the_truth() -> None:
    random = np.random.default_rng(0)
    truth = random.beta(4, 1.5, (20000, 3))
    temperatures = np.array([2.0, 0.5, 1.0])
    scores = sigmoid(log_odds(truth) * temperatures)
    accepted = (random.random(truth.shape) < truth).cumprod(axis=1).sum(axis=1)
    found, before, after = fit_temperatures(scores, np.full(20000, 3), accepted)
    np.testing.assert_allclose(found, temperatures, rtol=0.15)
    assert (after <= before + 1e-12).all()
    assert after.max() < 0.012 < before[0]


def test_temperatures_leave_out_what_was_not_verified() -> None:
    scores = np.full((100, 2), 0.7)
    found, before, _ = fit_temperatures(scores, np.ones(100, int), np.ones(100, int))
    assert found[1] == 1.0
    assert np.isnan(before[1])
    assert found[0] < 1.0  # always accepted: 0.7 was too timid


def test_calibration_error_by_hand() -> None:
    predicted = np.array([0.95, 0.95, 0.15, 0.15])
    happened = np.array([True, False, False, False])
    assert expected_calibration_error(predicted, happened) == pytest.approx(0.5 * 0.45 + 0.5 * 0.15)
    assert np.isnan(expected_calibration_error(predicted[:0], happened[:0]))


def test_case_47_log_odds_are_finite() -> None:
    odds = log_odds([0.0, 1e-30, 0.5, 1.0])
    assert np.isfinite(odds).all()
    assert odds[2] == 0.0
    assert odds[3] == -odds[0] > 7


@given(st.floats(1.01, 7.9))
def test_constant_acceptance_has_that_length(tau: float) -> None:
    chance = constant_acceptance(tau, 7)
    assert sum(chance**i for i in range(8)) == pytest.approx(tau, rel=1e-6)


def test_every_method_has_a_start() -> None:
    assert set(COLD_STARTS) == {method.name for method in METHODS}
    survival = cold_start("dspark", 7).cumprod()
    assert survival.sum() + 1 == pytest.approx(4.56)  # the article's per-position shares
    assert cold_start("eagle3", 9).tolist()[-3:] == [0.38, 0.38, 0.38]


def test_match_scores() -> None:
    scores = match_scores([0, 3, 5, 5, 5], [9, 0, 0, 60, 0], [9, 0, 0, 60, 60])
    assert scores[0] == 0.0
    assert scores[1] < scores[2] < scores[3]
    assert scores[4] < 0.1


def test_match_statistics_of_a_request_fade_and_end_with_it() -> None:
    statistics = MatchStatistics(2)
    slots = np.array([0, 1])
    for _ in range(50):
        statistics.observe(slots, np.array([4, 4]), np.array([4, 0]))
    good, bad = statistics.scores(slots, np.array([4, 4]), 3)[:, 0]
    assert good > 0.95
    assert bad < 0.1
    statistics.begin(1)
    assert statistics.scores(slots, np.array([4, 4]), 3)[1].tolist() == [0.8, 0.8, 0.8]


def memory(requests: int = 4) -> RequestMemory:
    return RequestMemory(requests, OnlineCalibration(K), np.full(K, 0.7))


def draft(chance: float, requests: int = 1) -> np.ndarray:
    return quantise_scores(np.full((requests, K), chance))[0]


def test_an_undrafted_request_drifts_back_to_its_mean() -> None:
    known = memory(1)
    slot, yes, no = np.array([0]), np.array([True]), np.array([False])
    for _ in range(15):
        known.record(slot, draft(0.9), yes, K)
    known.record(slot, draft(0.1), yes, K)
    assert from_grid(known.newest)[0, 0] == pytest.approx(0.1, abs=0.01)
    for _ in range(40):
        known.record(slot, draft(0.5), no, K)
    assert from_grid(known.newest)[0, 0] == pytest.approx(from_grid(known.typical)[0, 0], abs=0.01)
    assert from_grid(known.typical)[0, 0] > 0.7


def test_a_new_request_is_taken_for_one_of_the_recent_ones() -> None:
    known = memory()
    for _ in range(300):
        known.record(
            np.array([0, 1]), np.concatenate([draft(0.9), draft(0.2)]), np.ones(2, bool), K
        )
    seen = set()
    for _ in range(2):
        known.begin(3)
        seen.add(round(float(from_grid(known.newest)[3, 0]), 1))
    assert seen == {0.9, 0.2}
    assert from_grid(known.typical)[3, 0] == pytest.approx(0.55, abs=0.05)


def test_a_shallow_draft_keeps_the_deeper_chances() -> None:
    known = memory(1)
    known.record(np.array([0]), draft(0.9), np.array([True]), K)
    survival = known.record(np.array([0]), draft(0.5), np.array([True]), 1)
    np.testing.assert_allclose(from_grid(survival)[0], 0.5 * 0.9 ** np.arange(K), atol=0.01)


def test_a_new_calibration_reaches_requests_that_are_not_drafted() -> None:
    calibration = OnlineCalibration(K)
    known = RequestMemory(2, calibration, np.full(K, 0.7))
    known.record(np.array([0, 1]), draft(0.3, 2), np.ones(2, bool), K)
    rounds(100, 1.0, 2.0, calibration)
    known.record(np.array([0, 1]), draft(0.3, 2), np.zeros(2, bool), K)
    expected = sigmoid(log_odds(0.3) + 2.0)
    assert from_grid(known.newest)[0, 0] == pytest.approx(float(expected), abs=0.08)


def test_small_batches_plan_with_the_mean_and_large_ones_with_the_newest() -> None:
    known = memory(256)
    every = np.arange(256)
    for chance in (0.8, 0.8, 0.8, 0.2):
        known.record(every, draft(chance, 256), np.ones(256, bool), K)
    single, all_of_them = known.expected(every[:1])[0, 0], known.expected(every)[0, 0]
    assert all_of_them == known.newest[0, 0]
    assert abs(int(single) - int(known.typical[0, 0])) < 0.1 * abs(int(all_of_them) - int(single))


def test_case_49_counters() -> None:
    empty = Counters(steps=1, requests=2, emitted=2)
    assert (empty.acceptance, empty.expectation_error, empty.time_error) == (None, None, None)
    assert empty.tau == 1.0
    step = Counters(steps=2, requests=3, drafted=7, verified=3, accepted=2, emitted=5)
    assert (step.trimmed, step.acceptance) == (4, pytest.approx(2 / 3))
    between = step.since(empty)
    assert (between.drafted, between.emitted, between.requests) == (7, 3, 1)
    assert Counters().tau is None
