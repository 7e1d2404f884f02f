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
def unit_row(row_ptr, factor):
    """fp32 [1, DK]: a row over its norm, times factor."""
    row = tl.load(row_ptr)[None, :].to(tl.float32)
    return row * (inverse_norm(row) * factor)[:, None]


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
):
    """Grid: any size up to num_requests * HV * DV / BV; programs stride over (request, head, tile).

    Tiles of a state run fastest, so that neighbouring programs read neighbouring memory.
    """
    TILES: tl.constexpr = DV // BV
    channel = tl.arange(0, DK)
    for work in range(tl.program_id(0), num_requests * HV * TILES, tl.num_programs(0)):
        head = (work // TILES) % HV
        request = work // (TILES * HV)
        value = (work % TILES) * BV + tl.arange(0, BV)
        begin = tl.load(query_start_loc_ptr + request).to(tl.int64)
        num_rows = (tl.load(query_start_loc_ptr + request + 1) - begin).to(tl.int32)
        accepted = tl.load(accepted_ptr + request).to(tl.int32)
        columns_at = indices_ptr + request * indices_row
        last = tl.minimum(accepted, num_columns) - 1
        slot = tl.load(columns_at + last * indices_column, mask=accepted > 0, other=0).to(tl.int64)
        if (slot > 0) & (num_rows > 0):
            state_at = head * (DV * DK) + value[:, None] * DK + channel[None, :]
            state = tl.load(state_ptr + slot * state_slot + state_at).to(tl.float32)
            A_log = tl.load(A_log_ptr + head).to(tl.float32)
            dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
            key_at = (head // (HV // HK)) * DK + channel
            for t in range(0, num_rows):
                row = begin + t
                key = unit_row(k_ptr + row * k_row + key_at, 1.0)
                query = unit_row(q_ptr + row * q_row + key_at, scale)
                v = tl.load(v_ptr + row * v_row + head * DV + value).to(tl.float32)
                # ascend: two gates and one slot number a row, beside BV * DK numbers of a state
                a = tl.load(a_ptr + row * gate_row + head).to(tl.float32)
                # ascend: as above
                b = tl.load(b_ptr + row * gate_row + head).to(tl.float32)
                # ascend: as above
                column = tl.load(columns_at + t * indices_column).to(tl.int64)
                state *= tl.exp(log_decay_of(a, dt_bias, A_log))
                update = sigmoid_of(b) * (v - tl.sum(state * key, axis=1))
                state += update[:, None] * key
                z = tl.sum(state * query, axis=1)
                out_at = row * out_row + head * DV + value
                tl.store(out_ptr + out_at, z.to(out_ptr.dtype.element_ty))
                if column > 0:
                    tl.store(
                        state_ptr + column * state_slot + state_at,
                        state.to(state_ptr.dtype.element_ty),
                    )


@dataclass(frozen=True)
class RowConfig:
    """block_v: rows of a state that a program holds; num_warps: CUDA."""

    block_v: int = 32
    num_warps: int = 1
