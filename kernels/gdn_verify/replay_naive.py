"""Oracle of the replay layout: token by token, in the dtype of `work` (float64 by default).

Per value head, with committed state S, decay a = exp(g), gate b, unit-norm k, scaled q:

    u_t = b_t (v_t - a_t S_{t-1} k_t)    S_t = a_t S_{t-1} + u_t k_t^T    o_t = S_t q_t

and with c_t = a_1 ... a_t and a start state S_0, all rows of a step at once:

    (I + L) U = diag(b) (V - diag(c) K S_0^T)     L_tj = b_t (c_t / c_j) k_j.k_t     j < t
    O = diag(c) Q S_0^T + M U                     M_tj = (c_t / c_j) k_j.q_t         j <= t
    S_n = c_n S_0 + sum_{j <= n} (c_n / c_j) u_j k_j^T

so accepted rows can be applied later from (k, u, g) alone, which is what the ring holds.
Source: Gated Delta Networks, arXiv 2412.06464; the same system as chunked prefill, with one chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import NULL_SLOT, ReplayCache, StepCursor

NORM_EPSILON = 1e-6


def gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, work: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(log decay, beta) of rows: -exp(A_log) softplus(a + dt_bias) and sigmoid(b)."""
    softplus = torch.nn.functional.softplus(a.to(work) + dt_bias.to(work), threshold=40.0)
    return -A_log.to(work).exp() * softplus, torch.sigmoid(b.to(work))


def inverse_norm(x: Tensor, work: torch.dtype) -> Tensor:
    """1 / |x| along the last axis, epsilon inside the root as in vLLM's kernels."""
    return torch.rsqrt((x.to(work) ** 2).sum(-1) + NORM_EPSILON)


def replay_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    step: StepCursor,
    cache: ReplayCache,
    out: Tensor | None = None,
    max_rows: int | None = None,
    scale: float | None = None,
    work: torch.dtype = torch.float64,
) -> Tensor:
    """As `replay.replay_verify`, without need of max_rows.

    The cache may hold any float dtype: float64 shows a kernel's errors.
    """
    out = torch.zeros_like(v) if out is None else out
    group = v.shape[1] // q.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    log_decay, beta = gates(a, b, A_log, dt_bias, work)
    key_norm = inverse_norm(k, work)
    keys = (k.to(work) * key_norm[..., None]).repeat_interleave(group, 1)
    queries = (q.to(work) * inverse_norm(q, work)[..., None] * scale).repeat_interleave(group, 1)
    for request, slot in enumerate(slots.tolist()):
        first, last = query_start_loc[request : request + 2].tolist()
        if slot <= NULL_SLOT or first >= last:
            continue
        start, pending = int(step.start[request]), int(step.pending[request])
        committed = cache.state[slot].to(work)
        state = folded = replayed(committed, cache, slot, start, pending, work)
        for t, token in enumerate(range(first, last)):
            state = state * log_decay[token].exp()[:, None, None]
            read = torch.einsum("hvk,hk->hv", state, keys[token])
            update = beta[token][:, None] * (v[token].to(work) - read)
            state = state + update[:, :, None] * keys[token][:, None, :]
            out[token] = torch.einsum("hvk,hk->hv", state, queries[token]).to(out.dtype)
            place = (start + pending + t) % cache.keys.shape[2]
            cache.keys[slot, :, place] = k[token].to(cache.keys.dtype)
            cache.key_norm[slot, :, place] = key_norm[token].to(cache.key_norm.dtype)
            cache.updates[slot, :, place] = update.to(cache.updates.dtype)
            cache.log_decay[slot, :, place] = log_decay[token].to(cache.log_decay.dtype)
        if int(step.flush[request]) and pending:
            cache.state[slot] = folded.to(cache.state.dtype)
    return out


def replay_flush(
    slots: Tensor, step: StepCursor, cache: ReplayCache, work: torch.dtype = torch.float64
) -> None:
    """As `replay.replay_flush`."""
    for request, slot in enumerate(slots.tolist()):
        start, pending = int(step.start[request]), int(step.pending[request])
        if slot > NULL_SLOT and pending:
            folded = replayed(cache.state[slot].to(work), cache, slot, start, pending, work)
            cache.state[slot] = folded.to(cache.state.dtype)


def replayed(
    state: Tensor, cache: ReplayCache, slot: int, start: int, pending: int, work: torch.dtype
) -> Tensor:
    """`state` [HV, dv, dk] after `pending` rows of the slot's ring, the first at `start`."""
    group = cache.updates.shape[1] // cache.keys.shape[1]
    for place in ((start + i) % cache.keys.shape[2] for i in range(pending)):
        key = cache.keys[slot, :, place].to(work) * cache.key_norm[slot, :, place, None].to(work)
        update = cache.updates[slot, :, place].to(work)
        decay = cache.log_decay[slot, :, place].to(work).exp()
        rank_one = update[:, :, None] * key.repeat_interleave(group, 0)[:, None, :]
        state = state * decay[:, None, None] + rank_one
    return state
