"""`gated_norm` in one launch that reads the gate where the projection left it.

vLLM's own operator takes a contiguous gate, so every layer copies one: as many bytes again as the
norm itself reads, and a launch. Contract: `gated_norm_naive.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .._launch import grid
from .gated_norm_naive import check

_LINES = 8  # heads of rows a program


@triton.jit
def gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    lines,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LINES: tl.constexpr,
    SILU: tl.constexpr,
):
    """LINES heads a program, as one [LINES, DIM] tile."""
    column = tl.arange(0, DIM)
    weight = tl.load(weight_ptr + column).to(tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(lines, LINES), tl.num_programs(0)):
        line = (block * LINES + tl.arange(0, LINES)).to(tl.int64)
        real = (line < lines)[:, None] & (column < DIM)[None, :]
        place = line[:, None] * DIM + column[None, :]
        x = tl.load(x_ptr + place, mask=real, other=0.0).to(tl.float32)
        inside = (line // HEADS * gate_stride + line % HEADS * DIM)[:, None] + column[None, :]
        gate = tl.load(gate_ptr + inside, mask=real, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
        opened = tl.sigmoid(gate)
        if SILU:
            opened = opened * gate
        result = x * scale[:, None] * weight[None, :] * opened
        tl.store(x_ptr + place, result.to(x_ptr.dtype.element_ty), mask=real)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu"
) -> Tensor:
    """As `gated_norm_naive.gated_norm`; dv must be a power of two."""
    check(x, gate, weight, activation)
    rows, heads, dim = x.shape
    if dim & (dim - 1):
        raise ValueError(f"gated_norm: dv is {dim}, not a power of two")
    if x.numel():
        gated_norm_kernel[grid(triton.cdiv(rows * heads, _LINES), x.device)](
            x, gate, weight, rows * heads, gate.stride(0), eps,
            HEADS=heads, DIM=dim, LINES=_LINES, SILU=activation == "silu", num_warps=4,
        )  # fmt: skip
    return x
