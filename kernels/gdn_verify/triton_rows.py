"""Native-layout verification row by row: the recurrence itself, for steps whose writes dominate.

A program holds a few rows of one head's state and walks the tokens. Contract and mathematics:
`naive.py`, with the gates fused. Against the matrix form of `triton.py` there is no small system,
which a step of one row does not need; in exchange every row reads its q and k when its turn comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from .triton_system import inverse_norm, log_decay_of, sigmoid_of


@triton.jit
def unit(row, factor):
    """fp32 [1, DK]: a row over its norm, times factor."""
    wide = row[None, :].to(tl.float32)
    return wide * (inverse_norm(wide) * factor)[:, None]


@triton.jit
def load_row(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, column_ptr, q_row, k_row, v_row, gate_row, column_stride,
    row, t, key_at, value_at, head,
):  # fmt: skip
    """What one token needs, as it lies in memory: q, k, v, a, b, and its state's slot."""
    q = tl.load(q_ptr + row * q_row + key_at)
    k = tl.load(k_ptr + row * k_row + key_at)
    v = tl.load(v_ptr + row * v_row + value_at)
    # ascend: two gates and one slot number a row, beside BV * DK numbers of a state
    a = tl.load(a_ptr + row * gate_row + head)
    # ascend: as above
    b = tl.load(b_ptr + row * gate_row + head)
    # ascend: as above
    column = tl.load(column_ptr + t * column_stride)
    return q, k, v, a, b, column


@triton.jit
def one_row(
    state, q, k, v, a, b, A_log, dt_bias, scale,
):  # fmt: skip
    """(outputs, next state) of a single token, both fp32.

    Both products are taken with the state as it was read, so that the wide copy that they need is
    dead before the next state is made: registers are what bounds the programs in flight.
    """
    key, query = unit(k, 1.0), unit(q, scale)
    decay = tl.exp(log_decay_of(a.to(tl.float32), dt_bias, A_log))
    wide = state.to(tl.float32) * decay
    update = sigmoid_of(b.to(tl.float32)) * (v.to(tl.float32) - tl.sum(wide * key, axis=1))
    wide += update[:, None] * key
    return tl.sum(wide * query, axis=1), wide


@triton.jit
def native_rows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    query_start_loc_ptr,
    indices_ptr,
    accepted_ptr,
    state_ptr,
    out_ptr,
    num_requests,
    num_columns,
    scale,
    q_row,
    k_row,
    v_row,
    gate_row,
    out_row,
    indices_row,
    indices_column,
    state_slot,
    HV: tl.constexpr,
    HK: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    ONE_COLUMN: tl.constexpr,
):
    """Grid: any size up to num_requests * HV * DV / BV; programs stride over (request, head, tile).

    Tiles of a state run fastest, so that neighbouring programs read neighbouring memory.
    """
    TILES: tl.constexpr = DV // BV
    channel = tl.arange(0, DK)
    # A tile's own offsets are constants, and its begin one scalar: no lane holds sixteen addresses.
    in_tile = tl.arange(0, BV)[:, None] * DK + channel[None, :]
    for work in range(tl.program_id(0), num_requests * HV * TILES, tl.num_programs(0)):
        head = (work // TILES) % HV
        request = work // (TILES * HV)
        first_value = head * DV + (work % TILES) * BV
        state_at = state_ptr + first_value * DK
        begin = tl.load(query_start_loc_ptr + request).to(tl.int64)
        num_rows = (tl.load(query_start_loc_ptr + request + 1) - begin).to(tl.int32)
        accepted = tl.load(accepted_ptr + request).to(tl.int32)
        columns_at = indices_ptr + request * indices_row
        if ONE_COLUMN:  # the slot does not wait for the count
            slot = tl.load(columns_at).to(tl.int64)
            slot = tl.where(accepted > 0, slot, 0)
        else:
            last = tl.minimum(accepted, num_columns) - 1
            slot = tl.load(columns_at + last * indices_column, mask=accepted > 0, other=0)
            slot = slot.to(tl.int64)
        if (slot > 0) & (num_rows > 0):
            state = tl.load(state_at + slot * state_slot + in_tile)
            key_at = (head // (HV // HK)) * DK + channel
            value_at = first_value + tl.arange(0, BV)
            next_q, next_k, next_v, next_a, next_b, next_column = load_row(
                q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, columns_at, q_row, k_row, v_row, gate_row,
                indices_column, begin, 0, key_at, value_at, head,
            )  # fmt: skip
            A_log = tl.load(A_log_ptr + head).to(tl.float32)
            dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
            if ONE_COLUMN:  # and so one row: no loop, whose state would be kept in fp32
                z, state = one_row(
                    state, next_q, next_k, next_v, next_a, next_b, A_log, dt_bias, scale
                )
                tl.store(out_ptr + begin * out_row + value_at, z.to(out_ptr.dtype.element_ty))
                tl.store(
                    state_at + slot * state_slot + in_tile, state.to(state_ptr.dtype.element_ty)
                )
            else:
                wide = state.to(tl.float32)
                for t in range(0, num_rows):
                    q, k, v, a, b, column = next_q, next_k, next_v, next_a, next_b, next_column
                    # Ask for the next row before this row's sums.
                    following = tl.minimum(t + 1, num_rows - 1)
                    next_q, next_k, next_v, next_a, next_b, next_column = load_row(
                        q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, columns_at, q_row, k_row, v_row,
                        gate_row, indices_column, begin + following, following, key_at, value_at,
                        head,
                    )  # fmt: skip
                    key, query = unit(k, 1.0), unit(q, scale)
                    wide *= tl.exp(log_decay_of(a.to(tl.float32), dt_bias, A_log))
                    update = sigmoid_of(b.to(tl.float32))
                    update *= v.to(tl.float32) - tl.sum(wide * key, axis=1)
                    wide += update[:, None] * key
                    z = tl.sum(wide * query, axis=1)
                    out_at = (begin + t) * out_row + value_at
                    tl.store(out_ptr + out_at, z.to(out_ptr.dtype.element_ty))
                    if column > 0:
                        tl.store(
                            state_at + column.to(tl.int64) * state_slot + in_tile,
                            wide.to(state_ptr.dtype.element_ty),
                        )


@dataclass(frozen=True)
class RowConfig:
    """block_v: rows of a state that a program holds; num_warps: CUDA."""

    block_v: int = 32
    num_warps: int = 1
