"""States that change pages: kernels and oracle against float64, and what they must leave alone."""

from __future__ import annotations

from types import ModuleType

import page_schedule as schedule
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_schedule import BLOCK_TOKENS, MAX_ROWS, Decode

from kernels.gdn_verify import pages, pages_naive, replay_cursor
from kernels.gdn_verify.layout import ReplayLayout
from kernels.gdn_verify.pages import FoldPlan, PagePool

DTYPES = [torch.bfloat16, torch.float32]
KERNELS = [pages, pages_naive]
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 2e-5}


def layout_of(dtype: torch.dtype, heads: tuple[int, int] = (1, 2)) -> ReplayLayout:
    return ReplayLayout(*heads, 32, 16, 12, dtype)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[int]]]:
    """Ragged steps: any order, requests that sit out, rows that draft nothing, padding."""
    found = []
    for _ in range(draw(st.integers(6, 12))):
        order = [r for r in draw(st.permutations([0, 1, 2])) if draw(st.integers(0, 5))]
        order += [-1] * draw(st.integers(0, 1))
        rows = [draw(st.integers(1, MAX_ROWS)) if r >= 0 else 0 for r in order]
        accepted = [draw(st.integers(1, n)) if n else 0 for n in rows]
        if order:
            found.append((order, rows, accepted))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=8, deadline=None)
@given(plan=steps(), seed=st.integers(0, 2**16))
def test_blocks_hold_their_states(
    plan: list[tuple[list[int], list[int], list[int]]],
    seed: int,
    kernels: ModuleType,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    run = Decode(layout_of(dtype), kernels, device, seed=seed)
    for order, rows, accepted in plan:
        run.step(order, rows, accepted)
    assert run.seen.error < LIMITS[dtype], run.seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 4), (1, 1)])
