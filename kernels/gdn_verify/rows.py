"""What the launchers of both layouts ask of a step's rows."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 8  # rows of K in a tile; with as many of Q they fill the 16 rows of a matrix unit


def checked_rows(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, out: Tensor | None
) -> tuple[Tensor, tuple[int, int, int, int, int]]:
    """(outputs, new zeros if `out` is None; row strides of q, k, v, the gates and the outputs).

    Reads no device value.

    Raises:
        ValueError: rows that the kernels cannot read.
    """
    if q.dtype != torch.bfloat16 or k.dtype != torch.bfloat16:
        raise ValueError(f"q and k must be bfloat16, got {q.dtype} and {k.dtype}")
    if a.stride() != b.stride() or a.stride(-1) != 1:
        raise ValueError(f"a and b must have the same strides, got {a.stride()} and {b.stride()}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride()[1:] != (x.shape[2], 1):
            raise ValueError(f"{name} must be contiguous within a row, got strides {x.stride()}")
    if out is None:
        out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    return out, (q.stride(0), k.stride(0), v.stride(0), a.stride(0), out.stride(0))
