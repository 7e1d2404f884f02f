"""Oracle of `gated_norm` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu"
) -> Tensor:
    """RMS norm over dv, times weight and the activated gate; in fp32, rounded once, in place.

    What follows the recurrence in a GDN layer (arXiv 2412.06464), the gate applied after the norm.

    Args:
        x: [rows, HV, dv], overwritten. gate: the same shape, any row stride: a view of the
            projection. weight: [dv]. activation: "silu" or "sigmoid".

    Raises:
        ValueError: shapes, strides or an activation that no implementation takes.
    """
    check(x, gate, weight, activation)
    exact = x.float()
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * weight.float()
    opened = gate.float().sigmoid()
    if activation == "silu":
        opened = opened * gate.float()
    return x.copy_(normed * opened)


def check(x: Tensor, gate: Tensor, weight: Tensor, activation: str) -> None:
    """ValueError names what does not fit; reads no device value."""
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f'gated_norm: activation is {activation!r}, not "silu" or "sigmoid"')
    if gate.shape != x.shape or weight.shape != x.shape[2:]:
        raise ValueError(
            f"gated_norm: x is {tuple(x.shape)}, gate {tuple(gate.shape)} and weight "
            f"{tuple(weight.shape)}"
        )
    if not x.is_contiguous() or gate.stride()[1:] != (x.shape[2], 1):
        raise ValueError(
            f"gated_norm: x must be contiguous and gate within a row, got {gate.stride()}"
        )
