"""draft_inputs against its oracle, on poisoned buffers: anchors, positions, slots, padding."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_ascend_spec.kernels.draft_inputs import BlockShape, DraftBuffers, TargetStep, naive
from vllm_ascend_spec.kernels.draft_inputs import triton as kernel

from benchmarks.kernels import _draft_inputs_torch

POISON, MASK_TOKEN, PAD = -77, 999, -1


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def poisoned(out: DraftBuffers, device: torch.device) -> DraftBuffers:
    names = [field.name for field in fields(out)]
    return DraftBuffers(
        **{n: torch.full_like(getattr(out, n), POISON, device=device) for n in names}
    )


def on(step: TargetStep, device: torch.device) -> TargetStep:
    tensors = {k: v.to(device) for k, v in vars(step).items() if isinstance(v, torch.Tensor)}
    return replace(step, **tensors)


def both(
    step: TargetStep, shape: BlockShape, device: torch.device, context_rows: int | None = None,
    max_rows: int | None = None,
) -> DraftBuffers:  # fmt: skip
    """What the kernel wrote, on the CPU, after comparing every buffer with the oracle's."""
    requests = step.idx_mapping.shape[0]
    rows = int(step.query_start_loc[-1]) if context_rows is None else context_rows
    expected = DraftBuffers.allocate(
        requests, shape, rows, "cpu", max_rows=max_rows, mrope=step.mrope_positions is not None
    )
    out = poisoned(expected, device)
    naive.draft_inputs(step, shape, expected)
    kernel.draft_inputs(on(step, device), shape, out)
    found = {field.name: getattr(out, field.name).cpu() for field in fields(out)}
    for name, value in found.items():
        torch.testing.assert_close(value, getattr(expected, name), rtol=0, atol=0, msg=name)
    return DraftBuffers(**found)


def decoding(
    anchors: list[int], block_table: list[list[int]], rows: int = 1, **changes: Any
) -> TargetStep:
    """A step after which request r's anchor is token `anchors[r]`, every row kept."""
    requests = len(anchors)
    positions = [a - rows + j for a in anchors for j in range(rows)]
    step = TargetStep(
        query_start_loc=int32([rows * r for r in range(requests + 1)]),
        positions=torch.tensor(positions),
        num_sampled=int32([1] * requests),
        num_rejected=int32([0] * requests),
        idx_mapping=int32(range(requests)),
        last_sampled=torch.tensor([100 + r for r in range(requests)]),
        next_prefill_tokens=int32([200 + r for r in range(requests)]),
        block_table=int32(block_table),
    )
    return replace(step, **changes)


def dspark(draft_tokens: int, block_size: int, max_model_len: int = 10_000) -> BlockShape:
    return BlockShape(draft_tokens, draft_tokens, MASK_TOKEN, block_size, max_model_len)


def dflash(draft_tokens: int, block_size: int, max_model_len: int = 10_000) -> BlockShape:
    return BlockShape(draft_tokens, draft_tokens + 1, MASK_TOKEN, block_size, max_model_len)


def test_a_block_crosses_pages(device: torch.device) -> None:
    # page size 4: positions 4..7 lie in page 7, position 8 in page 1
    out = both(decoding([4], [[3, 7, 1]]), dflash(4, block_size=4), device)
    assert out.positions.tolist() == [4, 5, 6, 7, 8]
    assert out.slots.tolist() == [28, 29, 30, 31, 4]
    assert out.input_ids.tolist() == [100, *[MASK_TOKEN] * 4]


