"""`gdn_verify` with the arguments of the Triton kernel, for what takes prepared gates.

The oracle and the native CPU operator want a log decay and a beta; a model has a, b, A_log and
dt_bias, and on an accelerator the kernel prepares them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from . import host, naive
from .replay_naive import gates


def _verify(
    verify: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    num_accepted: Tensor,
    out: Tensor | None = None,
    max_rows: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """As `triton.gdn_verify`, by `verify`, which needs no max_rows."""
    work = torch.float64 if states.dtype == torch.float64 else torch.float32
    found = verify(
        q, k, v, *gates(a, b, A_log, dt_bias, work), states, query_start_loc, state_indices,
        num_accepted,
    )  # fmt: skip
    if scale is not None:
        found *= scale * q.shape[-1] ** 0.5  # outputs are linear in q
    if out is None:
        return found
    served = _served(query_start_loc, state_indices, num_accepted, len(v))
    out[served] = found[served].to(out.dtype)
    return out


def _served(
    query_start_loc: Tensor, state_indices: Tensor, num_accepted: Tensor, tokens: int
) -> Tensor:
    """bool [N]: rows of requests that have a start state; others keep what `out` holds."""
    column = (num_accepted.long() - 1).clamp(min=0)[:, None]
    starts = state_indices.long().gather(1, column)[:, 0]
    active = (num_accepted > 0) & (starts > naive.NULL_SLOT)
    served = torch.zeros(tokens, dtype=torch.bool, device=query_start_loc.device)
    boundaries = query_start_loc.tolist()
    for request, serves in enumerate(active.tolist()):
        served[boundaries[request] : boundaries[request + 1]] = serves
    return served


naive_verify = partial(_verify, naive.gdn_verify)
host_verify = partial(_verify, host.gdn_verify)
