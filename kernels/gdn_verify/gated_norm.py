"""`gated_norm` in one launch that reads the gate where the projection left it.

vLLM's own operator takes a contiguous gate, so every layer copies one: as many bytes again as the
norm itself reads, and a launch. Contract: `gated_norm_naive.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    column = tl.arange(0, DIM)
    real = (line < lines)[:, None] & (column < DIM)[None, :]
    row, head = line.to(tl.int64) // HEADS, line % HEADS
    place = line.to(tl.int64)[:, None] * DIM + column[None, :]
    x = tl.load(x_ptr + place, mask=real, other=0.0).to(tl.float32)
    inside = (row * gate_stride + head * DIM)[:, None] + column[None, :]
    gate = tl.load(gate_ptr + inside, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column).to(tl.float32)
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
        gated_norm_kernel[(triton.cdiv(rows * heads, _LINES),)](
            x, gate, weight, rows * heads, gate.stride(0), eps,
            HEADS=heads, DIM=dim, LINES=_LINES, SILU=activation == "silu", num_warps=4,
        )  # fmt: skip
    return x
