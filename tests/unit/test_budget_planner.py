"""The plan: argmax over the whole array, not drafting, limits, probes, and equal decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from vllm_ascend_spec.budget import planner
from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.planner import Limits, Plan, Planner, Reason, StepBatch
from vllm_ascend_spec.budget.surface import StepKind, Surface, SurfaceKey
from vllm_ascend_spec.budget.survival import ONE, prefix_products, split, to_grid

K = 7


def cost_model(
    price: Any,
    ladder: list[int],
    requests: int = 16,
    drafter: Any = None,
    kinds: tuple[str, ...] = ("full", "mixed"),
    depths: tuple[int, ...] = (K,),
) -> CostModel:
    """A model whose graphs of `rows` rows take price(rows) ms, and drafting m drafter(m, depth)."""
    key = SurfaceKey(
        model="m",
        dtype="d",
        device="x",
        engine="e",
        method="mtp",
        draft_tokens=K,
        full_ladder=ladder,
        mixed_ladder=ladder,
        drafter_ladder=list(range(1, requests + 1)),
    )
    target = [
        {"kind": kind, "rows": rows, "requests": 1, "context": 0, "ms": price(rows)}
        for kind in kinds
        for rows in ladder
    ]
    points = [
        {"requests": m, "depth": depth, "context": 0, "ms": drafter(m, depth)}
        for m in (range(1, requests + 1) if drafter else ())
        for depth in depths
    ]
    surface = Surface.model_validate({"key": key, "target": target, "drafter": points})
    return CostModel(surface, requests, 4096)


def limits(requests: int = 16, rows: int = 4096, **changes: Any) -> Limits:
    quiet = {"probe_share": 0.0, "probe_credit_ms": 0.0}
    return Limits(K, requests, rows, **(quiet | changes))


def batch(survival: np.ndarray, **changes: Any) -> StepBatch:
    requests = survival.shape[0]
    plain = StepBatch(
        kind=StepKind.FULL,
        survival=survival,
        typical=survival,
        drafted=np.full(requests, K),
        may_draft=np.ones(requests, dtype=bool),
        rows=requests,
        sampling=requests,
        context=1000.0,
    )
    return replace(plain, **changes)


def geometric(rate: float, requests: int = 16) -> np.ndarray:
    return np.repeat(prefix_products(to_grid(np.full((1, K), rate))), requests, axis=0)


def same(one: Plan, two: Plan) -> bool:
    return one.digest() == two.digest() and one.expected_ms == two.expected_ms


@pytest.mark.parametrize(("ms_per_row", "budget"), [(0.01, 96), (0.40, 16)])
def test_case_22_budgets(ms_per_row: float, budget: int) -> None:
    cost = cost_model(lambda rows: 8.0 + ms_per_row * rows, list(range(1, 129)))
    plan = Planner(limits(), cost).plan(batch(geometric(0.6)))
    assert plan.draft_rows == budget
    gains = np.concatenate([[0.0], np.sort(np.repeat(0.6 ** np.arange(1, 8), 16))[::-1].cumsum()])
    rate = (16 + gains) / (8.0 + ms_per_row * (16 + np.arange(113)))
    assert int(rate.argmax()) == budget
    assert plan.expected_tokens == pytest.approx(16 + gains[budget], rel=1e-3)
    assert plan.expected_ms == pytest.approx(8.0 + ms_per_row * (16 + budget), rel=1e-6)


def test_past_a_dear_step_a_larger_graph_can_still_be_best() -> None:
    """A greedy stop at the first descent would verify 16 rows here."""
    steps = {32: 10.0, 64: 13.0, 128: 13.5}
    plan = Planner(limits(), cost_model(steps.__getitem__, [32, 64, 128])).plan(
        batch(geometric(0.9))
    )
    assert plan.rows == 128
    rule = planner.pays(0.9**2, 16 + 16 * 0.9, 10.0, 3.0)
    assert not rule


@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12),
    st.floats(0.1, 9.0),
    st.floats(0.01, 2.0),
)
def test_on_a_line_the_threshold_rule_is_the_argmax(
    chances: list[float], fixed: float, slope: float
) -> None:
    survival = np.cumprod(chances)
    tokens = 1.0 + np.concatenate([[0.0], survival.cumsum()])
    cost = fixed + slope * np.arange(1, tokens.size + 1)
    stop = 0
    while stop < survival.size and planner.pays(survival[stop], tokens[stop], cost[stop], slope):
        stop += 1
    best = planner.best_count(tokens, cost)
    assert tokens[stop] / cost[stop] == pytest.approx(tokens[best] / cost[best], rel=1e-12)


def test_not_drafting_is_a_choice_and_the_drafter_is_skipped() -> None:
    cost = cost_model(lambda rows: 1.0 * rows, list(range(1, 129)), drafter=lambda m, d: 1.0)
    plan = Planner(limits(), cost).plan(batch(geometric(0.5), drafted=np.zeros(16, dtype=int)))
    assert plan.reason is Reason.NO_DRAFT
    assert (plan.draft_rows, plan.draft_next.any(), plan.expected_ms) == (0, False, 16.0)


def test_drafts_in_hand_are_sunk_and_verified_where_a_row_pays() -> None:
    """Drafting costs too much to go on, but these drafts have been paid for."""
    cost = cost_model(
        lambda rows: 8.0 + 0.01 * rows, list(range(1, 129)), drafter=lambda m, d: 50.0
    )
    plan = Planner(limits(), cost).plan(batch(geometric(0.9)))
    assert not plan.draft_next.any()
    assert plan.draft_rows > 100


def test_a_request_that_will_not_be_verified_is_not_drafted() -> None:
    survival = np.concatenate([geometric(0.9, 8), geometric(0.05, 8)])
    cost = cost_model(
        lambda rows: 4.0 + 0.1 * rows, list(range(1, 129)), drafter=lambda m, d: 0.3 * m
    )
    planner = Planner(limits(), cost)
    for _ in range(3):  # the first step finds the marginal row, the next ones use it
        plan = planner.plan(batch(survival))
    assert plan.draft_next.tolist() == [True] * 8 + [False] * 8


def test_a_drafter_that_cannot_leave_requests_out_drafts_all_or_none() -> None:
    survival = np.concatenate([geometric(0.9, 8), geometric(0.05, 8)])
    cost = cost_model(
        lambda rows: 4.0 + 0.1 * rows, list(range(1, 129)), drafter=lambda m, d: 0.3 * m
    )
    planner = Planner(limits(drafts_subset=False, probe_share=0.01), cost)
    counts = {int(planner.plan(batch(survival)).draft_next.sum()) for _ in range(50)}
    assert counts <= {0, 16}


def test_a_sequential_drafter_is_run_only_as_deep_as_it_pays() -> None:
    cost = cost_model(lambda rows: 8.0, [128], drafter=lambda m, d: 2.0 * d, depths=(1, 3, 7))
    planner = Planner(limits(depths=(1, 3, 7)), cost)
    depths = [planner.plan(batch(geometric(0.4))).depth for _ in range(6)]
    gain = {d: (1 + sum(0.4**i for i in range(1, d + 1))) / (8.0 + 2.0 * d) for d in (1, 3, 7)}
    assert depths[-1] == max(gain, key=gain.__getitem__) == 1


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"max_draft_rows": 5}, 5),
        ({"max_logits_rows": 20}, 4),
        ({"max_logits_rows": 16}, 0),
        ({"max_logits_rows": 3}, 0),  # more requests than logits rows: never negative
        ({"rows": 30}, 14),
    ],
)
def test_limits_hold_with_and_without_prices(changes: dict[str, int], most: int) -> None:
    free = cost_model(lambda rows: 8.0, [128])
    for cost in (free, None):
        plan = Planner(limits(**changes), cost).plan(batch(geometric(0.9)))
        assert plan.draft_rows == most
        assert plan.rows == 16 + most


def test_without_a_surface_the_fixed_length_is_verified_and_said() -> None:
    plan = Planner(limits(), None).plan(batch(geometric(0.01)))
    assert (plan.draft_rows, plan.reason, plan.expected_ms) == (16 * K, Reason.NO_SURFACE, None)
    assert plan.draft_next.all()


def test_a_step_without_a_price_falls_back_to_the_fixed_length() -> None:
    plan = Planner(limits(), cost_model(lambda rows: 8.0, [8])).plan(batch(geometric(0.01)))
    assert plan.reason is Reason.UNPRICED


def test_opted_out_prefill_and_grammar_rows() -> None:
    """Request 0 opted out, 1 is in prefill, 2 has a grammar that ends its draft after 3 tokens."""
    drafted = np.array([0, 0, 3, K])
    may_draft = np.array([False, True, True, True])
    cost = cost_model(lambda rows: 8.0 + 1e-4 * rows, list(range(1, 129)), drafter=lambda m, d: 0.1)
    step = batch(
        geometric(0.9, 4),
        drafted=drafted,
        may_draft=may_draft,
        kind=StepKind.MIXED,
        rows=3 + 64,
        sampling=3,
    )
    plan = Planner(limits(4, 128), cost).plan(step)
    assert plan.rows == 67 + plan.draft_rows
    assert plan.draft_rows == 10
    assert split(step.survival, drafted, plan.draft_rows).tolist() == [0, 0, 3, 7]
    assert plan.draft_next.tolist() == may_draft.tolist()
    assert plan.expected_tokens == pytest.approx(
        3 + sum(0.9**i for i in (1, 2, 3)) + sum(0.9**i for i in range(1, 8)), rel=1e-3
    )


def test_case_15_a_budget_of_zero_and_an_uneven_one() -> None:
    """K = 7; A and C have a grammar; nothing verified, then [0, 4, 2] of [7, 7, 7]."""
    dear = cost_model(lambda rows: 5.0 * rows, list(range(1, 65)))
    hopeless = Planner(limits(), dear).plan(batch(np.zeros((3, K), dtype=np.uint16)))
    assert (hopeless.draft_rows, hopeless.rows) == (0, 3)
    confidence = np.full((3, K), 0.02)
    confidence[1, :4], confidence[2, :2] = 0.95, 0.9
    assert split(prefix_products(to_grid(confidence)), [7, 7, 7], 6).tolist() == [0, 4, 2]


def test_case_16_a_step_is_never_larger_than_one_pass_over_the_logits() -> None:
    """3 requests, K = 7: 24 rows before trimming; 16 and then 4 rows of logits fit."""
    free = cost_model(lambda rows: 8.0, [64])
    for fits in (16, 4):
        plan = Planner(limits(max_logits_rows=fits), free).plan(batch(geometric(0.9, 3)))
        assert plan.rows == fits


def test_a_mixed_step_trims_by_the_value_of_decode_time() -> None:
    """A long prefill makes each row's share of the step small; it still costs what it costs."""
    cost = cost_model(lambda rows: 8.0 + 0.4 * rows, list(range(1, 2200)))
    alone = Planner(limits(), cost).plan(batch(geometric(0.6)))
    beside = Planner(limits(), cost).plan(
        batch(geometric(0.6), kind=StepKind.MIXED, rows=16 + 2048, sampling=16)
    )
    assert alone.draft_rows == beside.draft_rows == 16


