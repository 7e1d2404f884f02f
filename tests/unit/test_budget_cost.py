"""Prices: staircase, cliff, context, LM head, drafter, corrections that outliers cannot bend."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ascend_spec.budget.cost import UNPRICED, CostModel
from vllm_ascend_spec.budget.planner import Limits, Planner, StepBatch
from vllm_ascend_spec.budget.residual import WINDOW, Residuals
from vllm_ascend_spec.budget.surface import StepKind, Surface, SurfaceKey
from vllm_ascend_spec.budget.survival import prefix_products, to_grid

FULL, MIXED, EAGER = StepKind.FULL, StepKind.MIXED, StepKind.EAGER


def model(
    points: list[tuple[str, int, int, int, float]],
    *,
    full: list[int] | None = None,
    mixed: list[int] | None = None,
    drafter: list[int] | None = None,
    max_requests: int = 64,
    max_rows: int = 1024,
    drafter_points: list[dict[str, object]] | None = None,
    **parts: object,
) -> CostModel:
    key = SurfaceKey(
        model="m",
        dtype="d",
        device="x",
        engine="e",
        method="dspark",
        draft_tokens=7,
        full_ladder=full or [],
        mixed_ladder=mixed or [],
        drafter_ladder=drafter or [],
    )
    names = ("kind", "rows", "requests", "context", "ms")
    target = [dict(zip(names, point, strict=True)) for point in points]
    surface = Surface.model_validate(
        {"key": key, "target": target, "drafter": drafter_points or [], **parts}
    )
    return CostModel(surface, max_requests, max_rows)


def price(
    cost: CostModel, rows: int, requests: int = 1, context: float = 0, kind: StepKind = FULL
) -> float:
    return cost.verify(kind, rows, 0, 0, requests, context).item(0) / 1e6


def test_rows_are_free_up_to_the_edge_of_the_graph() -> None:
    cost = model([("full", 128, 16, 0, 8.0), ("full", 192, 16, 0, 10.0)], full=[128, 192])
    assert price(cost, 184) == price(cost, 160) == price(cost, 192) == 10.0
    assert price(cost, 128) == price(cost, 3) == 8.0


def test_an_uncaptured_size_is_priced_as_eager_and_not_across_the_cliff() -> None:
    points = [("full", 40, 6, 0, 5.0), ("eager", 32, 6, 0, 20.0), ("eager", 64, 6, 0, 24.0)]
    cost = model(points, full=[40])
    assert price(cost, 40) == 5.0
    assert price(cost, 42) == pytest.approx(21.25)
    assert price(cost, 128) == pytest.approx(32.0)  # the last eager slope goes on
    prices = cost.verify(FULL, 6, 0, 42 - 6, 6, 0) / 1e6
    assert prices[-2:].tolist() == [21.125, 21.25]
    assert (prices[:-2] == 5.0).all()


def test_without_an_eager_point_an_uncaptured_size_has_no_price() -> None:
    cost = model([("full", 8, 1, 0, 5.0)], full=[8])
    assert cost.verify(FULL, 9, 0, 0, 1, 0)[0] == UNPRICED


def test_a_captured_size_between_measured_ones_is_interpolated_on_the_ladder() -> None:
    cost = model([("full", 8, 1, 0, 4.0), ("full", 24, 1, 0, 8.0)], full=[8, 16, 24])
    assert price(cost, 9) == price(cost, 16) == 6.0


def test_context_and_requests_are_interpolated_and_context_goes_on() -> None:
    points = [("full", 8, r, c, 5.0 + r * c * 1e-3) for r in (1, 4) for c in (1000, 3000)]
    cost = model(points, full=[8])
    assert price(cost, 8, 1, 2000) == pytest.approx(7.0)
    assert price(cost, 8, 2, 2000) == pytest.approx(9.0)
    assert price(cost, 8, 4, 9000) == pytest.approx(41.0)
    assert price(cost, 8, 4, 10) == price(cost, 8, 4, 1000)  # below the grid: its edge


def test_noise_cannot_make_a_long_context_cheap() -> None:
    cost = model([("full", 8, 1, 1000, 5.0), ("full", 8, 1, 2000, 4.9)], full=[8])
    assert price(cost, 8, 1, 100_000) == 4.9


def test_a_mixed_step_has_its_own_curve() -> None:
    cost = model([("full", 64, 8, 0, 5.0), ("mixed", 64, 8, 0, 9.0)], full=[64], mixed=[64])
    assert price(cost, 50, kind=FULL) == 5.0
    assert price(cost, 50, kind=MIXED) == 9.0


def test_head_and_rejection_rows_are_priced_unpadded() -> None:
    logits = [{"rows": 1, "ms": 1.0}, {"rows": 101, "ms": 2.0}]
    cost = model([("full", 128, 16, 0, 8.0)], full=[128], logits=logits)
    prices = cost.verify(FULL, 16, 16, 4, 16, 0) / 1e6
    np.testing.assert_allclose(np.diff(prices), 0.01, rtol=1e-6)
    assert prices[0] == pytest.approx(9.15)


def test_the_drafter_has_its_own_ladder_counted_in_requests() -> None:
    graphed = [{"requests": r, "depth": 7, "context": 0, "ms": 1 + r / 8} for r in (8, 16)]
    eager = [
        {"kind": "eager", "requests": r, "depth": 7, "context": 0, "ms": 5 + r / 8} for r in (8, 64)
    ]
    cost = model(
        [("full", 128, 16, 0, 8.0)],
        full=[128],
        drafter=[56, 112],  # 7 rows a request: graphs of 8 and of 16 requests
        drafter_rows=7,
        drafter_points=graphed + eager,
    )
    prices = cost.drafter.prices(7, 0) / 1e6
    assert prices[[0, 1, 8, 9, 16]].tolist() == [0.0, 2.0, 2.0, 3.0, 3.0]
    assert prices[[17, 64]].tolist() == [7.125, 13.0]


def test_a_shallow_draft_is_priced_at_the_next_measured_depth() -> None:
    points = [{"requests": 1, "depth": d, "context": 0, "ms": float(d)} for d in (1, 3, 7)]
    cost = model([("full", 8, 1, 0, 8.0)], full=[8], drafter_points=points)
    assert cost.drafter.depths == (1, 3, 7)
    assert [cost.drafter.prices(d, 0).item(1) / 1e6 for d in (1, 2, 3, 5, 7)] == [1, 3, 3, 7, 7]


def test_a_lookup_method_costs_nothing() -> None:
    cost = model([("full", 8, 1, 0, 8.0)], full=[8])
    assert not cost.drafter.prices(7, 1000).any()


def test_host_time_is_added_and_is_a_floor() -> None:
    cost = model([("full", 8, 1, 0, 2.0)], full=[8], host={"ms": 0.5, "floor_ms": 3.0})
    device = cost.verify(FULL, 1, 0, 0, 1, 0)
    assert cost.step(device, 0.0).item(0) / 1e6 == 3.5
    assert cost.step(device, 2e6).item(0) / 1e6 == 4.5


def test_rows_beyond_the_engine_are_refused() -> None:
    with pytest.raises(ValueError, match="1025 rows"):
        model([("full", 8, 1, 0, 2.0)], full=[8]).verify(FULL, 1000, 0, 25, 1, 0)


def test_one_outlier_of_twenty_times_changes_no_price() -> None:
    cost = model([("full", 32, 16, 0, 8.0), ("full", 64, 16, 0, 9.0)], full=[32, 64])
    before = cost.verify(FULL, 16, 0, 48, 16, 0)
    cost.observe(FULL, 32, 0, 16, 0, 160e6)
    assert cost.verify(FULL, 16, 0, 48, 16, 0).tolist() == before.tolist()


def test_a_lasting_change_moves_its_own_bucket_only() -> None:
    cost = model([("full", 32, 16, 0, 8.0), ("full", 64, 16, 0, 9.0)], full=[32, 64])
    for _ in range(WINDOW // 2 + 1):
        cost.observe(FULL, 30, 0, 16, 0, 12e6)
    assert price(cost, 17, 16) == pytest.approx(12.0, rel=1e-5)
    assert price(cost, 33, 16) == 9.0
    assert price(cost, 17, 16, context=4096) == 8.0  # learnt at another context


def test_a_bucket_that_is_not_visited_is_forgiven() -> None:
    residuals = Residuals(3, half_life=100)
    for _ in range(WINDOW):
        residuals.observe(0, 1, 1.0, 20.0)
    assert residuals.factors(0)[1] == pytest.approx(20.0)
    for _ in range(100):
        residuals.observe(0, 0, 1.0, 1.0)
    assert residuals.factors(0)[1] == pytest.approx(20.0**0.5, rel=0.2)
    for _ in range(1000):
        residuals.observe(0, 0, 1.0, 1.0)
    assert residuals.factors(0)[1] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("real", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_clock_that_lies_is_ignored(real: float) -> None:
    residuals = Residuals(1)
    for _ in range(WINDOW):
        residuals.observe(0, 0, 1.0, real)
    assert residuals.factors(0).tolist() == [1.0]


def test_other_ranks_take_over_the_corrections_exactly() -> None:
    points = [("full", 32, 16, 0, 8.0), ("full", 64, 16, 0, 9.0)]
    first, second = model(points, full=[32, 64]), model(points, full=[32, 64])
    for _ in range(WINDOW):
        first.observe(FULL, 64, 0, 16, 0, 9.87654321e6)
    second.take_corrections(first.corrections())
    one, two = (m.verify(FULL, 16, 0, 48, 16, 0).tolist() for m in (first, second))
    assert one == two
    assert one[-1] != 9e6


def test_rounds_teach_what_drafting_and_not_drafting_take() -> None:
    points = [{"requests": m, "depth": 7, "context": 512, "ms": float(m)} for m in (1, 8, 16)]
    cost = model([("full", 16, 16, 512, 8.0)], full=[16], drafter_points=points)
    drafter = cost.drafter
    assert drafter.idle_ns == 0 and drafter.prices(7, 512.0).item(8) == 8e6
    for real in (1e6, 9e9, 1.2e6, 1e6, 1.1e6):
        drafter.observe(0, False, 7, 512.0, real)
    assert drafter.idle_ns == 1.1e6  # the median: one outlier moves nothing
    for _ in range(4):
        drafter.observe(8, True, 7, 512.0, 12e6)
    assert drafter.prices(7, 512.0).item(8) == pytest.approx(12e6)
    assert drafter.prices(7, 512.0).item(1) == 1e6  # another octave keeps its price
    for _ in range(4):
        drafter.observe(1, False, 7, 512.0, 3.1e6)
    assert drafter.prices(7, 512.0).item(1) == pytest.approx(2e6)  # the idle part is not drafting


def test_a_price_that_was_asked_for_before_follows_the_corrections() -> None:
    points = [{"requests": m, "depth": 7, "context": 512, "ms": float(m)} for m in (1, 8, 16)]
    asked, unasked = (
        model([("full", 16, 16, 512, 8.0)], full=[16], drafter_points=points).drafter
        for _ in range(2)
    )
    random = np.random.default_rng(0)
    for context in random.choice([300.0, 512.0, 700.0], 60):
        asked.prices(7, context)
        count, real = int(random.integers(1, 17)), float(random.uniform(1e6, 30e6))
        for drafter in (asked, unasked):
            drafter.observe(count, True, 7, context, real)
    after = [
        [drafter.prices(7, c).tolist() for c in (300, 512, 700)] for drafter in (asked, unasked)
    ]
    assert after[0] == after[1]
    asked.residuals.restore(np.full_like(asked.residuals.export(), 2_000_000))
    assert asked.prices(7, 700).item(8) == 16e6


def test_a_round_without_drafts_is_not_free() -> None:
    """Its cache upkeep is paid either way, so a drafter that seemed too dear may be worth it."""
    target = [("full", rows, 1, 0, 0.6 * rows) for rows in range(1, 129)]
    points = [{"requests": m, "depth": 7, "context": 0, "ms": 9.0} for m in (1, 16)]
    cost = model(target, full=list(range(1, 129)), drafter_points=points)
    quiet = {"probe_share": 0.0, "probe_credit_ms": 0.0, "drafts_subset": False}
    planner = Planner(Limits(7, 16, 128, **quiet), cost)
    survival = np.repeat(prefix_products(to_grid(np.full((1, 7), 0.97))), 16, axis=0)
    nothing, everyone = np.zeros(16, dtype=int), np.ones(16, dtype=bool)
    step = StepBatch(StepKind.FULL, survival, survival, nothing, everyone, 16, 16, 1000.0)
    assert not planner.plan(step).draft_next.any()
    for _ in range(3):
        cost.drafter.observe(0, False, 7, 1000.0, 9e6)
    assert planner.plan(step).draft_next.all()
