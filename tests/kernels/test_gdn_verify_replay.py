"""The replay layout against a float64 recurrence, over schedules of many ragged steps."""

from __future__ import annotations

import gdn_schedule as schedule
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gdn_verify import replay, replay_cursor, replay_naive
from kernels.gdn_verify.layout import ReplayLayout, StepCursor
from kernels.gdn_verify.replay import ReplayConfig

REQUESTS = 3
SMALL = ReplayConfig(heads=2, block_v=16, fold_v=16, fold_k=16)
DTYPES = [torch.bfloat16, torch.float32]
# The kernel rounds where a float64 run does not; a wrong row or decay shows at 1e-1.
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 2e-5}


@st.composite
def steps(draw: st.DrawFn, max_rows: int) -> list[schedule.Step]:
    """Any mix of 0..max_rows rows; requests leave the batch and return, padding in between."""
    result = []
    for _ in range(draw(st.integers(3, 8))):
        rows = tuple(draw(st.integers(0, max_rows)) for _ in range(REQUESTS))
        accepted = tuple(draw(st.integers(1, max(n, 1))) for n in rows)
        entries: list[int | None] = list(range(REQUESTS))
        present = [r for r in entries if draw(st.integers(0, 4))]  # one in five is preempted
        order = draw(st.permutations(present + [None] * draw(st.integers(0, 2))))
        forced = tuple(r for r in range(REQUESTS) if draw(st.integers(0, 3)) == 0)
        if order:
            result.append(schedule.Step(rows, accepted, tuple(order), forced))
    return result


def check(errors: schedule.Errors, dtype: torch.dtype) -> None:
    """Small, and no larger than a kernel's that stores its state every step."""
    assert errors.out < LIMITS[dtype], errors
    assert errors.state < LIMITS[dtype], errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 4), (2, 2), (1, 4)])