def test_dspark_and_dflash_rows(device: torch.device) -> None:
    step = decoding([20, 5], [[1, 2], [3, 4]])
    k_rows = both(step, dspark(3, 16), device)
    assert k_rows.query_start_loc.tolist() == [0, 3, 6]
    assert k_rows.sample_rows.tolist() == [0, 1, 2, 3, 4, 5]
    one_more = both(step, dflash(3, 16), device)
    assert one_more.query_start_loc.tolist() == [0, 4, 8]
    assert one_more.sample_rows.tolist() == [1, 2, 3, 5, 6, 7]
    for out in (k_rows, one_more):
        assert out.sample_positions.tolist() == [21, 22, 23, 6, 7, 8]
        assert out.sample_requests.tolist() == [0, 0, 0, 1, 1, 1]
        assert out.draft_counts.tolist() == [3, 3]
    assert k_rows.seq_lens.tolist() == [23, 8]
    assert one_more.seq_lens.tolist() == [24, 9]


def test_slots_follow_the_index_and_rotary_positions_the_target(device: torch.device) -> None:
    # 4 text tokens and a 4x4 image: index 20 has rotary position 8; beside it a text-only request
    step = decoding(
        [20, 20],
        [[5, 9], [6, 8]],
        mrope_positions=torch.tensor([[4, 19], [7, 19], [7, 19]]),
        mrope_delta=int32([-12, 0]),
    )
    out = both(step, dflash(2, block_size=16), device)
    assert out.slots.tolist() == [148, 149, 150, 132, 133, 134]
    assert out.positions.tolist() == [[8, 9, 10, 20, 21, 22]] * 3
    assert out.context_positions.tolist() == [[4, 19], [7, 19], [7, 19]]
    assert out.context_slots.tolist() == [9 * 16 + 3, 8 * 16 + 3]


def test_a_block_that_passes_max_model_len_drafts_nothing(device: torch.device) -> None:
    step = decoding([24, 27, 31, 32], [[1, 2], [3, 4], [5, 6], [7, 8]])
    out = both(step, dflash(7, block_size=16, max_model_len=32), device)
    slots = out.slots.view(4, 8)
    assert slots[0].tolist() == list(range(2 * 16 + 8, 2 * 16 + 16))
    assert (slots[1:] == PAD).all()
    assert out.draft_counts.tolist() == [7, 0, 0, 0]
    assert (out.sample_requests.view(4, 7)[1:] == -1).all()
    assert out.sample_requests.view(4, 7)[0].tolist() == [0] * 7
    assert int(out.positions.max()) < 32 and int(out.seq_lens.max()) <= 32


@pytest.mark.parametrize("allocated", [None, [2, 1]])
def test_look_ahead_positions_need_pages_of_their_own(
    allocated: list[int] | None, device: torch.device
) -> None:
    # both share the prefix page 3; request 1's second column is a stale id of another request
    step = decoding([16, 16], [[3, 7], [3, 7]])
    step = replace(step, allocated_blocks=None if allocated is None else int32(allocated))
    out = both(step, dflash(7, block_size=16), device)
    private = list(range(7 * 16, 7 * 16 + 8))
    assert out.slots.view(2, 8)[0].tolist() == private
    assert out.slots.view(2, 8)[1].tolist() == (private if allocated is None else [PAD] * 8)


def test_the_null_block_and_columns_past_the_table_get_the_padding_slot(
    device: torch.device,
) -> None:
    step = decoding([14, 30], [[4, 0], [5, 6]])
    out = both(step, dflash(3, block_size=16), device)
    assert out.slots.tolist() == [78, 79, PAD, PAD, 110, 111, PAD, PAD]


def test_rejected_rows_leave_the_context_and_move_the_anchor(device: torch.device) -> None:
    step = decoding([8], [[2, 3]], rows=4, num_rejected=int32([3]))
    out = both(step, dspark(2, block_size=4), device)
    assert out.context_slots.tolist() == [3 * 4 + 0, PAD, PAD, PAD]
    assert out.context_positions.tolist() == [4, 0, 0, 0]
    assert out.positions.tolist() == [5, 6]


