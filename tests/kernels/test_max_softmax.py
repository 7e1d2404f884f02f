"""max_softmax against float64: confidence, argmax, ties, masks, NaN, shards, draft vocabularies."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_ascend_spec.kernels.max_softmax import check_d2t, naive
from vllm_ascend_spec.kernels.max_softmax import triton as kernel

# small tiles, so that short rows have many steps, segments and a partial last tile
TILES = kernel.Tiling(lane_bytes=64, programs_per_core=8)
WALKS = (TILES, dataclasses.replace(TILES, stages=3))
RTOL = 4e-6
INF = math.inf


def both(
    logits: torch.Tensor,
    device: torch.device,
    temperature: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    tiling: kernel.Tiling = TILES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's confidence and tokens, after comparing them with the oracle's."""
    expected = naive.max_softmax(logits, temperature=temperature, d2t=d2t)
    moved = {
        "temperature": None if temperature is None else temperature.to(device),
        "d2t": None if d2t is None else d2t.to(device),
    }
    confidence, tokens = kernel.max_softmax(keep_stride(logits, device), tiling=tiling, **moved)
    confidence, tokens = confidence.cpu(), tokens.cpu()
    torch.testing.assert_close(confidence, expected[0], rtol=RTOL, atol=0)
    torch.testing.assert_close(tokens, expected[1], rtol=0, atol=0)
    return confidence, tokens