def test_rows_of_a_mixed_step_are_priced_on_its_own_curve() -> None:
    """Alone a row is dear; beside a prefill there is room in the graph up to its edge."""
    ladder = [*range(1, 129), 320]
    alone = cost_model(lambda rows: 4.0 * rows, ladder, kinds=("full",)).surface
    mixed = [
        {"kind": "mixed", "rows": rows, "requests": 1, "context": 0, "ms": 700.0}
        for rows in (128, 320)
    ]
    surface = Surface.model_validate(
        {
            "key": alone.key.model_copy(update={"mixed_ladder": (128, 320)}),
            "target": [*alone.target, *mixed],
        }
    )
    step = batch(geometric(0.6), kind=StepKind.MIXED, rows=16 + 250, sampling=16)
    planner = Planner(limits(), CostModel(surface, 16, 4096))
    assert planner.plan(batch(geometric(0.6))).draft_rows == 0
    assert planner.plan(step).draft_rows == 320 - 266


def test_probes_cost_less_than_one_percent_of_the_time() -> None:
    cost = cost_model(lambda rows: 1.0 * rows, list(range(1, 129)), drafter=lambda m, d: 0.2 * m)
    planner = Planner(limits(probe_share=0.004, probe_requests=2), cost)
    drafted = np.zeros(16, dtype=int)
    total = 0.0
    reasons = []
    for _ in range(5000):
        plan = planner.plan(batch(geometric(0.3), drafted=drafted))
        drafted = np.where(plan.draft_next, K, 0)
        total += plan.expected_ms or 0.0
        reasons.append(plan.reason)
    assert total < 5000 * 16.0 * 1.01
    assert reasons.count(Reason.PROBE) > 5
    assert reasons.count(Reason.EXPLORE) > 5


