"""`conv_verify` on a CPU: the native operator where it is built, the oracle otherwise.

Signatures and contract: `naive.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_ascend_spec._native import host as _host

from . import naive

_Filters = tuple[Tensor, Tensor | None, bool]  # weight, bias, silu


class _Plan(NamedTuple):
    """What the native operator does with each request's rows; int64 [R].

    starts, lengths: rows. slots: windows. offsets: first entry of the history, -1 for zeros.
    """

    starts: Tensor
    lengths: Tensor
    slots: Tensor
    offsets: Tensor


def conv_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    silu: bool = True,
) -> Tensor:
    """As `naive.conv_verify`; bfloat16 takes the native operator."""
    if not _native(x, windows):
        return naive.conv_verify(
            x, weight, bias, windows, query_start_loc, slots, num_accepted, silu
        )
    starts, lengths = _rows(query_start_loc)
    accepted = num_accepted.long()
    room = windows.shape[1] - (weight.shape[1] - 2)
    if len(lengths) and int(torch.maximum(lengths, accepted).max()) > room:
        raise ValueError(f"more rows or accepted tokens than the {room} rows that a window holds")
    lengths = lengths.masked_fill((accepted <= 0) | (slots.long() <= naive.NULL_SLOT), 0)
    plan = _Plan(starts, lengths, slots.long().contiguous(), accepted - 1)
    return _run(x, (weight, bias, silu), windows, plan, rewindable=True)


def conv_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    silu: bool = True,
) -> Tensor:
    """As `naive.conv_prefill`; bfloat16 takes the native operator."""
    if not _native(x, windows):
        return naive.conv_prefill(
            x, weight, bias, windows, query_start_loc, slots, has_initial_state, silu
        )
    starts, lengths = _rows(query_start_loc)
    lengths = lengths.masked_fill(slots.long() <= naive.NULL_SLOT, 0)
    offsets = has_initial_state.long() - 1
    plan = _Plan(starts, lengths, slots.long().contiguous(), offsets)
    return _run(x, (weight, bias, silu), windows, plan, rewindable=False)


def _native(x: Tensor, windows: Tensor) -> bool:
    entries_contiguous = windows.stride(2) == 1
    return _host is not None and x.dtype == windows.dtype == torch.bfloat16 and entries_contiguous


def _rows(query_start_loc: Tensor) -> tuple[Tensor, Tensor]:
    boundaries = query_start_loc.long()
    return boundaries[:-1].contiguous(), boundaries.diff()


def _run(x: Tensor, filters: _Filters, windows: Tensor, plan: _Plan, rewindable: bool) -> Tensor:
    weight, bias, silu = filters
    out = torch.zeros(x.shape, dtype=torch.float32)
    _host.conv_rows(
        x.contiguous().view(torch.uint16),
        weight.float().t().contiguous(),
        torch.zeros(x.shape[1]) if bias is None else bias.float(),
        windows.view(torch.uint16),
        *plan,
        rewindable,
        silu,
        out,
    )
    return out.to(x.dtype)
