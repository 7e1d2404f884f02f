"""The CUDA kernel of the replay layout against float64: on a GPU, or emulated on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import gdn_schedule as schedule
import pytest
import torch
from gdn_upper_bound import UpperBound, compare
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gdn_verify import cuda
from kernels.gdn_verify.layout import ReplayLayout, StepCursor
from tests.kernels.emulation import HAS_CXX, built, emulated

REQUESTS, DIM = 3, 128
DTYPES = [torch.bfloat16, torch.float32]
ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not (ON_GPU or HAS_CXX), reason="the emulation is built with g++")
# Outputs are bf16; a wrong row or decay shows at 1e-1.
OUT_LIMIT = 1e-2
STATE_LIMITS = {torch.bfloat16: 1e-2, torch.float32: 2e-5}


@cache
def library() -> cuda.Library:
    return cuda.Library(built("gdn_verify") if ON_GPU else emulated("gdn_verify"))


def kernel(variant: cuda.Variant) -> Callable[..., torch.Tensor]:
    def run(*arguments: Any) -> torch.Tensor:
        return cuda.replay_verify(*arguments, DIM**-0.5, library(), variant)

    return run


def of_dtype(dtype: torch.dtype) -> list[cuda.Variant]:
    return [v for v in library().variants if v.state_dtype == dtype]


@st.composite
def steps(draw: st.DrawFn) -> list[schedule.Step]:
    """Any mix of 0..8 rows, padding in between, forced flushes."""
    result = []
    for _ in range(draw(st.integers(2, 4))):
        rows = tuple(draw(st.integers(0, 8)) for _ in range(REQUESTS))
        accepted = tuple(draw(st.integers(1, max(n, 1))) for n in rows)
        order = draw(st.permutations([*range(REQUESTS), *[None] * draw(st.integers(0, 2))]))
        forced = tuple(r for r in range(REQUESTS) if draw(st.booleans()))
        result.append(schedule.Step(rows, accepted, tuple(order), forced))
    return result


def setting(
    variant: cuda.Variant, heads: tuple[int, int], ring: int, seed: int
) -> schedule.Setting:
    layout = ReplayLayout(*heads, DIM, DIM, ring, variant.state_dtype)
    return schedule.Setting(
        layout, seed=seed, out_dtype=torch.bfloat16, kernel=kernel(variant),
        config=schedule.replay.ReplayConfig(heads=1, block_v=64),
    )  # fmt: skip


def check(errors: schedule.Errors, dtype: torch.dtype) -> None:
    assert errors.out < OUT_LIMIT, errors
    assert errors.state < STATE_LIMITS[dtype], errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 2), (2, 2), (1, 3), (1, 4)])
@settings(max_examples=3, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_schedules_match_float64(
    data: st.DataObject,
    seed: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    variant = data.draw(st.sampled_from(of_dtype(dtype)))
    run = setting(variant, heads, data.draw(st.sampled_from([16, 24, 32])), seed)
    check(schedule.run(run, REQUESTS, data.draw(steps()), device), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_launch_cut_on_a_ring_that_wraps(dtype: torch.dtype, device: torch.device) -> None:
    """Mixed rows, a padding entry, up to 24 pending rows, flushes by the cursor alone."""
    mixed = schedule.Step((8, 1, 6), (6, 1, 6), (2, None, 0, 1))
    for variant in of_dtype(dtype):
        errors = schedule.run(setting(variant, (1, 2), 32, 3), REQUESTS, [mixed] * 6, device)
        check(errors, dtype)
        assert errors.flushes > 0, variant
        assert errors.out <= errors.native_out * (1 + 2**-7), (variant, errors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_launch_cuts_agree(dtype: torch.dtype, device: torch.device) -> None:
    """The arithmetic is the same whatever brings the state: results are equal bit for bit."""
    mixed = schedule.Step((8, 1, 6), (6, 1, 6), (2, None, 0, 1))
    runs = []
    for variant in of_dtype(dtype):
        state = schedule.Run(setting(variant, (1, 2), 32, 5), REQUESTS, device)
        for _ in range(3):
            state.step(mixed)
        runs.append((state.errors.outputs, state.cache.updates.nan_to_num(5.0)))
    for outputs, updates in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(outputs, runs[0][0], strict=True))
        assert torch.equal(updates, runs[0][1])


@pytest.mark.parametrize("ring", [16, 24, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ring_sizes(dtype: torch.dtype, ring: int, device: torch.device) -> None:
    """Full and single rows in turn: every ring wraps, and is flushed when it is full."""
    full = schedule.Step((8, 8, 8), (8, 3, 5), (0, 1, 2))
    single = schedule.Step((1, 1, 1), (1, 1, 1), (2, 1, 0))
    for variant in of_dtype(dtype):
        run = setting(variant, (1, 2), ring, 11)
        errors = schedule.run(run, REQUESTS, [full, single, single, full] * 2, device)
        check(errors, dtype)
        assert errors.flushes > 0


LENGTHS, SLOTS = [3, 0, 8, 1], [2, 4, 1, 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_behind_the_batch_touch_nothing(dtype: torch.dtype, device: torch.device) -> None:
    """40 entries of which 4 are real: as a batch of 4."""
    for variant in of_dtype(dtype):
        runs = []
        for entries in (40, 4):
            step = UpperBound(dtype, 40, device)
            step.fill(LENGTHS, SLOTS)
            step.query_start_loc = step.query_start_loc[: entries + 1]
            step.slots = step.slots[:entries]
            step.run(kernel(variant))
            runs.append(step.found())
        compare(*runs)
        assert bool((runs[0][-1][:12] != schedule.POISON).all()), variant
        assert bool((runs[0][-1][12:] == schedule.POISON).all()), variant


@pytest.mark.parametrize("dtype", DTYPES)
def test_requests_without_rows_in_between_change_nothing(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Seven requests spread over 75, more than two loads of a warp, as a batch of seven."""
    places, lengths, slots = (
        [0, 1, 31, 32, 33, 64, 74],
        [3, 1, 8, 2, 8, 1, 5],
        [2, 4, 1, 3, 6, 7, 5],
    )
    spread_lengths, spread_slots = [0] * 75, [0] * 75
    for place, length, slot in zip(places, lengths, slots, strict=True):
        spread_lengths[place], spread_slots[place] = length, slot
    spread_slots[2], spread_slots[40] = 9, 9  # no rows, but a slot
    for variant in of_dtype(dtype):
        runs = []
        for batch in ((spread_lengths, spread_slots), (lengths, slots)):
            step = UpperBound(dtype, len(batch[0]), device, slots=10)
            step.fill(*batch)
            step.run(kernel(variant))
            runs.append(step.found())
        compare(*runs)
        assert bool((runs[1][-1][: sum(lengths)] != schedule.POISON).all()), variant


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_heads_give_what_the_first_cut_gives(dtype: torch.dtype, device: torch.device) -> None:
    """320 heads, of which 240 have rows: blocks that stay use stages and records many times."""
    found = []
    for variant in of_dtype(dtype):
        step = UpperBound(dtype, 80, device, slots=81)
        step.fill([8, 0, 3, 1] * 20, list(range(1, 81)))
        step.run(kernel(variant))
        found.append(step.found())
        compare(found[-1], found[0])