def test_a_prefill_chunk_continues_with_its_prompt(device: torch.device) -> None:
    step = decoding([64, 9], [[1, 2, 3, 4, 5], [6] * 5], num_sampled=int32([0, 1]))
    step = replace(
        step,
        query_start_loc=int32([0, 64, 65]),
        positions=torch.cat([torch.arange(64), torch.tensor([8])]),
    )
    out = both(step, dspark(3, block_size=16), device)
    assert out.input_ids.tolist() == [200, MASK_TOKEN, MASK_TOKEN, 101, MASK_TOKEN, MASK_TOKEN]
    assert out.context_slots[:64].tolist() == list(range(16, 80))


@pytest.mark.parametrize("on_device", [False, True])
def test_padding_and_dummy_requests_own_nothing(on_device: bool, device: torch.device) -> None:
    step = decoding([8, 9, 10, 11], [[1, 2]] * 4, idx_mapping=int32([2, -1, 0, 3]))
    count = torch.tensor([3], dtype=torch.int32) if on_device else 3
    out = both(
        replace(step, num_requests=count), dspark(2, 16), device, context_rows=9, max_rows=30
    )
    assert out.input_ids[:8].tolist() == [102, MASK_TOKEN, 0, 0, 100, MASK_TOKEN, 0, 0]
    assert (out.slots[2:4] == PAD).all() and (out.slots[6:] == PAD).all()
    assert out.sample_requests.tolist() == [2, 2, -1, -1, 0, 0, -1, -1]
    assert out.query_start_loc.tolist() == [0, 2, 4, 6, 6]
    assert out.seq_lens.tolist() == [10, 0, 12, 0]
    assert (out.context_slots[3:] == PAD).all()


@st.composite
def steps(draw: st.DrawFn) -> tuple[TargetStep, BlockShape, int, int]:
    requests, draft_tokens = draw(st.integers(1, 40)), draw(st.integers(1, 16))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape or (requests,), generator=generator)

    count = draw(st.integers(0, requests))
    lengths = integers(0, draft_tokens + 1)
    if draw(st.booleans()):
        lengths[0] = 130  # a prefill chunk among decoding requests
    lengths[count:] = 0
    first = integers(0, 70)
    positions = [first[r] + torch.arange(lengths[r]) for r in range(requests)]
    total, columns, states = int(lengths.sum()), draw(st.integers(1, 30)), requests + 4
    mapping = torch.randperm(states, generator=generator)[:requests]
    mrope = draw(st.booleans())
    step = TargetStep(
        query_start_loc=int32(torch.cat([torch.zeros(1), lengths.cumsum(0)])),
        positions=torch.cat([*positions, torch.zeros(1, dtype=torch.int64)]),
        num_sampled=int32(integers(0, 2)),
        num_rejected=int32(torch.minimum(integers(0, draft_tokens), lengths)),
        idx_mapping=int32(torch.where(integers(0, 9) == 0, -1, mapping)),
        last_sampled=integers(0, 500, states),
        next_prefill_tokens=int32(integers(500, 900, states)),
        block_table=int32(integers(0, 60, requests, columns)),
        allocated_blocks=draw(st.sampled_from([None, int32(integers(0, columns + 1))])),
        mrope_positions=integers(0, 99, 3, total + 1) if mrope else None,
        mrope_delta=integers(-9, 9, states) if mrope else None,
        num_requests=draw(st.sampled_from([count, torch.tensor([count], dtype=torch.int32)])),
    )
    shape = BlockShape(
        draft_tokens,
        draft_tokens + draw(st.integers(0, 1)),
        MASK_TOKEN,
        draw(st.sampled_from([4, 16, 24, 128])),
        draw(st.sampled_from([50, 90, 10_000])),
    )
    return step, shape, total + draw(st.integers(0, 90)), draw(st.integers(0, 150))