def keep_stride(logits: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`logits` on the device as a view into rows as long as it has them here, poisoned beyond."""
    rows, vocabulary = logits.shape
    wide = torch.full((rows, max(logits.stride(0), vocabulary)), 1e4, dtype=logits.dtype)
    wide[:, :vocabulary] = logits
    return wide.to(device)[:, :vocabulary]


@st.composite
def rows_of_logits(draw: st.DrawFn) -> torch.Tensor:
    rows, vocabulary = draw(st.integers(1, 9)), draw(st.integers(1, 900))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(rows, vocabulary + draw(st.integers(0, 20)), generator=generator)
    logits *= draw(st.sampled_from([0.0, 1.0, 10.0, 60.0]))
    if draw(st.booleans()):
        logits = logits.round()  # ties
    special = draw(st.sampled_from([None, math.nan, INF, -INF, torch.finfo(torch.float32).min]))
    if special is not None:
        hit = torch.rand(logits.shape, generator=generator) < draw(
            st.sampled_from([0.01, 0.5, 1.0])
        )
        logits = torch.where(hit & (torch.arange(rows) % 2 == 0)[:, None], special, logits)
    return logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))[:, :vocabulary]


@settings(max_examples=80, deadline=None)
@given(
    logits=rows_of_logits(),
    temperature=st.sampled_from([None, 0.0, 0.6, 2.0]),
    mapped=st.booleans(),
    tiling=st.sampled_from(WALKS),
)
def test_any_logits_agree_with_the_oracle(
    logits: torch.Tensor,
    temperature: float | None,
    mapped: bool,
    tiling: kernel.Tiling,
    device: torch.device,
) -> None:
    rows, vocabulary = logits.shape
    offsets = torch.arange(vocabulary) % 7 if mapped else None
    heat = None if temperature is None else torch.full((rows,), temperature)
    confidence, tokens = both(logits, device, heat, offsets, tiling)
    assert ((confidence >= 0) & (confidence <= 1)).all()
    assert ((tokens >= 0) & (tokens < vocabulary + 7)).all()


@settings(max_examples=40, deadline=None)
@given(logits=rows_of_logits(), data=st.data())
def test_shards_of_the_vocabulary_combine_to_the_whole(
    logits: torch.Tensor, data: st.DataObject, device: torch.device
) -> None:
    rows, vocabulary = logits.shape
    cuts = data.draw(st.lists(st.integers(1, max(1, vocabulary - 1)), max_size=4, unique=True))
    edges = [0, *sorted(c for c in cuts if c < vocabulary), vocabulary]
    heat = torch.linspace(0.5, 1.5, rows)
    partials = torch.stack(
        [
            kernel.max_softmax_partial(
                keep_stride(logits[:, a:b], device), temperature=heat.to(device), first_id=a,
                tiling=TILES,
            )
            for a, b in pairwise(edges)
        ]
    )  # fmt: skip
    confidence, tokens = kernel.combine_partials(partials, temperature=heat.to(device))
    expected = naive.max_softmax(logits, temperature=heat)
    torch.testing.assert_close(confidence.cpu(), expected[0], rtol=RTOL, atol=0)
    torch.testing.assert_close(tokens.cpu(), expected[1], rtol=0, atol=0)


def test_the_oracle_is_the_softmax_of_torch() -> None:
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(0)) * 5
    confidence, tokens = naive.max_softmax(logits)
    expected = torch.softmax(logits.double(), -1).max(-1)
    torch.testing.assert_close(confidence.double(), expected.values, rtol=1e-6, atol=0)
    torch.testing.assert_close(tokens, expected.indices)


def test_a_tie_across_a_tile_edge_goes_to_the_lower_id(device: torch.device) -> None:
    logits = torch.zeros(4, 400)
    for row, ids in enumerate([(15, 16), (63, 64), (127, 300), (0, 399)]):
        logits[row, list(ids)] = 5.0
    assert both(logits, device)[1].tolist() == [15, 63, 127, 0]


def test_a_certain_token_and_an_even_row(device: torch.device) -> None:
    logits = torch.full((2, 250), -1e4)
    logits[0, 77] = 88.0
    logits[1] = 3.0
    confidence, tokens = both(logits, device)
    assert confidence[0] == 1.0 and tokens.tolist() == [77, 0]
    torch.testing.assert_close(confidence[1].item(), 1 / 250, rtol=1e-6, atol=0)


def test_masked_entries_count_for_nothing(device: torch.device) -> None:
    logits = torch.full((1, 300), -INF)
    logits[0, [40, 290]] = torch.tensor([1.0, 1.0])
    confidence, tokens = both(logits, device)
    assert confidence[0] == 0.5 and tokens[0] == 40


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
@pytest.mark.parametrize("vocabulary", [10, 64, 257])
def test_a_row_of_nothing_usable_has_confidence_zero_and_a_token(
    value: float, vocabulary: int, device: torch.device
) -> None:
    logits = torch.full((3, vocabulary), value)
    logits[1] = 0.0
    logits[1, 7] = 2.0
    confidence, tokens = both(logits, device)
    assert confidence[[0, 2]].tolist() == [0.0, 0.0] and confidence[1] > 0
    assert tokens.tolist() == [0, 7, 0]


def test_one_nan_spoils_its_row_only(device: torch.device) -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(2))
    logits[1, 150] = math.nan
    logits[1, 3] = 9.0
    confidence, tokens = both(logits, device)
    assert confidence[1] == 0 and tokens[1] == 3
    assert (confidence[[0, 2]] > 0).all()


def test_a_draft_vocabulary_maps_to_target_ids(device: torch.device) -> None:
    offsets = torch.tensor([0, 1, 3, 5])  # draft ids 0..3 are target ids 0, 2, 5, 8
    _, tokens = both(torch.tensor([[0.0, 1.0, 4.0, 2.0]]), device, d2t=offsets)
    assert tokens.tolist() == [5]
    check_d2t(offsets, 4, 10)
    check_d2t(None, 10, 10)
    with pytest.raises(ValueError, match=r"d2t is missing.*4 tokens and the target 10"):
        check_d2t(None, 4, 10)
    with pytest.raises(ValueError, match=r"d2t\[2\] = 9 maps draft id 2 to 11, outside"):
        check_d2t(torch.tensor([0, 1, 9, 5]), 4, 10)
    with pytest.raises(ValueError, match=r"d2t must be \[4\]"):
        check_d2t(torch.tensor([0, 1, 3]), 4, 10)


def test_a_whole_vocabulary_in_bfloat16(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(3, 151936, generator=generator) * 3).to(torch.bfloat16)
    both(logits, device, tiling=kernel.Tiling())


def test_a_step_holds_no_array_of_the_vocabulary(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("counts the CUDA allocator's bytes")
    logits = torch.randn(64, 131072, device=device)
    kernel.max_softmax(logits)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kernel.max_softmax(logits)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 100


def test_runs_repeat_bit_for_bit(device: torch.device) -> None:
    logits = torch.randn(5, 800, generator=torch.Generator().manual_seed(6))
    first = both(logits, device)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(first, both(logits, device), strict=True))


def test_no_rows_give_no_results(device: torch.device) -> None:
    confidence, tokens = kernel.max_softmax(torch.zeros(0, 50, device=device))
    assert confidence.shape == tokens.shape == (0,)


@pytest.mark.parametrize(
    ("logits", "temperature", "message"),
    [
        (torch.zeros(2, 3, 4), None, "logits must be"),
        (torch.zeros(4, 6).T, None, "contiguous rows"),
        (torch.zeros(2, 6), torch.ones(3), r"temperature must be \[2\]"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_by_name(
    logits: torch.Tensor, temperature: torch.Tensor | None, message: str
) -> None:
    for implementation in (naive, kernel):
        with pytest.raises(ValueError, match=message):
            implementation.max_softmax(logits, temperature=temperature)


@pytest.mark.parametrize(
    ("dtype", "rows", "vocabulary", "expected"),
    [
        (torch.bfloat16, 2048, 151936, kernel.HALF),
        (torch.bfloat16, 256, 151936, kernel.HALF_FEW_ROWS),
        (torch.float16, 32, 151936, kernel.HALF_FEW_ROWS),
        (torch.float32, 1024, 131072, kernel.Tiling()),
        (torch.float32, 1024, 32000, kernel.NARROW),
    ],
)
def test_tilings_on_cuda_are_those_that_were_timed(
    dtype: torch.dtype, rows: int, vocabulary: int, expected: kernel.Tiling
) -> None:
    assert kernel.default_tiling(dtype, torch.device("cuda"), rows, vocabulary) == expected
    assert kernel.default_tiling(dtype, torch.device("cpu"), rows, vocabulary) == kernel.Tiling()


@pytest.mark.parametrize("tiling", [kernel.HALF, kernel.HALF_FEW_ROWS, kernel.NARROW])
def test_tilings_on_cuda(tiling: kernel.Tiling, device: torch.device) -> None:
    logits = torch.randn(3, 9001, generator=torch.Generator().manual_seed(1))
    both(logits if tiling == kernel.NARROW else logits.bfloat16(), device, tiling=tiling)
