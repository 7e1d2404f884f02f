"""pack_rows against its oracle, on poisoned buffers: what is admitted, and where rows start."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_ascend_spec.kernels.pack_rows import Batch, PackedRows, cuda, naive
from vllm_ascend_spec.kernels.pack_rows import triton as kernel

from tests.kernels.emulation import HAS_CXX, built, emulated
from vllm_ascend_spec.budget import survival as planner

POISON = -77
FIELDS = ("draft_lengths", "query_start_loc", "cu_num_logits")


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def buffers(size: int, device: torch.device | str = "cpu") -> PackedRows:
    out = PackedRows.allocate(size, device)
    for name in FIELDS:
        getattr(out, name).fill_(POISON)
    return out


def decoding(requests: int, drafts: Any) -> Batch:
    counts = torch.full((requests,), drafts) if isinstance(drafts, int) else drafts
    return Batch(int32(torch.ones(requests)), int32(counts))


def on(batch: Batch, device: torch.device) -> Batch:
    tensors = {k: v.to(device) for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return replace(batch, **tensors)


def as_int32(batch: Batch) -> Batch:
    tensors = {k: int32(v) for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return replace(batch, **tensors)


def same(out: PackedRows, expected: PackedRows) -> None:
    for name in FIELDS:
        torch.testing.assert_close(
            getattr(out, name).cpu(), getattr(expected, name), rtol=0, atol=0
        )


@cache
def library(device: torch.device) -> cuda.Library:
    return cuda.Library((built if device.type == "cuda" else emulated)("pack_rows"))


def both(
    scores: torch.Tensor, budget: int | torch.Tensor, batch: Batch, size: int, device: torch.device,
    **options: Any,
) -> dict[str, list[int]]:  # fmt: skip
    """What the kernel wrote, after comparing it with what the oracle wrote.

    The CUDA kernel runs, too: on the GPU, or its source on emulated threads."""
    expected, out = buffers(size), buffers(size, device)
    naive.pack_rows(scores, budget, batch, expected, **options)
    moved = budget.to(device) if isinstance(budget, torch.Tensor) else budget
    kernel.pack_rows(scores.to(device), moved, on(batch, device), out, **options)
    same(out, expected)
    if device.type == "cuda" or (HAS_CXX and scores.dtype == torch.float32):
        out = buffers(size, device)
        narrow = int32(budget).to(device) if isinstance(budget, torch.Tensor) else budget
        moved_batch = on(as_int32(batch), device)
        cuda.pack_rows(scores.to(device), narrow, moved_batch, out, library(device), **options)
        same(out, expected)
    return {name: getattr(out, name).tolist() for name in FIELDS}


WORKED = torch.tensor(
    [[0.95, 0.9, 0.9, 0.9, 0.1], [0.9, 0.9, 0.8, 0.3, 0.3], [0.8, 0.2, 0.2, 0.2, 0.2]]
)


@pytest.mark.parametrize("budget", [8, torch.tensor(8), torch.tensor([8], dtype=torch.int32)])
def test_three_requests_share_eight_draft_rows(
    budget: int | torch.Tensor, device: torch.device
) -> None:
    found = both(WORKED, budget, decoding(3, 5), size=5, device=device)
    assert found["draft_lengths"] == [4, 3, 1, POISON, POISON]
    assert found["query_start_loc"] == [0, 5, 9, 11, 11, 11]
    assert found["cu_num_logits"] == [0, 5, 9, 11, 11, 11]


def test_survival_is_the_prefix_product(device: torch.device) -> None:
    levels = naive.survival_levels(torch.tensor([[0.90, 0.80, 0.70, 0.50]])) / 65536
    np.testing.assert_allclose(levels[0], [0.90, 0.72, 0.504, 0.252], atol=1e-4)
    # a sure token after a doubtful one ranks below a middling first token
    scores = torch.tensor([[0.3, 1.0], [0.5, 0.1]])
    assert both(scores, 1, decoding(2, 2), 2, device)["draft_lengths"] == [0, 1]


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, int, Batch, int, dict[str, Any]]:
    requests, positions = draw(st.integers(1, 40)), draw(st.integers(1, 16))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def integers(low: int, high: int) -> torch.Tensor:
        return int32(torch.randint(low, high + 1, (requests,), generator=generator))

    scores = torch.rand(2 * requests, positions, generator=generator)
    style = draw(st.sampled_from(["plain", "high", "tied", "wild"]))
    if style == "high":
        scores = scores**0.05
    if style == "tied":  # ties across positions and requests, and survivals of exactly 0 and 1
        scores = (scores * 3).round() / 3
    if style == "wild":
        wild = torch.tensor([math.nan, math.inf, -math.inf, -0.1, 1.5, -0.0, 1e-30])
        hit = torch.rand(scores.shape, generator=generator) < 0.3
        pick = torch.randint(0, len(wild), scores.shape, generator=generator)
        scores = torch.where(hit, wild[pick], scores)
    full = draw(st.booleans())
    batch = Batch(
        base_rows=integers(0, 3),
        draft_counts=int32(torch.full((requests,), positions)) if full else integers(0, positions),
        caps=draw(st.sampled_from([None, integers(-1, positions + 2)])),
        score_rows=draw(
            st.sampled_from(
                [None, int32(torch.randperm(2 * requests, generator=generator)[:requests])]
            )
        ),
        num_requests=draw(st.sampled_from([None, requests // 2, torch.tensor([requests // 3])])),
    )
    budget = draw(st.integers(0, requests * positions + 3))
    options = {"kind": draw(st.sampled_from(["confidence", "survival"]))}
    options["bonus_tokens"] = draw(st.sampled_from([1, 2]))
    return scores, budget, batch, requests + draw(st.integers(0, 50)), options


@settings(max_examples=60, deadline=None)
@given(problem=problems(), on_device=st.booleans())
def test_any_batch_agrees_with_the_oracle(
    problem: tuple[torch.Tensor, int, Batch, int, dict[str, Any]],
    on_device: bool,
    device: torch.device,
) -> None:
    scores, budget, batch, size, options = problem
    given_budget = torch.tensor([budget], dtype=torch.int32) if on_device else budget
    found = both(scores, given_budget, batch, size, device, **options)
    lengths = found["draft_lengths"][: batch.base_rows.shape[0]]
    limits = batch.draft_counts if batch.caps is None else torch.minimum(
        batch.draft_counts, batch.caps
    )  # fmt: skip
    count = len(lengths) if batch.num_requests is None else int(batch.num_requests)
    eligible = int(limits[:count].clamp(min=0).sum())
    assert sum(lengths) == min(budget, eligible)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31), requests=st.integers(1, 30), positions=st.integers(1, 16),
    tied=st.booleans(),
)  # fmt: skip
def test_host_planner_and_device_split_alike(
    seed: int, requests: int, positions: int, tied: bool, device: torch.device
) -> None:
    random = np.random.default_rng(seed)
    chances = random.random((requests, positions)).astype(np.float32)
    if tied:
        chances = np.round(chances * 4) / np.float32(4)
    available = random.integers(0, positions + 1, requests)
    budget = int(random.integers(0, available.sum() + 1))
    survival = planner.prefix_products(planner.to_grid(chances))
    expected = planner.split(survival, available, budget)
    batch = Batch(int32(np.ones(requests)), int32(available))
    grid = torch.from_numpy(planner.from_grid(survival).astype(np.float32))
    for scores, kind in ((torch.from_numpy(chances), "confidence"), (grid, "survival")):
        found = both(scores, budget, batch, requests, device, kind=kind)
        assert found["draft_lengths"] == expected.tolist()
        assert found["query_start_loc"] == planner.query_start_loc(expected).tolist()


def test_ties_go_by_position_then_request(device: torch.device) -> None:
    scores = torch.ones(4, 3)  # survival is the same along the product of the largest chances
    found = both(scores, 6, decoding(4, 3), 4, device, kind="survival")
    assert found["draft_lengths"] == [2, 2, 1, 1]


def test_the_split_does_not_move_with_float_noise(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    grid = torch.randint(0, 65536, (64, 7), generator=generator) / 65536
    noise = (torch.rand(grid.shape, generator=generator) - 0.5) * 1e-6
    batch = decoding(64, 7)
    exact = both(grid, 200, batch, 64, device)
    assert both((grid + noise).clamp(0, 1), 200, batch, 64, device) == exact


def test_nan_counts_as_zero_and_the_total_holds(device: torch.device) -> None:
    scores = torch.full((3, 4), math.nan)
    scores[1] = torch.tensor([0.9, math.nan, 0.9, 0.9])
    found = both(scores, 4, decoding(3, 4), 3, device)
    # request 1 row 0, then zeros: row 0 of requests 0 and 2, row 1 of request 0
    assert found["draft_lengths"] == [2, 1, 1]
    assert found["query_start_loc"] == [0, 3, 5, 7]


def test_budget_zero_leaves_every_request_its_own_row(device: torch.device) -> None:
    found = both(WORKED, 0, decoding(3, 5), 4, device)
    assert found["draft_lengths"] == [0, 0, 0, POISON]
    assert found["query_start_loc"] == found["cu_num_logits"] == [0, 1, 2, 3, 3]


def test_prefill_chunks_and_padding_have_rows_of_their_own(device: torch.device) -> None:
    batch = Batch(int32([1, 100, 0, 1]), int32([5, 0, 0, 5]))
    scores = torch.cat([WORKED[:1], WORKED[:1], WORKED])[:4]
    found = both(scores, 6, batch, 6, device)
    lengths = found["draft_lengths"][:4]
    assert lengths[1:3] == [0, 0] and sum(lengths) == 6
    assert found["query_start_loc"][1:5] == [
        1 + lengths[0], 101 + lengths[0], 101 + lengths[0], 108
    ]  # fmt: skip
    assert found["cu_num_logits"][1:] == [1 + lengths[0], *[2 + lengths[0]] * 2, 9, 9, 9]


def test_the_largest_batch(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(1024, 16, generator=generator) ** 0.1
    found = both(scores, 5000, decoding(1024, 16), 1100, device)
    assert found["query_start_loc"][1024:] == [6024] * 77


def test_runs_repeat_bit_for_bit(device: torch.device) -> None:
    scores = torch.rand(200, 7, generator=torch.Generator().manual_seed(1))
    first = both(scores, 555, decoding(200, 7), 256, device)
    assert all(both(scores, 555, decoding(200, 7), 256, device) == first for _ in range(2))


@pytest.mark.parametrize(
    ("scores", "batch", "size", "message"),
    [
        (torch.zeros(3, 17), decoding(3, 5), 3, "at most 1024 x 16"),
        (torch.zeros(2, 5), decoding(3, 5), 3, "scores has 2 rows for 3 requests"),
        (torch.zeros(3, 5, dtype=torch.int32), decoding(3, 5), 3, "scores must be floating"),
        (torch.zeros(3, 5), decoding(3, 5), 2, "draft_lengths must be int32 with at least 3"),
        (torch.zeros(3, 5), Batch(int32([1] * 3), int32([1] * 2)), 3, "draft_counts must be"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_by_name(
    scores: torch.Tensor, batch: Batch, size: int, message: str
) -> None:
    for implementation in (naive, kernel):
        with pytest.raises(ValueError, match=message):
            implementation.pack_rows(scores, 1, batch, buffers(size))


@pytest.mark.skipif(not HAS_CXX, reason="the emulation is built with g++")
def test_a_call_that_the_cuda_kernel_cannot_take_runs_as_triton(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int64 counts; with a library of its own it names them."""
    batch = on(replace(decoding(3, 5), draft_counts=torch.tensor([5, 5, 5])), device)
    monkeypatch.setattr(cuda, "library", lambda: pytest.fail("the CUDA kernel was asked for"))
    out = cuda.pack_rows(WORKED.to(device), 8, batch, buffers(5, device))
    assert out.draft_lengths.tolist() == [4, 3, 1, POISON, POISON]
    with pytest.raises(ValueError, match="draft_counts must be contiguous int32"):
        cuda.pack_rows(WORKED.to(device), 8, batch, out, library(device))


