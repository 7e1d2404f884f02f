"""The chi-square test itself: it passes what is right, and sees what is slightly wrong."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.engine import chi_square

V, N = 32, 20_000


def drawn(chances: np.ndarray, seed: int) -> np.ndarray:
    uniform = np.random.default_rng(seed).random((len(chances), 1))
    return (chances.cumsum(axis=1) < uniform).sum(axis=1).clip(max=V - 1)


def logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1.5, (N, V)).astype(np.float32)


def test_p_values_are_spread_evenly_where_all_is_right():
    values = []
    for seed in range(60):
        chances = chi_square.processed(logits(seed)[:2000], 0.7, 0.9)
        tokens = drawn(chances, 1000 + seed)
        strata = np.random.default_rng(seed).integers(0, 3, 2000)
        values.append(chi_square.test(chances, tokens, strata).p_value)
    assert 0.3 < np.mean(values) < 0.7 and min(values) > 1e-4
    assert sum(value < 0.5 for value in values) == pytest.approx(30, abs=14)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.75, 0.9), (0.7, 0.88)])
def test_another_temperature_or_nucleus_is_seen(temperature: float, top_p: float):
    right = chi_square.processed(logits(), 0.7, 0.9)
    tokens = drawn(chi_square.processed(logits(), temperature, top_p), 1)
    verdict = chi_square.test(*chi_square.ranks(right, tokens), np.zeros(N))
    assert verdict.p_value < 1e-4


def test_a_fault_in_one_stratum_is_seen_there():
    right = chi_square.processed(logits(), 1.0, 1.0)
    tokens, strata = drawn(right, 1), np.arange(N) % 20
    faulty = strata == 7
    likeliest = right.argmax(axis=1)
    hit = faulty & (tokens == likeliest)
    tokens[hit] = right[hit].argsort(axis=1)[:, -2]
    assert chi_square.test(*chi_square.ranks(right, tokens), strata).p_value < 1e-4


def test_a_token_that_cannot_come_is_seen_once():
    chances = np.full((N, V), 1 / (V - 1))
    chances[:, 5] = 0.0
    tokens = drawn(chances, 1)
    assert chi_square.test(chances, tokens, np.zeros(N)).p_value > 1e-4
    tokens[100] = 5
    assert chi_square.test(chances, tokens, np.zeros(N)).p_value == 0.0


def test_a_token_that_cannot_come_is_counted_and_one_at_the_edge_is_not():
    row = np.log([[0.5, 0.3, 0.06, 0.06, 0.05, 0.03]])
    kept = chi_square.processed(row, 1.0, 0.86)[0] > 0
    assert kept.tolist() == [True, True, False, True, False, False]
    rows = np.tile(row, (6, 1))
    assert chi_square.impossible(rows, np.arange(6), 1.0, 0.86) == 2  # the last two
    # Its share ends at 0.92 exactly: which of both a sum in float32 keeps is luck.
    assert chi_square.impossible(rows, np.arange(6), 1.0, 0.92) == 1
    assert chi_square.impossible(rows, np.arange(6), 1.0, 1.0) == 0


def test_one_rare_token_is_luck_in_a_small_stratum():
    chances = np.tile([0.5, 0.4999, 0.0001, 0.0], (400, 1))
    tokens = np.arange(400) % 2
    tokens[7] = 2  # 0.04 of these are expected
    assert chi_square.test(chances, tokens, np.zeros(400)).p_value > 0.5


def test_the_nucleus_keeps_the_fewest_tokens_that_reach_its_mass():
    chances = chi_square.processed(np.log(np.array([[0.5, 0.3, 0.15, 0.05]])), 1.0, 0.9)
    assert chances[0] == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0])
    assert chi_square.processed(np.zeros((1, 4)), 1.0, 0.01)[0].max() == 1.0


def test_ranks_name_the_likeliest_first():
    chances, tokens = chi_square.ranks(
        np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]]), np.array([1, 1])
    )
    assert chances.tolist() == [[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]] and tokens.tolist() == [0, 2]


def test_strata_tell_how_a_token_came_about():
    offset, verified = np.array([0, 2, 2, 3, 0, 0]), np.array([3, 3, 2, 3, 0, 0])
    drafted = np.array([3, 4, 4, 3, 4, 0])
    assert chi_square.strata(offset, verified, drafted).tolist() == [0, 2, 10, 7, 8, 12]