@settings(max_examples=6, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_schedules_match_float64(
    data: st.DataObject,
    seed: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    layout = ReplayLayout(*heads, 32, 32, 16, dtype)
    setting = schedule.Setting(layout, max_rows=8, seed=seed, config=SMALL)
    check(schedule.run(setting, REQUESTS, data.draw(steps(8)), device), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=4, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_sixteen_rows(
    data: st.DataObject, seed: int, dtype: torch.dtype, device: torch.device
) -> None:
    layout = ReplayLayout(1, 2, 32, 32, 48, dtype)
    setting = schedule.Setting(layout, max_rows=16, seed=seed, config=SMALL)
    check(schedule.run(setting, REQUESTS, data.draw(steps(16)), device), dtype)


def long_run(rows: int, accepted: int, count: int) -> list[schedule.Step]:
    """The same step many times: the ring wraps and flushes come from the cursor alone."""
    whole = tuple(range(REQUESTS))
    return [schedule.Step((rows,) * REQUESTS, (accepted,) * REQUESTS, whole)] * count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "accepted"), [(8, 1), (8, 8), (1, 1), (5, 3)])
def test_ring_wraps(rows: int, accepted: int, dtype: torch.dtype, device: torch.device) -> None:
    layout = ReplayLayout(1, 2, 32, 32, 16, dtype)
    setting = schedule.Setting(layout, seed=rows, config=SMALL)
    errors = schedule.run(setting, REQUESTS, long_run(rows, accepted, 12), device)
    check(errors, dtype)
    assert errors.flushes >= 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_model_shape_is_no_worse_than_a_stored_state(
    dtype: torch.dtype, device: torch.device
) -> None:
    layout = ReplayLayout(2, 4, 128, 128, 32, dtype)
    setting = schedule.Setting(layout, seed=3)
    mixed = schedule.Step((8, 1, 3), (5, 1, 2), (2, None, 0, 1))
    errors = schedule.run(setting, REQUESTS, [mixed] * 6, device)
    # Both sum some hundred fp32 products, in different orders: the worst of thousands of outputs
    # may differ by a unit in the last place of the largest.
    order = torch.finfo(torch.float32).eps
    assert errors.out <= errors.native_out + order, errors
    assert errors.state <= errors.native_state + order, errors


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_keys(dtype: torch.dtype, device: torch.device) -> None:
    """Nearly equal keys with gates near 1: the small system is at its worst."""
    layout = ReplayLayout(1, 2, 64, 32, 48, dtype)
    setting = schedule.Setting(layout, 16, seed=4, similar=0.95, config=SMALL)
    errors = schedule.run(setting, REQUESTS, long_run(16, 9, 6), device)
    # The native kernel of CUDA has no small system to solve: a unit in the last place, as above.
    assert errors.out <= 2 * errors.native_out + torch.finfo(torch.float32).eps, errors


class Case:
    """Three requests on a ring that wraps: 7 rows, 1 row and none."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        """Finite random content everywhere, appended rows included."""
        random = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
        layout = ReplayLayout(2, 4, 32, 32, 24, dtype)
        self.cache = layout.allocate(5, device)
        for tensor in self.cache.tensors():
            tensor.copy_(normal(*tensor.shape) * 0.3)
        self.cache.log_decay.copy_(-normal(*self.cache.log_decay.shape).abs())
        self.cache.key_norm.copy_(1.0 / self.cache.keys.float().norm(dim=-1))
        integer = lambda x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
        self.query_start_loc, self.slots = integer([0, 7, 8, 8]), integer([2, 4, 1])
        self.start, self.pending = integer([20, 3, 0]), integer([16, 5, 7])
        self.rows = [x.bfloat16().to(device) for x in (
            normal(8, 2, 32), normal(8, 2, 32), normal(8, 4, 32), normal(8, 4), normal(8, 4)
        )]  # fmt: skip
        self.head = [normal(4).to(device), normal(4).to(device)]

    def run(self, flush: int, config: ReplayConfig = SMALL) -> tuple[torch.Tensor, object]:
        """(outputs, cache afterwards); the case itself is left as it was."""
        cache = schedule.cache_copy(self.cache)
        step = StepCursor(self.start, self.pending, torch.full_like(self.start, flush))
        out = torch.zeros(8, 4, 32, device=self.start.device)
        replay.replay_verify(
            *self.rows, *self.head, self.query_start_loc, self.slots, step, cache, out,
            config=config,
        )  # fmt: skip
        return out, cache


@pytest.mark.parametrize("dtype", DTYPES)
def test_flush_changes_nothing_but_the_state(dtype: torch.dtype, device: torch.device) -> None:
    case = Case(dtype, device)
    kept, kept_cache = case.run(flush=0)
    flushed, flushed_cache = case.run(flush=1)
    assert torch.equal(kept, flushed)
    for one, other in zip(kept_cache.tensors()[1:], flushed_cache.tensors()[1:], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(kept_cache.state, case.cache.state)
    assert torch.equal(flushed_cache.state[[0, 1, 3]], case.cache.state[[0, 1, 3]])
    assert not torch.equal(flushed_cache.state[[2, 4]], case.cache.state[[2, 4]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_matches_the_oracle(dtype: torch.dtype, device: torch.device) -> None:
    """Appended rows, places and folded states, tensor by tensor; all else is untouched."""
    case = Case(dtype, device)
    _, cache = case.run(flush=1)
    expected = schedule.cache_copy(case.cache)
    replay_naive.replay_verify(
        *case.rows, *case.head, case.query_start_loc, case.slots,
        StepCursor(case.start, case.pending, torch.ones_like(case.start)), expected,
    )  # fmt: skip
    assert torch.equal(cache.keys, expected.keys)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for got, reference in zip(cache.tensors(), expected.tensors(), strict=True):
        torch.testing.assert_close(got.double(), reference.double(), rtol=tolerance, atol=tolerance)


def test_runs_are_deterministic(device: torch.device) -> None:
    case = Case(torch.bfloat16, device)
    (first, first_cache), (second, second_cache) = case.run(1), case.run(1)
    assert torch.equal(first, second)
    for one, other in zip(first_cache.tensors(), second_cache.tensors(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_equals_its_requests_one_by_one(dtype: torch.dtype, device: torch.device) -> None:
    case = Case(dtype, device)
    together, together_cache = case.run(flush=1)
    alone = torch.zeros_like(together)
    cache = schedule.cache_copy(case.cache)
    for entry in range(3):
        first, last = case.query_start_loc[entry : entry + 2].tolist()
        step = StepCursor(*(
            x[entry : entry + 1] for x in (case.start, case.pending, torch.ones_like(case.start))
        ))  # fmt: skip
        alone[first:last] = replay.replay_verify(
            *(x[first:last] for x in case.rows), *case.head,
            case.query_start_loc[entry : entry + 2] - first, case.slots[entry : entry + 1], step,
            cache, alone[first:last].clone(), config=SMALL,
        )  # fmt: skip
    assert torch.equal(together, alone)
    for one, other in zip(together_cache.tensors(), cache.tensors(), strict=True):
        assert torch.equal(one, other)


def test_zero_keys_and_queries_stay_finite(device: torch.device) -> None:
    case = Case(torch.bfloat16, device)
    case.rows[0][3] = 0
    case.rows[1][3] = 0
    out, cache = case.run(flush=1)
    assert bool(out.isfinite().all()) and bool((out[3] == 0).all())
    assert bool(cache.updates[2].isfinite().all())


def test_updates_beyond_half_precision_saturate(device: torch.device) -> None:
    """An infinite u would turn the next outputs into NaN: inf - inf in the split product."""
    case = Case(torch.bfloat16, device)
    case.rows[2] *= 1e6
    _, cache = case.run(flush=0)
    assert bool(cache.updates.isfinite().all())
    assert float(cache.updates.abs().max()) == 65504.0


def test_cursor_follows_acceptance_and_flushes_in_time(device: torch.device) -> None:
    integer = lambda x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    cursor = replay_cursor.Cursor.allocate(6, ring_rows=24, max_rows=8, device=device)
    slots, starts = integer([3, 0, 5]), integer([0, 8, 9, 9])
    step = StepCursor(*(integer([7, 7, 7]) for _ in range(3)))
    pending = 0
    # 8 pending rows and two steps of 8 fill the ring of 24 exactly; 9 do not fit.
    for accepted, flushed in ((5, 0), (3, 0), (0, 0), (1, 0), (8, 1), (8, 0)):
        replay_cursor.stage(cursor, slots, starts, step)
        assert step.pending.tolist() == [pending, 0, 0]
        assert step.flush.tolist() == [flushed, 0, 0]
        replay_cursor.advance(cursor, slots, starts, step, integer([accepted, 4, 4]))
        pending = (0 if flushed else pending) + accepted
        assert cursor.pending.tolist() == [0, 0, 0, pending, 0, 0]
    assert cursor.start.tolist() == [0, 0, 0, 9, 0, 0]
    cursor.reset(integer([3]).long())
    assert cursor.pending.tolist() == [0] * 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_rows": 17}, "max_rows must be 1 to 16"),
        ({"max_rows": 16}, "need a ring of 32"),
    ],
)
def test_refuses_what_it_does_not_take(
    arguments: dict[str, int], message: str, device: torch.device
) -> None:
    case = Case(torch.bfloat16, device)
    step = StepCursor(case.start, case.pending, case.start)
    call = lambda rows, cache: replay.replay_verify(  # noqa: E731
        *rows, *case.head, case.query_start_loc, case.slots, step, cache, **arguments
    )
    with pytest.raises(ValueError, match=message):
        call(case.rows, case.cache)
    arguments.clear()
    with pytest.raises(ValueError, match="q and k must be bfloat16"):
        call([x.float() for x in case.rows], case.cache)
    case.cache.updates = case.cache.updates.bfloat16()
    with pytest.raises(ValueError, match="updates must be contiguous"):
        call(case.rows, case.cache)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA graph")
def test_a_graph_at_an_upper_bound_replays_other_lengths(device: torch.device) -> None:
    """Captured once with every request full, replayed with ragged, empty and padding entries."""
    case = Case(torch.bfloat16, device)
    expected, expected_cache = case.run(flush=1)
    full = case.query_start_loc.clone()
    lengths, slots = case.query_start_loc.clone(), case.slots.clone()
    full.copy_(torch.tensor([0, 8, 8, 8], dtype=torch.int32))
    cache = schedule.cache_copy(case.cache)
    step = StepCursor(case.start, case.pending, torch.ones_like(case.start))
    out = torch.zeros(8, 4, 32, device=device)
    call = lambda: replay.replay_verify(  # noqa: E731
        *case.rows, *case.head, full, slots, step, cache, out, config=SMALL
    )
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for tensor, start in zip(cache.tensors(), case.cache.tensors(), strict=True):
        tensor.copy_(start)
    full.copy_(lengths)
    graph.replay()
    assert torch.equal(out, expected)
    for one, other in zip(cache.tensors(), expected_cache.tensors(), strict=True):
        assert torch.equal(one, other)
