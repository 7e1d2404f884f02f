"""The convolution's window contract: roll-back by offset, ragged rows, paged and padded pools."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vllm_ascend_spec.kernels.conv_verify import host, naive

DIM, WIDTH, K, SLOTS = 6, 4, 3, 8
LENGTH = WIDTH - 1 + K


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def whole_sequence(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's own convolution of everything a request has kept, [T, DIM]."""
    padded = torch.nn.functional.pad(x.t()[None], (WIDTH - 1, 0))
    out = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=DIM)
    return torch.nn.functional.silu(out[0].t())


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(1, K + 1), st.integers(1, K + 1)), max_size=6),
    with_bias=st.booleans(),
)
def test_kept_tokens_are_convolved_as_one_sequence(steps: list[tuple[int, int]], with_bias: bool):
    weight, bias = normal(DIM, WIDTH), normal(DIM, seed=1) if with_bias else None
    windows = normal(SLOTS, LENGTH, DIM, seed=2)
    slot, kept, accepted = torch.tensor([3]), normal(2, DIM, seed=3), 1
    naive.conv_prefill(
        kept, weight, bias, windows, torch.tensor([0, 2]), slot, torch.tensor([False])
    )
    for index, (rows, keep) in enumerate(steps):
        x = normal(rows, DIM, seed=10 + index)
        out = naive.conv_verify(
            x, weight, bias, windows, torch.tensor([0, rows]), slot, torch.tensor([accepted])
        )
        expected = whole_sequence(torch.cat((kept, x)), weight, bias)[len(kept) :]
        torch.testing.assert_close(out, expected)
        accepted = min(keep, rows)
        kept = torch.cat((kept, x[:accepted]))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, K + 1), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    with_bias=st.booleans(),
    silu=st.booleans(),
)
def test_native_operator_equals_the_oracle(
    lengths: list[int], seed: int, with_bias: bool, silu: bool
):
    """In a pool whose pages are padded; slots 0 (null) and accepted 0 are among the rows."""
    pytest.importorskip("vllm_ascend_spec._host", reason="installed without a compiler")
    generator = torch.Generator().manual_seed(seed)
    requests, total = len(lengths), sum(lengths)
    pages = normal(SLOTS, LENGTH * DIM + 5, seed=seed).to(torch.bfloat16)
    pool = pages[:, : LENGTH * DIM].view(SLOTS, LENGTH, DIM)
    packed = pool.clone()
    x = normal(total, DIM, seed=seed + 1).to(torch.bfloat16)
    weight = normal(DIM, WIDTH, seed=seed + 2).to(torch.bfloat16)
    bias = normal(DIM, seed=seed + 3).to(torch.bfloat16) if with_bias else None
    starts = torch.tensor([0, *lengths]).cumsum(0)
    slots = torch.randperm(SLOTS, generator=generator)[:requests]
    accepted = torch.randint(0, K + 2, (requests,), generator=generator)
    got = host.conv_verify(x, weight, bias, pool, starts, slots, accepted, silu)
    expected = naive.conv_verify(x, weight, bias, packed, starts, slots, accepted, silu)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(pool, packed)
    initial = torch.randint(0, 2, (requests,), generator=generator).bool()
    got = host.conv_prefill(x, weight, bias, pool, starts, slots, initial, silu)
    expected = naive.conv_prefill(x, weight, bias, packed, starts, slots, initial, silu)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(pool, packed)


@pytest.mark.parametrize("package", [naive, host])
@pytest.mark.parametrize(("rows", "accepted"), [(K + 2, 1), (1, K + 2)])
def test_window_that_is_too_short_is_refused(package: object, rows: int, accepted: int):
    windows = normal(SLOTS, LENGTH, DIM).to(torch.bfloat16)
    with pytest.raises(ValueError, match="rows"):
        package.conv_verify(  # type: ignore[attr-defined]
            normal(rows, DIM).to(torch.bfloat16),
            normal(DIM, WIDTH).to(torch.bfloat16),
            None,
            windows,
            torch.tensor([0, rows]),
            torch.tensor([3]),
            torch.tensor([accepted]),
        )