def test_drafting_comes_back_when_it_pays_again() -> None:
    cost = cost_model(lambda rows: 8.0 + 0.3 * rows, list(range(1, 129)), drafter=lambda m, d: 0.5)
    planner = Planner(limits(), cost)
    hard = planner.plan(batch(geometric(0.05), drafted=np.zeros(16, dtype=int)))
    easy = planner.plan(batch(geometric(0.9), drafted=np.zeros(16, dtype=int)))
    assert not hard.draft_next.any()
    assert easy.draft_next.all()


def test_case_55_ranks_that_decide_differently_are_told_apart() -> None:
    plan = Planner(limits(), None).plan(batch(geometric(0.5, 2)))
    other = replace(plan, draft_rows=plan.draft_rows - 1, rows=plan.rows - 1)
    swapped = replace(plan, draft_next=np.array([True, False]))
    assert len({plan.digest(), other.digest(), swapped.digest()}) == 3


SURVIVALS = npst.arrays(np.float64, (5, K), elements=st.floats(0, 1)).map(
    lambda c: prefix_products(to_grid(c))
)
LADDERS = st.lists(st.integers(1, 40), min_size=1, max_size=8, unique=True).map(
    lambda sizes: [*sorted(sizes), 48]
)


def stairs(ladder: list[int], seed: int) -> Any:
    rising = np.random.default_rng(seed).uniform(0.0, 2.0, len(ladder)).cumsum() + 1.0
    return dict(zip(ladder, rising, strict=False)).__getitem__


