"""`gdn_verify` on a CPU: the native operator where it is built, the oracle otherwise.

Signatures and contract: `naive.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_ascend_spec._native import host as _host

from . import naive

_Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, log_decay, beta


class _Plan(NamedTuple):
    """What the native operator does with each request's rows; int64.

    starts, lengths: [R] rows. source: [R] slot of the start state, -1 for zeros. targets: [N] slot
    that the state after a row goes to, -1 for none.
    """

    starts: Tensor
    lengths: Tensor
    source: Tensor
    targets: Tensor


def gdn_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    num_accepted: Tensor,
) -> Tensor:
    """As `naive.gdn_verify`; fp32 states take the native operator."""
    rows = (q, k, v, log_decay, beta)
    if not _native(states):
        return naive.gdn_verify(*rows, states, query_start_loc, state_indices, num_accepted)
    starts, lengths = _rows(query_start_loc)
    accepted = num_accepted.long()
    columns = state_indices.shape[1]
    if len(lengths) and int(torch.maximum(lengths, accepted).max()) > columns:
        raise ValueError(
            f"more rows or accepted tokens than the {columns} columns of state_indices"
        )
    slots = state_indices.long()
    source = slots.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0]
    lengths = lengths.masked_fill((accepted <= 0) | (source <= naive.NULL_SLOT), 0)
    request = torch.repeat_interleave(lengths)
    row = torch.arange(len(request)) - (lengths.cumsum(0) - lengths)[request]
    written = slots[request, row]
    targets = torch.full((len(v),), -1, dtype=torch.int64)
    targets[starts[request] + row] = written.masked_fill(written <= naive.NULL_SLOT, -1)
    return _run(rows, states, _Plan(starts, lengths, source, targets))


def gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """As `naive.gdn_prefill`; fp32 states take the native operator."""
    rows = (q, k, v, log_decay, beta)
    if not _native(states):
        return naive.gdn_prefill(*rows, states, query_start_loc, slots, has_initial_state)
    starts, lengths = _rows(query_start_loc)
    slots = slots.long()
    lengths = lengths.masked_fill(slots <= naive.NULL_SLOT, 0)
    source = slots.masked_fill(~has_initial_state.bool(), -1)
    targets = torch.full((len(v),), -1, dtype=torch.int64)
    real = lengths > 0
    targets[(starts + lengths - 1)[real]] = slots[real]
    return _run(rows, states, _Plan(starts, lengths, source, targets))


def _native(states: Tensor) -> bool:
    return _host is not None and states.dtype == torch.float32 and states[0].is_contiguous()


def _rows(query_start_loc: Tensor) -> tuple[Tensor, Tensor]:
    boundaries = query_start_loc.long()
    return boundaries[:-1].contiguous(), boundaries.diff()


def _run(rows: _Rows, states: Tensor, plan: _Plan) -> Tensor:
    q, k, v, log_decay, beta = rows
    out = torch.zeros(v.shape, dtype=torch.float32)
    _host.gdn_rows(
        naive.normalised(q.float()) * q.shape[-1] ** -0.5,
        naive.normalised(k.float()),
        v.float().contiguous(),
        log_decay.float().exp(),
        beta.float().contiguous(),
        states,
        *plan,
        out,
    )
    return out.to(v.dtype)