def test_every_way_across_a_boundary(
    heads: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Reached exactly by all rows or by fewer, crossed, and back into the block before."""
    run = Decode(layout_of(dtype, heads), pages, device, computed=(4, 5, 6))
    before = torch.stack([raw.clone() for raw in run.raw])
    run.step([0, 1, 2], [4, 4, 4], [4, 3, 4])  # the end itself; with a row to spare; two past it
    assert (run.seen.in_place, run.seen.behind, run.seen.within) == (1, 2, 1)
    run.step([2, -1, 0, 1], [4, 0, 4, 1], [1, 0, 2, 1])
    run.step([0, 1, 2], [4, 4, 4], [4, 4, 3])
    run.step([0, 1, 2], [4, 4, 4], [1, 1, 1])  # into a block beyond, and not accepted
    column = run.running.clone()
    run.step([0, 1, 2], [1, 1, 1], [1, 1, 1])
    assert bool((run.running < column).any()), "no request went back to the block before"
    for _ in range(5):
        run.step([0, 1, 2], [4, 4, 4], [3, 4, 2])
    assert run.seen.error < LIMITS[dtype], run.seen
    _only_owned_pages_changed(run, before)


def _only_owned_pages_changed(run: Decode, before: torch.Tensor) -> None:
    """Convolution windows, padding, the null block and the page that nobody owns."""
    for layer, raw in enumerate(run.raw):
        old, padded = before[layer], raw.shape[1] - schedule.PADDING_BYTES
        assert torch.equal(raw[:, : schedule.CONV_BYTES], old[:, : schedule.CONV_BYTES])
        assert torch.equal(raw[:, padded:], old[:, padded:])
        assert torch.equal(raw[[0, -1]], old[[0, -1]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_fold_writes_one_state_and_nothing_else(
    kernels: ModuleType, dtype: torch.dtype, device: torch.device
) -> None:
    """Copy, fold elsewhere, fold in place; null blocks and entries past the total touch nothing."""
    run = Decode(layout_of(dtype), pages, device)
    run.tables[0][2, 5] = 0
    fill_rings(run)
    before = [raw.clone() for raw in run.raw]
    entries = [
        (0, 1, 2, 3, 0),
        (1, 4, 3, 10, 7),
        (2, 1, 1, 0, 12),
        (2, 5, 6, 0, 2),
        (2, 2, 5, 0, 1),
    ]
    plan = FoldPlan.allocate(8, device)
    for column, values in zip(plan.entries, zip(*entries, strict=True), strict=True):
        column[: len(values)] = torch.tensor(values, dtype=torch.int32)
        column[len(values) :] = 1
    plan.total.fill_(len(entries))
    kernels.fold_pages(plan, run.pool)
    for layer, group in enumerate(run.groups):
        table = run.tables[group]
        changed = (run.raw[layer] != before[layer]).any(1).nonzero().flatten().tolist()
        null = 3 if group == 0 else 5  # group 0 alone has a null block among the entries
        written = [int(table[request, target]) for request, _, target, _, _ in entries[:null]]
        assert sorted(changed) == sorted(written)
        ring = schedule.CONV_BYTES + run.layout.slot_bytes()["state"]
        assert torch.equal(run.raw[layer][:, ring:], before[layer][:, ring:])
        assert torch.equal(run.page(layer, 0, 1), run.page(layer, 0, 2)), "a copy is exact"


def fill_rings(run: Decode) -> None:
    """Numbers where there was noise."""
    for cache in run.caches:
        for tensor in cache.tensors()[1:]:
            tensor.copy_(torch.randn(tensor.shape) * 0.3)
        cache.log_decay.copy_(-torch.rand(cache.log_decay.shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_oracle_agree(dtype: torch.dtype, device: torch.device) -> None:
    """The model's head dimension, more work than programs, a whole ring that wraps."""
    folded = []
    for kernels in KERNELS:
        run = Decode(ReplayLayout(1, 2, 128, 128, 32, dtype), pages, device, seed=5)
        fill_rings(run)
        run.cursor.pending.copy_(torch.tensor([32, 0, 9]))
        run.cursor.start.copy_(torch.tensor([30, 1, 31]))
        requests = torch.tensor([1, 2, -1, 0], dtype=torch.int32, device=device)
        running = run.running + torch.tensor([1, 2, 0], dtype=torch.int32, device=device)
        kernels.plan_moves(run.cursor, requests, run.running, running, run.plan)
        assert run.cursor.pending.tolist() == [0, 0, 9]
        assert int(run.plan.total) == 2
        assert [c[:2].tolist() for c in run.plan.entries] == [
            [1, 0], run.running[[1, 0]].tolist(), running[[1, 0]].tolist(), [1, 30], [0, 32],
        ]  # fmt: skip
        kernels.fold_pages(run.plan, run.pool)
        folded.append(torch.stack([cache.state.double() for cache in run.caches]))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(*folded, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernels", KERNELS)
def test_plans_of_many_requests(kernels: ModuleType, device: torch.device) -> None:
    """More entries than one block of a program; what reaches no boundary is left out."""
    requests = 300
    integer = lambda x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    cursor = replay_cursor.Cursor.allocate(requests, 12, MAX_ROWS, device, null_slot=-1)
    cursor.pending.fill_(3)
    order = torch.randperm(requests, generator=torch.Generator().manual_seed(1)).int().to(device)
    computed = integer([BLOCK_TOKENS + r % 5 for r in range(requests)])
    accepted = integer([3] * requests)
    running = integer([r % 2 for r in range(requests)])
    plan = FoldPlan.allocate(requests, device)
    kernels.plan_settles(cursor, order, accepted, computed, running, BLOCK_TOKENS, plan)
    reached = [r for r in order.tolist() if r % 5 < 3]
    assert int(plan.total) == len(reached)
    expected = [(r, r % 2, 0, 0, 3 - r % 5) for r in reached]
    found = zip(*(c[: len(reached)].tolist() for c in plan.entries), strict=True)
    assert list(found) == expected
    emptied = {r for r in reached if r % 2 == 0}
    assert cursor.pending.tolist() == [0 if r in emptied else 3 for r in range(requests)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_prompt_chunks_settle_nothing(kernels: ModuleType, device: torch.device) -> None:
    """A chunk writes the state where it belongs: at a block's end, within one, or not at all."""
    run = Decode(layout_of(torch.float32), kernels, device, computed=(8, 13, 16))
    none = torch.zeros(3, dtype=torch.int32, device=device)
    requests = torch.arange(3, dtype=torch.int32, device=device)
    kernels.plan_settles(
        run.cursor, requests, none, run.computed, run.running, BLOCK_TOKENS, run.plan
    )
    assert int(run.plan.total) == 0
    before = [raw.clone() for raw in run.raw]
    kernels.fold_pages(run.plan, run.pool)
    assert all(torch.equal(one, other) for one, other in zip(run.raw, before, strict=True))


def test_refuses_pages_of_two_layouts(device: torch.device) -> None:
    one = Decode(layout_of(torch.float32), pages, device)
    other = Decode(layout_of(torch.bfloat16), pages, device)
    with pytest.raises(ValueError, match="one layout and one stride"):
        PagePool([one.caches[0], other.caches[0]], (0, 0), one.tables)
    with pytest.raises(ValueError, match="one stride"):
        PagePool(one.caches[:1], (0,), [one.tables[0], one.tables[1][:, :4].contiguous()])