@settings(max_examples=60, deadline=None)
@given(problem=steps())
def test_any_step_agrees_with_the_oracle(
    problem: tuple[TargetStep, BlockShape, int, int], device: torch.device
) -> None:
    step, shape, context_rows, spare_rows = problem
    rows = step.idx_mapping.shape[0] * shape.rows + spare_rows
    out = both(step, shape, device, context_rows, rows)
    used = out.slots[out.slots != PAD]
    assert (used // shape.block_size != shape.null_block).all()


def test_the_largest_batch(device: torch.device) -> None:
    requests = 1024
    table = torch.randint(1, 5000, (requests, 8), generator=torch.Generator().manual_seed(0))
    step = decoding(list(range(8, 8 + requests)), table.tolist(), rows=2)
    out = both(step, dflash(7, block_size=128), device, max_rows=9000)
    assert out.draft_counts.tolist() == [7] * 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": int32([0, 0, 0])}, "seq_lens must have 2 entries"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "slots: 3 rows for 2 x 2"),
        ({"input_ids": int32([0] * 5)}, "input_ids must have as many rows as slots"),
        ({"positions": torch.zeros(3, 4, dtype=torch.int64)}, r"positions must be \[3, rows\]"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    step, shape = decoding([8, 9], [[1], [2]]), dspark(2, 16)
    out = replace(DraftBuffers.allocate(2, shape, 2, "cpu"), **change)
    for implementation in (naive, kernel):
        with pytest.raises(ValueError, match=message):
            implementation.draft_inputs(step, shape, out)


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="rows must be draft_tokens"):
        BlockShape(4, 6, MASK_TOKEN, 16, 100)
    step = replace(decoding([8], [[1]]), mrope_delta=int32([0]))
    with pytest.raises(ValueError, match="mrope_positions and mrope_delta come together"):
        naive.draft_inputs(step, dspark(2, 16), DraftBuffers.allocate(1, dspark(2, 16), 1, "cpu"))


@pytest.mark.parametrize("mrope", [False, True])
def test_the_baseline_of_the_benchmark_writes_the_same_buffers(mrope: bool) -> None:
    requests, shape = 5, dflash(3, 16, max_model_len=64)
    lengths = torch.tensor([4, 1, 3, 2, 4])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    first = torch.tensor([0, 20, 61, 9, 40])
    positions = torch.arange(14) - torch.repeat_interleave(starts[:-1] - first, lengths)
    table = int32(range(1, 21)).view(requests, 4)
    table[3, 0] = 0
    step = TargetStep(
        int32(starts), positions, int32([1, 1, 1, 0, 1]), int32([2, 0, 1, 1, 0]),
        int32([4, 0, 3, 1, 2]), torch.arange(50, 55), int32(range(60, 65)), table,
        mrope_positions=positions.expand(3, -1) + 2 if mrope else None,
        mrope_delta=int32([-2, -1, 0, -5, 0]) if mrope else None,
    )  # fmt: skip
    expected = DraftBuffers.allocate(requests, shape, 17, "cpu", mrope=mrope)
    naive.draft_inputs(step, shape, expected)
    assert 0 in expected.draft_counts and -1 in expected.slots
    found = poisoned(expected, torch.device("cpu"))
    _draft_inputs_torch.draft_inputs(step, shape, found)
    for field in fields(found):
        name = field.name
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA graph")
def test_a_graph_at_an_upper_bound_replays_other_requests(device: torch.device) -> None:
    """Captured with four requests, replayed with two, other anchors and other rejections."""
    shape, four = dspark(3, 4), [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    count = torch.tensor([4], dtype=torch.int32, device=device)
    held = replace(on(decoding([4, 5, 6, 7], four, rows=2), device), num_requests=count)
    expected = DraftBuffers.allocate(4, shape, 8, "cpu")
    out = poisoned(expected, device)
    kernel.draft_inputs(held, shape, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.draft_inputs(held, shape, out)
    later = decoding([9, 3, 6, 7], four, rows=2, num_rejected=int32([1, 0, 0, 0]), num_requests=2)
    held.positions.copy_(later.positions)
    held.num_rejected.copy_(later.num_rejected)
    count.fill_(2)
    graph.replay()
    naive.draft_inputs(later, shape, expected)
    for field in fields(out):
        name = field.name
        found = getattr(out, name).cpu()
        torch.testing.assert_close(found, getattr(expected, name), rtol=0, atol=0, msg=name)
