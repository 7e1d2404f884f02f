"""`conv_verify` for CUDA and Ascend. Contract and window layout: `naive.py`.

A program serves a block of channels of one request and walks its rows; a channel's history stays in
registers, so each input is read once. Every load and store of a window has the same layout of
channels over threads: a thread overwrites only entries that it alone has read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import grid

MIN_WIDTH, MAX_WIDTH = 2, 4


@triton.jit
def conv_verify_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    window_ptr,
    query_start_loc_ptr,
    slots_ptr,
    accepted_ptr,
    out_ptr,
    num_requests,
    x_row,
    out_row,
    weight_channel,
    weight_tap,
    window_slot,
    window_entry,
    MAX_START: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: any size up to requests * channel blocks; programs stride over them."""
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    for work in range(tl.program_id(0), num_requests * BLOCKS, tl.num_programs(0)):
        request = work // BLOCKS
        channel = (work % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < D
        begin = tl.load(query_start_loc_ptr + request).to(tl.int64)
        num_rows = (tl.load(query_start_loc_ptr + request + 1) - begin).to(tl.int32)
        slot = tl.load(slots_ptr + request).to(tl.int64)
        accepted = tl.load(accepted_ptr + request).to(tl.int32)
        if (slot > 0) & (num_rows > 0) & (accepted > 0):
            start = tl.minimum(accepted - 1, MAX_START)
            window = window_ptr + slot * window_slot + channel
            newest = window + (start + WIDTH - 2) * window_entry
            # All loads before the first store: the compiler cannot move one across it.
            x_at = x_ptr + begin * x_row + channel
            next0 = tl.load(x_at, mask=inside, other=0.0)
            second = channel < tl.where(num_rows > 1, D, 0)
            next1 = tl.load(x_at + x_row, mask=second, other=0.0)
            third = channel < tl.where(num_rows > 2, D, 0)
            next2 = tl.load(x_at + 2 * x_row, mask=third, other=0.0)
            past1 = tl.load(newest, mask=inside, other=0.0)
            if WIDTH >= 3:
                past2 = tl.load(newest - window_entry, mask=inside, other=0.0)
            if WIDTH >= 4:
                past3 = tl.load(newest - 2 * window_entry, mask=inside, other=0.0)
            weight = weight_ptr + channel * weight_channel
            weight0 = tl.load(weight + (WIDTH - 1) * weight_tap, mask=inside, other=0.0)
            weight0 = weight0.to(tl.float32)
            weight1 = tl.load(weight + (WIDTH - 2) * weight_tap, mask=inside, other=0.0)
            weight1 = weight1.to(tl.float32)
            if WIDTH >= 3:
                weight2 = tl.load(weight + (WIDTH - 3) * weight_tap, mask=inside, other=0.0)
                weight2 = weight2.to(tl.float32)
            if WIDTH >= 4:
                weight3 = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
            if WIDTH == 4:
                tl.store(window, past2, mask=inside)
            if WIDTH >= 3:
                tl.store(window + (WIDTH - 3) * window_entry, past1, mask=inside)

            out_at = out_ptr + begin * out_row + channel
            window += (WIDTH - 2) * window_entry
            for t in range(0, num_rows):
                x = next0
                next0 = next1
                next1 = next2
                ahead = channel < tl.where(t + 3 < num_rows, D, 0)
                next2 = tl.load(x_at + (t + 3) * x_row, mask=ahead, other=0.0)
                total = x.to(tl.float32) * weight0 + past1.to(tl.float32) * weight1
                if WIDTH >= 3:
                    total += past2.to(tl.float32) * weight2
                if WIDTH >= 4:
                    total += past3.to(tl.float32) * weight3
                if HAS_BIAS:
                    total += bias
                if SILU:
                    total = total / (1.0 + tl.exp(-total))
                tl.store(out_at + t * out_row, total.to(out_ptr.dtype.element_ty), mask=inside)
                kept = x.to(window_ptr.dtype.element_ty)
                tl.store(window + t * window_entry, kept, mask=inside)
                if WIDTH >= 4:
                    past3 = past2
                if WIDTH >= 3:
                    past2 = past1
                past1 = kept


@dataclass(frozen=True)
class ConvConfig:
    """block: channels of one program; num_warps: CUDA only."""

    block: int = 256
    num_warps: int = 2


def conv_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    silu: bool = True,
    out: Tensor | None = None,
    config: ConvConfig | None = None,
) -> Tensor:
    """As `naive.conv_verify`, with all lengths, slots and counts read from device memory.

    Args:
        x: [N, D] and windows: [slots, L, D], the same dtype, channels contiguous.
        weight: [D, W], W from 2 to 4, any strides.
        out: [N, D], may be x; rows of no request keep what they hold. None: new zeros.

    Returns:
        out.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel does not take. A window that is too
            short for a request's rows is not seen here: L >= W - 2 + rows is the caller's promise.
    """
    width = weight.shape[1]
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ValueError(f"weight must be [D, {MIN_WIDTH} to {MAX_WIDTH}], got {weight.shape}")
    if x.dtype != windows.dtype:
        raise ValueError(f"x is {x.dtype} but windows are {windows.dtype}")
    if x.stride(1) != 1 or windows.stride(2) != 1 or windows.shape[1] < width - 1:
        raise ValueError(
            f"x and windows must have contiguous channels and windows at least {width - 1} "
            f"entries, got strides {x.stride()} and {windows.stride()}, shape {windows.shape}"
        )
    out = torch.zeros_like(x, memory_format=torch.contiguous_format) if out is None else out
    requests, channels = slots.shape[0], x.shape[1]
    if requests == 0:
        return out
    config = config or ConvConfig()
    block = min(config.block, triton.next_power_of_2(channels))
    conv_verify_kernel[grid(requests * triton.cdiv(channels, block), x.device)](
        x, weight, weight if bias is None else bias, windows, query_start_loc, slots,
        num_accepted, out, requests, x.stride(0), out.stride(0), *weight.stride(),
        windows.stride(0), windows.stride(1), MAX_START=windows.shape[1] - (width - 1), D=channels,
        WIDTH=width, HAS_BIAS=bias is not None, SILU=silu, BLOCK=block, num_warps=config.num_warps,
    )  # fmt: skip
    return out
