"""conv_verify's kernel against its oracle in float64, over schedules of many ragged steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.conv_verify import naive
from kernels.conv_verify.triton import ConvConfig, conv_verify

POISON = 777.0
REQUESTS, CHANNELS, MAX_ROWS = 3, 40, 16


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, list[tuple[list[int], list[int]]]]:
    """(width, seed, steps of (rows, accepted)); 0 rows is a preempted or padding request."""
    steps = []
    for _ in range(draw(st.integers(2, 6))):
        rows = draw(st.lists(st.integers(0, MAX_ROWS), min_size=REQUESTS, max_size=REQUESTS))
        steps.append((rows, [draw(st.integers(1, max(n, 1))) for n in rows]))
    return draw(st.integers(2, 4)), draw(st.integers(0, 2**16)), steps


@settings(max_examples=25, deadline=None)
@given(schedule=schedules(), silu=st.booleans(), has_bias=st.booleans())
def test_schedules_match_float64(
    schedule: tuple[int, int, list[tuple[list[int], list[int]]]],
    silu: bool,
    has_bias: bool,
    device: torch.device,
) -> None:
    width, seed, steps = schedule
    random = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    weight = normal(CHANNELS, width).to(device)
    bias = normal(CHANNELS).to(device) if has_bias else None
    # Slot 0 is null, slot 5 and the entries of padding requests are guards.
    windows = normal(6, width - 2 + MAX_ROWS, CHANNELS).bfloat16().to(device)
    exact = windows.double()
    slots = torch.tensor([3, 0, 1, 4, -1], dtype=torch.int32, device=device)
    accepted = [1, 2, 1, 1, 1]
    for rows, kept in steps:
        lengths = [rows[0], 2, rows[1], rows[2], 1]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
        x = normal(int(starts[-1]) + 3, CHANNELS).bfloat16().to(device)
        counts = torch.tensor(accepted, dtype=torch.int32, device=device)
        out = torch.full_like(x, POISON)
        reference = naive.conv_verify(x.double(), weight, bias, exact, starts, slots, counts, silu)
        conv_verify(
            x, weight, bias, windows, starts, slots, counts, silu, out, ConvConfig(block=16)
        )
        for entry, length in enumerate(lengths):
            first, last = int(starts[entry]), int(starts[entry]) + length
            if entry in (1, 4):
                assert bool((out[first:last] == POISON).all()), "a padding entry was written"
            else:
                torch.testing.assert_close(
                    out[first:last].double(), reference[first:last], rtol=1e-2, atol=2e-2
                )
        assert bool((out[int(starts[-1]) :] == POISON).all())
        assert torch.equal(windows.double(), exact), "windows differ"
        for entry, (n, k) in zip((0, 2, 3), zip(rows, kept, strict=True), strict=True):
            accepted[entry] = k if n else accepted[entry]


def test_float32_is_exact_to_rounding(device: torch.device) -> None:
    random = torch.Generator().manual_seed(1)
    x, weight, windows = (
        torch.randn(*shape, generator=random).to(device)
        for shape in ((9, 33), (33, 4), (3, 10, 33))
    )
    starts = torch.tensor([0, 8, 9], dtype=torch.int32, device=device)
    slots = torch.tensor([2, 1], dtype=torch.int32, device=device)
    accepted = torch.tensor([3, 8], dtype=torch.int32, device=device)
    exact = windows.double()
    reference = naive.conv_verify(x.double(), weight, None, exact, starts, slots, accepted)
    out = conv_verify(x, weight, None, windows, starts, slots, accepted)
    torch.testing.assert_close(out.double(), reference, rtol=1e-5, atol=1e-6)
    assert torch.equal(windows.double(), exact)


def test_output_may_replace_the_input(device: torch.device) -> None:
    random = torch.Generator().manual_seed(2)
    x = torch.randn(8, 64, generator=random).bfloat16().to(device)
    weight = torch.randn(64, 4, generator=random).to(device)
    windows = torch.randn(2, 10, 64, generator=random).bfloat16().to(device)
    starts = torch.tensor([0, 8], dtype=torch.int32, device=device)
    slots, accepted = (torch.ones(1, dtype=torch.int32, device=device) for _ in range(2))
    apart = conv_verify(x, weight, None, windows.clone(), starts, slots, accepted)
    conv_verify(x, weight, None, windows, starts, slots, accepted, out=x)
    assert torch.equal(apart, x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(8, 5)}, "weight must be"),
        ({"windows": torch.zeros(2, 4, 8, dtype=torch.float64)}, "but windows are"),
        ({"windows": torch.zeros(2, 2, 8)}, "at least 3"),
    ],
)
def test_refuses_what_it_does_not_take(
    change: dict[str, torch.Tensor], message: str, device: torch.device
) -> None:
    arguments = {
        "x": torch.zeros(1, 8), "weight": torch.zeros(8, 4), "windows": torch.zeros(2, 4, 8)
    } | change  # fmt: skip
    arguments = {name: tensor.to(device) for name, tensor in arguments.items()}
    ones = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=message):
        conv_verify(
            arguments["x"], arguments["weight"], None, arguments["windows"], ones, ones, ones
        )
