"""Replay-layout verification for CUDA and Ascend: each state is read once, and only read.

One program serves a group of value heads of one request: it solves their small systems together
(`triton_system.py`), appends the step's rows to the ring, and then streams the states of its heads
through the matrix unit, with the pending rows as extra rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_system import (
    dot_exact_left,
    dot_exact_right,
    dot_fp32,
    dot_state,
    load_rows,
    pick_head,
    prepare_heads,
)

_HALF_LIMIT = tl.constexpr(65504.0)


@triton.jit
def load_tile(
    state_base,
    q_base,
    k_base,
    v_base,
    keys_base,
    updates_base,
    q_row,
    k_row,
    v_row,
    first_head,
    tile,
    num_rows,
    place,
    is_pending,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
    BV: tl.constexpr,
):
    """What tile `tile` (a head's block of BV state rows) needs: state, [K; Q], ring rows, v^T."""
    h = tile // (DV // BV)
    key_head = (first_head + h) // GROUP
    ring_head = key_head - first_head // GROUP
    row = tl.arange(0, 2 * T)
    channel = tl.arange(0, DK)
    value = (tile % (DV // BV)) * BV + tl.arange(0, BV)
    state = tl.load(state_base + h * (DV * DK) + value[:, None] * DK + channel[None, :])
    x = load_rows(q_base, k_base, q_row, k_row, key_head, row, num_rows, DK, T)
    keys = tl.load(
        keys_base + ring_head * (W * DK) + place[:, None] * DK + channel[None, :],
        mask=is_pending[:, None],
        other=0.0,
    )
    updates = tl.load(
        updates_base + h * (W * DV) + place[:, None] * DV + value[None, :],
        mask=is_pending[:, None],
        other=0.0,
    )
    v = tl.load(
        v_base + h * DV + row[None, :] * v_row + value[:, None],
        mask=(row < tl.minimum(num_rows, T))[None, :],
        other=0.0,
    )
    return state, x, keys, updates, v


@triton.jit
def suffix_sums(values, N: tl.constexpr):
    """Of each row of [heads, N]: the sum of the entries after each one."""
    lane = tl.arange(0, N)
    after = lane[:, None] > lane[None, :]
    return tl.sum(tl.where(after[None, :, :], values[:, :, None], 0.0), axis=1)


@triton.jit
def fold_tile(state, updates, keys, weight, decay, PARTS: tl.constexpr):
    """decay * state + sum_j weight_j u_j k_j^T, [dv, dk]; updates [W, dv], keys [W, dk]."""
    weighted = tl.trans(updates.to(tl.float32) * weight[:, None])
    return dot_exact_right(weighted, keys, state.to(tl.float32) * decay, PARTS)


@triton.jit
def replay_verify_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    query_start_loc_ptr,
    slots_ptr,
    start_ptr,
    pending_ptr,
    flush_ptr,
    state_ptr,
    key_ring_ptr,
    update_ring_ptr,
    decay_ring_ptr,
    norm_ring_ptr,
    out_ptr,
    num_requests,
    scale,
    q_row,
    k_row,
    v_row,
    gate_row,
    out_row,
    state_slot,
    key_slot,
    update_slot,
    decay_slot,
    norm_slot,
    HV: tl.constexpr,
    HK: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    W: tl.constexpr,
    W2: tl.constexpr,
    T: tl.constexpr,
    HEADS: tl.constexpr,
    BV: tl.constexpr,
    FOLD_BV: tl.constexpr,
    FOLD_DK: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: any size up to num_requests * HV / HEADS; programs stride over (request, heads)."""
    X: tl.constexpr = 2 * T
    GROUP: tl.constexpr = HV // HK
    KEY_HEADS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    FP32_STATE: tl.constexpr = state_ptr.dtype.element_ty == tl.float32
    head = tl.arange(0, HEADS)
    row = tl.arange(0, X)
    t = row % T
    is_query = row >= T
    source = tl.arange(0, T)
    ring = tl.arange(0, W2)
    channel = tl.arange(0, DK)
    for work in range(tl.program_id(0), num_requests * (HV // HEADS), tl.num_programs(0)):
        request = work // (HV // HEADS)
        first_head = (work % (HV // HEADS)) * HEADS
        first_key_head = first_head // GROUP
        slot = tl.load(slots_ptr + request).to(tl.int64)
        begin = tl.load(query_start_loc_ptr + request).to(tl.int64)
        num_rows = (tl.load(query_start_loc_ptr + request + 1) - begin).to(tl.int32)
        start = tl.load(start_ptr + request)
        pending = tl.load(pending_ptr + request)
        flush = tl.load(flush_ptr + request)
        if (slot > 0) & (num_rows > 0):
            state_base = state_ptr + slot * state_slot + first_head * (DV * DK)
            keys_base = key_ring_ptr + slot * key_slot + first_key_head * (W * DK)
            updates_base = update_ring_ptr + slot * update_slot + first_head * (W * DV)
            decays_base = decay_ring_ptr + slot * decay_slot + (first_head + head[:, None]) * W
            norms_base = norm_ring_ptr + slot * norm_slot
            q_base = q_ptr + begin * q_row
            k_base = k_ptr + begin * k_row
            v_base = v_ptr + begin * v_row + first_head * DV
            out_base = out_ptr + begin * out_row + first_head * DV
            gate_at = begin * gate_row + first_head

            is_pending = ring < pending
            place = (start + ring) % W
            pending_log_decay = tl.load(
                decays_base + place[None, :], mask=is_pending[None, :], other=0.0
            )
            pending_norm = tl.load(
                norms_base + ((first_head + head[:, None]) // GROUP) * W + place[None, :],
                mask=is_pending[None, :], other=0.0,
            )  # fmt: skip
            inverse, from_pending, beta, log_decay, keys, key_norm = prepare_heads(
                q_base, k_base, a_ptr + gate_at, b_ptr + gate_at, A_log_ptr, dt_bias_ptr, q_row,
                k_row, gate_row, first_head, num_rows, scale, HEADS, GROUP, DK, T,
            )  # fmt: skip
            total_pending = tl.sum(pending_log_decay, axis=1)
            from_state = from_pending * tl.exp(total_pending)[:, None]
            pending_weight = pending_norm * tl.exp(suffix_sums(pending_log_decay, W2))

            # Append what later steps replay; pending + rows <= W, so no pending row is overwritten.
            new_place = (start + pending + source) % W
            tl.store(decays_base + new_place[None, :], log_decay, mask=(source < num_rows)[None, :])
            if first_head % GROUP == 0:
                key_head = tl.arange(0, KEY_HEADS)
                tl.store(
                    norms_base + (first_key_head + key_head)[:, None] * W + new_place[None, :],
                    key_norm, mask=(source < num_rows)[None, :],
                )  # fmt: skip
                stacked = tl.arange(0, KEY_HEADS * T)
                new_key = (stacked // T) * W + (start + pending + stacked % T) % W
                tl.store(
                    keys_base + new_key[:, None] * DK + channel[None, :],
                    keys, mask=(stacked % T < num_rows)[:, None],
                )  # fmt: skip

            new_place = (start + pending + t) % W
            tiles = HEADS * (DV // BV)
            for tile in tl.range(0, tiles, num_stages=STAGES):
                h = tile // (DV // BV)
                value = (tile % (DV // BV)) * BV + tl.arange(0, BV)
                state, x, ring_keys, ring_updates, v = load_tile(
                    state_base, q_base, k_base, v_base, keys_base, updates_base, q_row, k_row,
                    v_row, first_head, tile, num_rows, place, is_pending, GROUP, DK, DV, W, T, BV,
                )  # fmt: skip

                y = dot_state(state, x) * pick_head(from_state, h, HEADS)[None, :]
                weight = tl.dot(ring_keys, tl.trans(x))
                weight *= pick_head(pending_weight, h, HEADS)[:, None]
                weight *= pick_head(from_pending, h, HEADS)[None, :]
                if FP32_STATE:
                    y += dot_fp32(tl.trans(ring_updates), weight, PRECISION)
                else:
                    y = dot_exact_left(tl.trans(ring_updates), weight, y)
                right = pick_head(beta, h, HEADS)[None, :] * (v.to(tl.float32) - y)
                right = tl.where(is_query[None, :], 0.0, right)
                system = tl.trans(pick_head(inverse, h, HEADS))
                z = dot_fp32(right, system, PRECISION) + tl.where(is_query[None, :], y, 0.0)

                live = (t < num_rows)[None, :]
                tl.store(
                    out_base + h * DV + t[None, :] * out_row + value[:, None],
                    z.to(out_ptr.dtype.element_ty), mask=live & is_query[None, :],
                )  # fmt: skip
                if update_ring_ptr.dtype.element_ty == tl.float16:
                    z = tl.minimum(tl.maximum(z, -_HALF_LIMIT), _HALF_LIMIT)
                tl.store(
                    updates_base + h * (W * DV) + new_place[None, :] * DV + value[:, None],
                    z.to(update_ring_ptr.dtype.element_ty), mask=live & (row < T)[None, :],
                )  # fmt: skip

            if (flush != 0) & (pending > 0):
                fold_heads(
                    state_base, keys_base, updates_base, place, is_pending, pending_weight,
                    tl.exp(total_pending), first_head, HEADS, GROUP, DK, DV, W, FOLD_BV, FOLD_DK,
                    3 if FP32_STATE else 2,
                )  # fmt: skip


@triton.jit
def fold_heads(
    state_base,
    keys_base,
    updates_base,
    place,
    is_pending,
    pending_weight,
    decay,
    first_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    W: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write each head's state after its pending rows; the state itself comes out of the cache."""
    TILES: tl.constexpr = (DV // BV) * (DK // BK)
    head = tl.arange(0, HEADS)
    for tile in tl.range(0, HEADS * TILES):
        h = tile // TILES
        key_head = (first_head + h) // GROUP - first_head // GROUP
        value = ((tile % TILES) // (DK // BK)) * BV + tl.arange(0, BV)
        channel = (tile % (DK // BK)) * BK + tl.arange(0, BK)
        at = state_base + h * (DV * DK) + value[:, None] * DK + channel[None, :]
        state = tl.load(at)
        keys = tl.load(
            keys_base + key_head * (W * DK) + place[:, None] * DK + channel[None, :],
            mask=is_pending[:, None],
            other=0.0,
        )
        updates = tl.load(
            updates_base + h * (W * DV) + place[:, None] * DV + value[None, :],
            mask=is_pending[:, None],
            other=0.0,
        )
        weight = pick_head(pending_weight, h, HEADS)
        head_decay = tl.sum(tl.where(head == h, decay, 0.0), axis=0)
        folded = fold_tile(state, updates, keys, weight, head_decay, PARTS)
        tl.store(at, folded.to(state_base.dtype.element_ty))


@triton.jit
def replay_flush_kernel(
    slots_ptr,
    start_ptr,
    pending_ptr,
    state_ptr,
    key_ring_ptr,
    update_ring_ptr,
    decay_ring_ptr,
    norm_ring_ptr,
    num_requests,
    state_slot,
    key_slot,
    update_slot,
    decay_slot,
    norm_slot,
    HV: tl.constexpr,
    HK: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    W: tl.constexpr,
    W2: tl.constexpr,
    HEADS: tl.constexpr,
    FOLD_BV: tl.constexpr,
    FOLD_DK: tl.constexpr,
):
    """Fold without a step: checkpoint, prefix-cache block, hand-over to prefill."""
    GROUP: tl.constexpr = HV // HK
    head = tl.arange(0, HEADS)
    ring = tl.arange(0, W2)
    for work in range(tl.program_id(0), num_requests * (HV // HEADS), tl.num_programs(0)):
        request = work // (HV // HEADS)
        first_head = (work % (HV // HEADS)) * HEADS
        slot = tl.load(slots_ptr + request).to(tl.int64)
        pending = tl.load(pending_ptr + request)
        if (slot > 0) & (pending > 0):
            place = (tl.load(start_ptr + request) + ring) % W
            is_pending = ring < pending
            value_head = first_head + head[:, None]
            log_decay = tl.load(
                decay_ring_ptr + slot * decay_slot + value_head * W + place[None, :],
                mask=is_pending[None, :], other=0.0,
            )  # fmt: skip
            norm = tl.load(
                norm_ring_ptr + slot * norm_slot + (value_head // GROUP) * W + place[None, :],
                mask=is_pending[None, :], other=0.0,
            )  # fmt: skip
            fold_heads(
                state_ptr + slot * state_slot + first_head * (DV * DK),
                key_ring_ptr + slot * key_slot + (first_head // GROUP) * (W * DK),
                update_ring_ptr + slot * update_slot + first_head * (W * DV),
                place, is_pending, norm * tl.exp(suffix_sums(log_decay, W2)),
                tl.exp(tl.sum(log_decay, axis=1)), first_head, HEADS, GROUP, DK, DV, W, FOLD_BV,
                FOLD_DK, 3 if state_ptr.dtype.element_ty == tl.float32 else 2,
            )  # fmt: skip
