"""Which dummy steps measure the cost surface, and what is made of their times."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.surface import StepKind, SurfaceKey
from vllm_ascend_spec.engine import profiling
from vllm_ascend_spec.engine.profiling import Probe
from vllm_ascend_spec.errors import UserError

LADDER = [1, 2, 4, 8, 16, 24, 32]
KEY = SurfaceKey(
    model="m",
    dtype="bfloat16",
    device="d",
    engine="e",
    method="dspark",
    draft_tokens=7,
    full_ladder=tuple(LADDER),
    mixed_ladder=(),
    drafter_ladder=(),
)


def test_graphs_are_timed_with_many_and_with_few_requests():
    found = list(profiling.probes(LADDER, 7, 16, 64, 2048))
    graphed = {(p.rows, p.requests) for p in found if p.rows <= 32}
    alone = {(rows, rows) for rows in LADDER if rows < 16}
    assert graphed == alone | {
        (16, 16), (16, 8), (16, 4), (16, 2),
        (24, 16), (24, 12), (24, 6), (24, 3),
        (32, 16), (32, 8), (32, 4),
    }  # fmt: skip
    assert {(p.rows, p.requests) for p in found if p.rows > 32} == {
        (48, 16), (48, 6), (64, 16), (64, 8),
    }  # fmt: skip
    assert {p.context for p in found} == {512, 2040}
    for context in (512, 2040):
        turns = [p.warmup for p in found if p.rows == 8 and p.context == context]
        assert turns == [True] * profiling.WARMUPS + [False] * profiling.REPLAYS


def test_rows_of_a_dummy_step_go_to_the_first_requests():
    starts = torch.arange(17, dtype=torch.int32) * 2
    profiling.concentrate(starts, 32, 5)
    assert starts[:7].tolist() == [0, 6, 12, 19, 25, 32, 32]
    assert (starts[6:] == 32).all() and int(starts.diff().max()) <= 8


def test_a_long_ladder_is_thinned_and_keeps_its_ends():
    ladder = list(range(1, 513))
    kept = profiling.thin(ladder)
    assert len(kept) <= profiling.MAX_SIZES
    assert (kept[0], kept[-1]) == (1, 512)
    assert kept == sorted(set(kept))


def test_uniform_steps_ask_the_runner_for_them():
    assert Probe(64, 8, 512, False, captured=8).arguments(7)["uniform_decode"]
    assert not Probe(64, 16, 512, False, captured=16).arguments(7)["uniform_decode"]
    assert not Probe(64, 8, 512, False, captured=16).arguments(7)["uniform_decode"]


def samples(found: list[Probe]) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            num_target_tokens=p.rows,
            num_reqs=p.captured,
            full_cudagraph=p.rows <= 32,
            forward_ms=99.0 if p.warmup else 1.0 + p.rows / 100 + (p.captured - p.requests) / -400,
            drafter_ms=0.25,
        )
        for p in found
    ]


def test_the_surface_prices_what_was_timed_and_leaves_warm_ups_out():
    found = list(profiling.probes(LADDER, 7, 16, 64, 2048))
    surface = profiling.build_surface(KEY, list(zip(found, samples(found), strict=True)), [], {})
    cost = CostModel(surface, 16, 64)
    prices = cost.verify(StepKind.FULL, 4, 4, 28, 4, 512.0) / 1e6
    assert prices[0] == pytest.approx(1.04)
    assert prices[1] == prices[4] == pytest.approx(1.08)  # padded to 8 rows
    assert prices[28] == pytest.approx(1.32 - 12 / 400)  # four requests instead of sixteen
    few, many = (cost.verify(StepKind.FULL, 32, 32, 0, n, 512.0)[0] / 1e6 for n in (4, 16))
    assert many - few == pytest.approx(12 / 400)
    assert cost.drafter.prices(7, 512.0)[4] == pytest.approx(0.25e6)


def test_shorter_drafts_have_prices_of_their_own():
    found = list(profiling.probes(LADDER, 7, 16, 64, 2048, lengths=(1, 3)))
    timed = samples(found)
    for probe, sample in zip(found, timed, strict=True):
        sample.drafter_ms = 0.1 * (probe.length or 7)
        if probe.length:
            sample.forward_ms = 1e3  # not looked at
    surface = profiling.build_surface(KEY, list(zip(found, timed, strict=True)), [], {})
    cost = CostModel(surface, 16, 64)
    assert cost.drafter.depths == (1, 3, 7)
    for length in (1, 3, 7):
        assert cost.drafter.prices(length, 512.0)[4] == pytest.approx(0.1e6 * length)
    assert cost.verify(StepKind.FULL, 16, 16, 0, 16, 512.0)[0] < 1e7


def test_a_missing_sample_is_refused():
    found = list(profiling.probes(LADDER, 7, 16, 64, 2048))
    runner = SimpleNamespace(max_num_tokens=64, device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"measured 1 of .*cost_surface"):
        profiling.measured_surface(runner, LADDER, found, samples(found)[:1])


def test_every_dummy_row_gets_a_state_of_its_own():
    tables = [torch.zeros(4, 9, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int32)]
    profiling.spread_states(tables, 8, 100)
    assert tables[0][:, :8].flatten().unique().numel() == 32
    assert int(tables[0].min()) == 0 and (tables[0][:, 8] == 0).all()
    profiling.spread_states(tables, 8, 5)
    assert set(tables[0][:, :8].flatten().tolist()) == {1, 2, 3, 4}
