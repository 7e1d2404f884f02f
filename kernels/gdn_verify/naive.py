"""Gated delta rule over ragged rows, token by token: the oracle of every `gdn_verify` kernel.

Per value head, with state S of shape [dv, dk], decay a = exp(g), gate b, unit-norm k, scaled q:

    u_t = b_t (v_t - a_t S_{t-1} k_t)    S_t = a_t S_{t-1} + u_t k_t^T    o_t = S_t q_t

Source: Gated Delta Networks, arXiv 2412.06464.

Shapes: q, k [N, HK, dk]; v and the output [N, HV, dv]; log_decay, beta [N, HV]; states
[slots, HV, dv, dk], updated in place; query_start_loc [R + 1]. HV is a multiple of HK. Computation
is float64 if the states are, otherwise float32; the output has v's dtype.

Slot 0 is vLLM's null block: it is never read nor written.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

NULL_SLOT = 0
NORM_EPSILON = 1e-6


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
    """Run the verification rows of R requests, keeping the state after each row.

    A request's rows are its last token and its draft tokens, 0 to C of them. It starts from the
    state after the tokens that it accepted last time (column `num_accepted - 1`), whatever it
    drafts now, and writes the state after its row t to column t. A request with no rows, with
    nothing accepted (a discarded step), or with a null start slot changes nothing, and its output
    is zero; so do the padding entries of a captured graph.

    Args:
        state_indices: [R, C] slot of each column; any strides.
        num_accepted: [R] tokens emitted by the previous step, bonus token included.

    Returns:
        [N, HV, dv].

    Raises:
        ValueError: a request has more rows than columns, or accepted more than it has columns.
    """
    out = torch.zeros_like(v)
    inputs = _prepared(q, k, v, log_decay, beta, states)
    for request, (first, last) in enumerate(_bounds(query_start_loc)):
        columns = state_indices[request].tolist()
        accepted = int(num_accepted[request])
        if max(last - first, accepted) > len(columns):
            raise ValueError(
                f"request {request}: {last - first} rows, {accepted} accepted, but state_indices "
                f"has {len(columns)} columns"
            )
        if first == last or accepted <= 0 or columns[accepted - 1] <= NULL_SLOT:
            continue
        state = states[columns[accepted - 1]].to(inputs[0].dtype)
        for token, column in zip(range(first, last), columns, strict=False):
            state, out[token] = _step(state, token, inputs, out.dtype)
            if column > NULL_SLOT:
                states[column] = state.to(states.dtype)
    return out


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
    """Run R prompt chunks (or plain decode rows), keeping only the state after the last row.

    Args:
        slots: [R] slot read and written. has_initial_state: [R] bool; False starts from zero,
            whatever the recycled slot holds.

    Returns:
        [N, HV, dv]; zero for a request whose slot is null.
    """
    out = torch.zeros_like(v)
    inputs = _prepared(q, k, v, log_decay, beta, states)
    for request, (first, last) in enumerate(_bounds(query_start_loc)):
        slot = int(slots[request])
        if first == last or slot <= NULL_SLOT:
            continue
        state = states[slot].to(inputs[0].dtype)
        if not bool(has_initial_state[request]):
            state = torch.zeros_like(state)
        for token in range(first, last):
            state, out[token] = _step(state, token, inputs, out.dtype)
        states[slot] = state.to(states.dtype)
    return out


def normalised(x: Tensor) -> Tensor:
    """x / |x| along the last axis, with the epsilon of vLLM's kernels inside the root."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON)


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.float64 if states.dtype == torch.float64 else torch.float32
    group = v.shape[1] // q.shape[1]
    q, k, v, log_decay, beta = (x.to(dtype) for x in (q, k, v, log_decay, beta))
    q = normalised(q) * q.shape[-1] ** -0.5
    k = normalised(k)
    return (
        q.repeat_interleave(group, 1),
        k.repeat_interleave(group, 1),
        v,
        log_decay.exp(),
        beta,
    )


def _step(
    state: Tensor, token: int, inputs: tuple[Tensor, ...], out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    q, k, v, decay, beta = (x[token] for x in inputs)
    state = state * decay[:, None, None]
    update = beta[:, None] * (v - torch.einsum("hvk,hk->hv", state, k))
    state = state + update[:, :, None] * k[:, None, :]
    return state, torch.einsum("hvk,hk->hv", state, q).to(out_dtype)


def _bounds(query_start_loc: Tensor) -> list[tuple[int, int]]:
    starts = query_start_loc.tolist()
    return list(pairwise(starts))
