"""`gdn_verify` on a CPU: the native operator where it is built, the oracle otherwise.

Signatures and contract: `naive.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_ascend_spec._native import host as _host

from . import naive


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
    arguments = (q, k, v, log_decay, beta, states, query_start_loc)
    if not _native(states):
        return naive.gdn_verify(*arguments, state_indices, num_accepted)
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
    return _run(q, k, v, log_decay, beta, states, starts, lengths, source, targets)


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
    arguments = (q, k, v, log_decay, beta, states, query_start_loc)
    if not _native(states):
        return naive.gdn_prefill(*arguments, slots, has_initial_state)
    starts, lengths = _rows(query_start_loc)
    slots = slots.long()
    lengths = lengths.masked_fill(slots <= naive.NULL_SLOT, 0)
    source = slots.masked_fill(~has_initial_state.bool(), -1)
    targets = torch.full((len(v),), -1, dtype=torch.int64)
    real = lengths > 0
    targets[(starts + lengths - 1)[real]] = slots[real]
    return _run(q, k, v, log_decay, beta, states, starts, lengths, source, targets)


def _native(states: Tensor) -> bool:
    return _host is not None and states.dtype == torch.float32 and states[0].is_contiguous()


def _rows(query_start_loc: Tensor) -> tuple[Tensor, Tensor]:
    boundaries = query_start_loc.long()
    return boundaries[:-1].contiguous(), boundaries.diff()


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    starts: Tensor,
    lengths: Tensor,
    source: Tensor,
    targets: Tensor,
) -> Tensor:
    out = torch.zeros(v.shape, dtype=torch.float32)
    _host.gdn_rows(
        naive.normalised(q.float()) * q.shape[-1] ** -0.5,
        naive.normalised(k.float()),
        v.float().contiguous(),
        log_decay.float().exp(),
        beta.float().contiguous(),
        states,
        starts,
        lengths,
        source,
        targets,
        out,
    )
    return out.to(v.dtype)