@settings(deadline=None)
@given(SURVIVALS, LADDERS, st.integers(0, 999), st.lists(st.integers(0, K), min_size=5, max_size=5))
def test_two_ranks_decide_the_same(
    survival: np.ndarray, ladder: list[int], seed: int, drafted: list[int]
) -> None:
    ladder = sorted(set(ladder))
    ranks = [
        Planner(
            limits(5, probe_share=0.01),
            cost_model(stairs(ladder, seed), ladder, 5, drafter=lambda m, d: 0.1 * m),
        )
        for _ in range(2)
    ]
    for shift in range(4):
        step = batch(np.roll(survival, shift, axis=0), drafted=np.array(drafted))
        one, two = (rank.plan(step) for rank in ranks)
        assert same(one, two)
        assert 0 <= one.draft_rows <= sum(drafted)


@settings(deadline=None)
@given(SURVIVALS, LADDERS, st.integers(0, 999), st.permutations(range(5)))
def test_the_total_does_not_depend_on_the_order_of_the_batch(
    survival: np.ndarray, ladder: list[int], seed: int, order: list[int]
) -> None:
    ladder = sorted(set(ladder))
    plans = [
        Planner(limits(5), cost_model(stairs(ladder, seed), ladder, 5)).plan(batch(s))
        for s in (survival, survival[order])
    ]
    assert plans[0].draft_rows == plans[1].draft_rows


@settings(deadline=None)
@given(SURVIVALS, LADDERS, st.integers(0, 999))
def test_the_plan_is_the_brute_force_optimum(
    survival: np.ndarray, ladder: list[int], seed: int
) -> None:
    ladder = sorted(set(ladder))
    price = stairs(ladder, seed)
    plan = Planner(limits(5), cost_model(price, ladder, 5)).plan(batch(survival))
    best = np.sort(survival, axis=None)[::-1].astype(np.int64)
    rates = []
    for n in range(best.size + 1):
        rows = next(size for size in ladder if size >= 5 + n)
        rates.append((5 * ONE + best[:n].sum()) / np.rint(price(rows) * 1e6))
    chosen = rates[plan.draft_rows]
    assert chosen == pytest.approx(max(rates), rel=1e-12)


COUNTS = st.integers(1, 30)


@given(
    npst.arrays(np.int64, COUNTS, elements=st.integers(0, ONE)),
    st.integers(2, 9),
    st.integers(1, 9),
    st.data(),
)
def test_more_confidence_for_all_never_lowers_the_budget(
    rows: np.ndarray, factor: int, requests: int, data: st.DataObject
) -> None:
    gain = np.concatenate([[0], np.sort(rows)[::-1].cumsum()]).astype(np.float64)
    rises = data.draw(npst.arrays(np.int64, gain.size, elements=st.integers(0, 10**6)))
    cost = (1000 + rises.cumsum()).astype(np.float64)
    assert planner.best_count(requests * ONE + factor * gain, cost) >= planner.best_count(
        requests * ONE + gain, cost
    )


@given(npst.arrays(np.int64, COUNTS, elements=st.integers(0, ONE)), st.integers(1, 9), st.data())
def test_dearer_rows_never_raise_the_budget(
    rows: np.ndarray, requests: int, data: st.DataObject
) -> None:
    """Each size dearer by a factor that does not fall with n: more rows never become better."""
    gain = np.concatenate([[0], np.sort(rows)[::-1].cumsum()]).astype(np.float64)
    tokens = requests * ONE + gain
    cost = data.draw(npst.arrays(np.int64, gain.size, elements=st.integers(1, 10**6))).astype(float)
    factor = 1 + data.draw(npst.arrays(np.int64, gain.size, elements=st.integers(0, 5))).cumsum()
    assert planner.best_count(tokens, cost * factor) <= planner.best_count(tokens, cost)