def test_scores_whose_rows_are_not_contiguous_are_refused(device: torch.device) -> None:
    turned = WORKED.to(device).t().contiguous().t()
    for implementation in (kernel, cuda):
        with pytest.raises(ValueError, match=r"contiguous rows, got .*strides \(1, 3\)"):
            implementation.pack_rows(turned, 8, on(decoding(3, 5), device), buffers(5, device))


@pytest.mark.parametrize("implementation", [kernel, cuda])
def test_a_replayed_graph_follows_device_scalars(device: torch.device, implementation: Any) -> None:
    if device.type != "cuda":
        pytest.skip("captures a CUDA graph")
    budget = torch.tensor([8], dtype=torch.int32, device=device)
    count = torch.tensor([3], dtype=torch.int32, device=device)
    scores, out = WORKED.to(device), buffers(5, device)
    batch = on(replace(decoding(3, 5), num_requests=count), device)
    implementation.pack_rows(scores, budget, batch, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        implementation.pack_rows(scores, budget, batch, out)
    for new_budget, new_count in ((8, 3), (3, 2), (0, 0), (15, 3)):
        budget.fill_(new_budget)
        count.fill_(new_count)
        graph.replay()
        expected = buffers(5)
        batch_now = replace(decoding(3, 5), num_requests=new_count)
        naive.pack_rows(WORKED, new_budget, batch_now, expected)
        for name in FIELDS:
            assert torch.equal(getattr(out, name).cpu(), getattr(expected, name)), name
