"""Draws of the acceptance model, one launch each: an arm must not pay for what is added to it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SEQUENCE = 1 << 16  # longer than any sequence here
_BLOCK = 256


def noisy(
    drafted: torch.Tensor, slots: torch.Tensor, numbers: torch.Tensor, logits: torch.Tensor,
    scale: float, seed: int,
) -> torch.Tensor:  # fmt: skip
    """Confidences float [R, K] with normal noise on the true logits [2, 7] of the requests.

    slots: int [R]; numbers: int32, the request's number by slot, odd for hard ones.
    """
    found = torch.empty_like(drafted)
    requests, depth = found.shape
    _noisy_kernel[(requests,)](
        found, slots, numbers, logits, seed, found.stride(0),
        K=depth, K2=triton.next_power_of_2(depth), WIDTH=logits.shape[1], NOISE_SCALE=scale,
    )  # fmt: skip
    return found


def judged(
    drafts: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, slots: torch.Tensor,
    numbers: torch.Tensor, chances: torch.Tensor, seed: int,
) -> torch.Tensor:  # fmt: skip
    """The rows int [N], -1 where rejected. positions: 0 for the anchor; places: in the sequence.

    slots: int [N]; numbers: as above.
    """
    kept = torch.empty_like(drafts)
    rows = drafts.numel()
    _coin_kernel[(triton.cdiv(rows, _BLOCK),)](
        kept, drafts, positions, places, slots, numbers, chances, seed, rows,
        WIDTH=chances.shape[1], SEQUENCE=SEQUENCE, BLOCK=_BLOCK,
    )  # fmt: skip
    return kept


@triton.jit(do_not_specialize=["seed"])
def _noisy_kernel(
    noisy_ptr, slots_ptr, numbers_ptr, logits_ptr, seed, stride,
    K: tl.constexpr, K2: tl.constexpr, WIDTH: tl.constexpr, NOISE_SCALE: tl.constexpr,
):  # fmt: skip
    """Confidences of one request a program: the true logit of its class with normal noise."""
    request = tl.program_id(0)
    position = tl.arange(0, K2)
    kind = tl.load(numbers_ptr + tl.load(slots_ptr + request)) % 2
    true = tl.load(logits_ptr + kind * WIDTH + position, mask=position < K, other=0.0)
    noise = NOISE_SCALE * tl.randn(seed, request * K2 + position)
    tl.store(noisy_ptr + request * stride + position, tl.sigmoid(true + noise), mask=position < K)


@triton.jit(do_not_specialize=["seed", "rows"])
def _coin_kernel(
    kept_ptr, drafts_ptr, positions_ptr, places_ptr, slots_ptr, numbers_ptr, chances_ptr, seed,
    rows, WIDTH: tl.constexpr, SEQUENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draft tokens that the model accepts, -1 for the others; position 0 is the bonus token's."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    position = tl.load(positions_ptr + row, mask=real, other=0).to(tl.int32)
    slot = tl.load(slots_ptr + row, mask=real, other=0)
    number = tl.load(numbers_ptr + slot, mask=real, other=0)
    cell = number % 2 * WIDTH + tl.maximum(position - 1, 0)
    rate = tl.load(chances_ptr + cell, mask=real, other=0.0)
    place = tl.load(places_ptr + row, mask=real, other=0).to(tl.int32)
    keep = (position == 0) | (tl.rand(seed, number * SEQUENCE + place) < rate)
    draft = tl.load(drafts_ptr + row, mask=real, other=0)
    tl.store(kept_ptr + row, tl.where(keep, draft, -1), mask=real)