@pytest.fixture
def schedule_of_turns() -> Iterator[Callable[[int], None]]:
    """Sets the seed by which emulated warps run ahead and lag behind; a GPU has its own turns."""
    if ON_GPU:
        yield lambda seed: None
        return
    set_seed = ctypes.CDLL(str(library().path)).gdn_verify_schedule
    yield set_seed
    set_seed(0)


def found_of(variant: cuda.Variant, requests: int) -> list[torch.Tensor]:
    step = UpperBound(variant.state_dtype, requests, torch.device("cpu"), slots=requests + 1)
    step.fill([8] * requests, list(range(1, requests + 1)), pending=4)
    step.step.flush.zero_()
    step.run(kernel(variant))
    return step.found()


@pytest.mark.skipif(ON_GPU, reason="turns are given to emulated warps")
@pytest.mark.parametrize("requests", [31, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pipelines_rely_on_no_warps_speed(
    dtype: torch.dtype, requests: int, schedule_of_turns: Callable[[int], None]
) -> None:
    """62 and 40 full heads a block, as every order of turns gives them; a hang is an error."""
    pipelines = [v for v in of_dtype(dtype) if v.name.startswith("pipeline")]
    expected = found_of(of_dtype(dtype)[1], requests)
    for variant in pipelines:
        for seed in range(1, 6):
            schedule_of_turns(seed)
            compare(found_of(variant, requests), expected)
        schedule_of_turns(0)


@pytest.mark.parametrize("heads", [(1, 2), (1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_without_a_unit_end(
    dtype: torch.dtype,
    heads: tuple[int, int],
    schedule_of_turns: Callable[[int], None],
    device: torch.device,
) -> None:
    """One unit for two blocks, and none for either: nothing of a block waits for one to come."""
    steps = [schedule.Step((rows,), (max(rows, 1),), (0,)) for rows in (5, 0, 8)]
    for variant in of_dtype(dtype):
        for seed in range(2):
            schedule_of_turns(seed)
            check(schedule.run(setting(variant, heads, 16, 3), 1, steps, device), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_without_rows_touches_nothing(
    dtype: torch.dtype, schedule_of_turns: Callable[[int], None], device: torch.device
) -> None:
    for variant in of_dtype(dtype):
        for seed in range(2):
            schedule_of_turns(seed)
            step = UpperBound(dtype, 40, device)
            step.fill([], [])
            before = step.found()
            step.run(kernel(variant))
            compare(step.found(), before)


@pytest.mark.skipif(ON_GPU, reason="addresses are those of emulated warps")
@pytest.mark.parametrize("dtype", DTYPES)
def test_lanes_that_read_a_state_together_use_different_banks(dtype: torch.dtype) -> None:
    """Whether rows lie apart (fp32) or lanes take them crosswise (bf16)."""
    lanes_in_a_bank = ctypes.CDLL(str(library().path)).gdn_verify_lanes_in_a_bank
    assert lanes_in_a_bank(dtype == torch.float32) == 1


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA graph")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_at_an_upper_bound_replays_other_lengths(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Captured with four full requests, replayed with ragged ones, one row each, and none."""
    for variant in of_dtype(dtype):
        captured, fresh = (UpperBound(dtype, 40, device) for _ in range(2))
        captured.fill([8] * 4, SLOTS)
        captured.run(kernel(variant))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.run(kernel(variant))
        for lengths, pending in ((LENGTHS, 5), ([1] * 4, 13), ([], 0)):
            for one, other in zip(captured.cache.tensors(), fresh.cache.tensors(), strict=True):
                one.copy_(other)
            expected = UpperBound(dtype, 40, device)
            for step in (captured, expected):
                step.fill(lengths, SLOTS[: len(lengths)], pending)
            graph.replay()
            expected.run(kernel(variant))
            compare(captured.found(), expected.found())


def call(dtype: torch.dtype, dim: int = DIM, tokens: int = 5, **shape: int) -> dict[str, Any]:
    """Arguments of `cuda.replay_verify`: one request of `tokens` rows, no pending rows."""
    layout = ReplayLayout(1, 2, dim, DIM, shape.get("ring_rows", 16), dtype)
    random = torch.Generator().manual_seed(0)
    normal = lambda *size: torch.randn(*size, generator=random).bfloat16()  # noqa: E731
    cache_of = layout.allocate(2, "cpu")
    cache_of.state.normal_(0, 0.3, generator=random)
    integer = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    return {
        "q": normal(tokens, 1, dim), "k": normal(tokens, 1, dim), "v": normal(tokens, 2, DIM),
        "a": normal(tokens, 2), "b": normal(tokens, 2), "A_log": torch.zeros(2),
        "dt_bias": torch.zeros(2), "query_start_loc": integer(0, tokens), "slots": integer(1),
        "step": StepCursor(integer(3), integer(0), integer(0)), "cache": cache_of,
    }  # fmt: skip


def obstacle(arguments: dict[str, Any], max_rows: int = 8) -> str | None:
    rows = tuple(arguments[name] for name in ("q", "k", "v", "a"))
    head = (arguments["A_log"], arguments["dt_bias"])
    out = torch.zeros_like(arguments["v"])
    return cuda.obstacle(rows, head, arguments["cache"], out, max_rows)


@pytest.mark.parametrize(
    ("changes", "rows", "reason"),
    [
        ({"dim": 64}, 8, "head dimensions are 64 and 128"),
        ({"ring_rows": 48}, 8, "a ring of 48"),
        ({"ring_rows": 32}, 16, "16 rows a step"),
    ],
)
def test_says_what_it_cannot_take(changes: dict[str, int], rows: int, reason: str) -> None:
    assert reason in str(obstacle(call(torch.bfloat16, **changes), rows))
    assert obstacle(call(torch.bfloat16)) is None


def test_says_which_types_and_addresses_it_cannot_take() -> None:
    arguments = call(torch.bfloat16)
    assert "dt_bias torch.float16" in str(obstacle(arguments | {"dt_bias": torch.zeros(2).half()}))
    assert "not bfloat16" in str(obstacle(arguments | {"v": arguments["v"].float()}))
    odd = torch.zeros(5 * 2 * DIM + 1, dtype=torch.bfloat16)[1:].view(5, 2, DIM)
    assert "multiples of 16 bytes" in str(obstacle(arguments | {"v": odd}))
    with pytest.raises(ValueError, match=r"multiples of 16 bytes; use replay\.py"):
        cuda.replay_verify(**arguments | {"v": odd}, opened=library())


@pytest.mark.skipif(ON_GPU, reason="tensors of this test lie on the CPU")
def test_a_call_that_it_cannot_take_runs_as_triton() -> None:
    ours, reference = call(torch.bfloat16, dim=32), call(torch.bfloat16, dim=32)
    found = cuda.replay_verify(**ours)
    assert torch.equal(found, schedule.replay.replay_verify(**reference))
    assert bool(found.any())
    for one, other in zip(ours["cache"].tensors(), reference["cache"].tensors(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(ON_GPU, reason="tensors of this test lie on the CPU")
def test_default_cut_and_scale_match_the_triton_kernel() -> None:
    ours, reference = call(torch.float32), call(torch.float32)
    found = cuda.replay_verify(**ours, opened=library())
    exact = schedule.replay_naive.replay_verify(**reference)
    torch.testing.assert_close(found.float(), exact.float(), rtol=1e-2, atol=1e-2)
    nothing = call(torch.float32, tokens=0)
    assert cuda.replay_verify(**nothing, opened=library()).shape == (0, 2, DIM)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_heads_get_the_cut_for_few_waves(dtype: torch.dtype) -> None:
    many, few, *_ = of_dtype(dtype)
    assert few.name.startswith("direct") and many.name.startswith("pipeline")
    assert few.heads == 8  # 1056 heads of an H200: 32 requests of 32 heads fit, 64 twice
    assert library().pick(dtype, 32 * 32, 132) == few
    assert library().pick(dtype, 64 * 32, 132) == (few if dtype == torch.bfloat16 else many)
    assert library().pick(dtype, 256 * 32, 132) == many
