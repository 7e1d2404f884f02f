"""Native-layout verification for CUDA and Ascend: a state column for each row, as vLLM's pool has.

Contract and mathematics: `naive.py`, with the gates fused. The traffic is one state read per
request and one written per row, so the rows' states are made by rank-one updates alone: updates and
outputs come from the small system (`triton_system.py`), and the loop over rows has no reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import grid
from .layout import MAX_ROWS
from .rows import TILE, checked_rows
from .triton_rows import RowConfig, native_rows_kernel
from .triton_system import dot_fp32, dot_precision, dot_state, load_rows, pick_head, prepare_heads


@triton.jit
def native_verify_kernel(
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
    T: tl.constexpr,
    HEADS: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: any size up to num_requests * HV / HEADS; programs stride over (request, heads)."""
    X: tl.constexpr = 2 * T
    GROUP: tl.constexpr = HV // HK
    row = tl.arange(0, X)
    t = row % T
    is_query = (row >= T)[None, :]
    source = tl.arange(0, T)
    channel = tl.arange(0, DK)
    for work in range(tl.program_id(0), num_requests * (HV // HEADS), tl.num_programs(0)):
        request = work // (HV // HEADS)
        first_head = (work % (HV // HEADS)) * HEADS
        first_key_head = first_head // GROUP
        begin = tl.load(query_start_loc_ptr + request).to(tl.int64)
        num_rows = (tl.load(query_start_loc_ptr + request + 1) - begin).to(tl.int32)
        accepted = tl.load(accepted_ptr + request).to(tl.int32)
        columns_at = indices_ptr + request * indices_row
        last = tl.minimum(accepted, num_columns) - 1
        slot = tl.load(columns_at + last * indices_column, mask=accepted > 0, other=0).to(tl.int64)
        if (slot > 0) & (num_rows > 0):
            q_base = q_ptr + begin * q_row
            k_base = k_ptr + begin * k_row
            gate_at = begin * gate_row + first_head
            live = (t < num_rows)[None, :]
            inverse, from_state, beta, log_decay, _, key_norm = prepare_heads(
                q_base, k_base, a_ptr + gate_at, b_ptr + gate_at, A_log_ptr, dt_bias_ptr, q_row,
                k_row, gate_row, first_head, num_rows, scale, HEADS, GROUP, DK, T,
            )  # fmt: skip
            for tile in range(0, HEADS * (DV // BV)):
                h = tile // (DV // BV)
                key_head = (first_head + h) // GROUP
                value = (tile % (DV // BV)) * BV + tl.arange(0, BV)
                state_at = (first_head + h) * (DV * DK) + value[:, None] * DK + channel[None, :]
                state = tl.load(state_ptr + slot * state_slot + state_at)
                x = load_rows(q_base, k_base, q_row, k_row, key_head, row, num_rows, DK, T)
                v = tl.load(
                    v_ptr + begin * v_row + (first_head + h) * DV + t[None, :] * v_row
                    + value[:, None],
                    mask=live & (row < T)[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip

                y = dot_state(state, x) * pick_head(from_state, h, HEADS)[None, :]
                right = tl.where(is_query, 0.0, pick_head(beta, h, HEADS)[None, :] * (v - y))
                system = tl.trans(pick_head(inverse, h, HEADS))
                z = dot_fp32(right, system, PRECISION) + tl.where(is_query, y, 0.0)
                out_at = begin * out_row + (first_head + h) * DV + value[:, None]
                tl.store(
                    out_ptr + out_at + t[None, :] * out_row,
                    z.to(out_ptr.dtype.element_ty), mask=live & is_query,
                )  # fmt: skip

                decays = tl.exp(pick_head(log_decay, h, HEADS))
                norms = pick_head(key_norm, key_head - first_key_head, key_norm.shape[0])
                wide = state.to(tl.float32)
                for j in range(0, num_rows):
                    # ascend: one slot number per state of DV * DK numbers that it addresses
                    column = tl.load(columns_at + j * indices_column).to(tl.int64)
                    key = tl.load(k_base + j * k_row + key_head * DK + channel).to(tl.float32)
                    key *= tl.sum(tl.where(source == j, norms, 0.0), axis=0)
                    update = tl.sum(tl.where((row == j)[None, :], z, 0.0), axis=1)
                    decay = tl.sum(tl.where(source == j, decays, 0.0), axis=0)
                    wide = wide * decay + update[:, None] * key[None, :]
                    if column > 0:
                        tl.store(
                            state_ptr + column * state_slot + state_at,
                            wide.to(state_ptr.dtype.element_ty),
                        )


@dataclass(frozen=True)
class NativeConfig:
    """heads: value heads of one program; block_v: rows of a state per tile; num_warps: CUDA."""

    heads: int = 8
    block_v: int = 64
    num_warps: int = 4


def default_config(max_rows: int, device: torch.device) -> NativeConfig | RowConfig:
    """On CUDA row by row, 32 rows of a state a program: fastest on an H200 at 8 rows, within 2 % of
    it at 1. Elsewhere the largest cut tried that fits Ascend's 192 KB, not measured."""
    if device.type == "cuda":
        return RowConfig()
    return NativeConfig(heads=2, block_v=32) if max_rows <= TILE else NativeConfig(1, 16)


def check_config(config: NativeConfig, state_dtype: torch.dtype, device: torch.device) -> None:
    """Refuse the cuts among which is one whose outputs were wrong, once, on an H200.

    From 64 state rows a tile the products of an fp32 state run in tf32 on warp groups (wgmma). The
    states were right, and later runs were, too; no other cut compiles to that instruction
    (docs/kernels/gdn_verify.md).
    """
    if device.type == "cuda" and state_dtype == torch.float32 and config.block_v >= 64:
        raise ValueError(
            f"NativeConfig.block_v is {config.block_v}: an fp32 state takes at most 32 rows a tile "
            "on CUDA, larger tiles gave wrong outputs once"
        )


def gdn_verify(
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
    max_rows: int = TILE,
    scale: float | None = None,
    config: NativeConfig | RowConfig | None = None,
) -> Tensor:
    """Outputs of R requests' rows; writes the state after row t of a request to its column t.

    A request starts from column `num_accepted - 1`, whatever it drafts now. One with no rows,
    nothing accepted or a null start slot touches nothing; a null column is not written. All
    lengths and slots are read from device memory; R is an upper bound.

    Args:
        q, k: bfloat16 [N, HK, dk]; v: [N, HV, dv]; a, b: [N, HV], raw gate inputs. Rows may be
            strided, all else contiguous. q and k are normalised here, q is scaled.
        A_log, dt_bias: [HV].
        states: [slots, HV, dv, dk] bfloat16 or float32, slots strided, updated in place.
        query_start_loc: int32 [R + 1]; num_accepted: int32 [R].
        state_indices: int32 [R, C], any strides, C >= max_rows.
        out: [N, HV, dv]; rows of no request keep what they hold. None: new zeros.
        max_rows: upper bound of rows per request, at most 16; a promise, as in `replay.py`.

    Returns:
        out.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel does not take.
    """
    if not 1 <= max_rows <= MAX_ROWS or state_indices.shape[1] < max_rows:
        raise ValueError(
            f"max_rows must be 1 to {MAX_ROWS} and within the {state_indices.shape[1]} columns of "
            f"state_indices, got {max_rows}"
        )
    out, row_strides = checked_rows(q, k, v, a, b, out)
    _, HV, DV, DK = states.shape
    requests = state_indices.shape[0]
    if requests == 0:
        return out
    config = config or default_config(max_rows, q.device)
    tensors = (
        q, k, v, a, b, A_log, dt_bias, query_start_loc, state_indices, num_accepted, states, out,
    )  # fmt: skip
    numbers = (
        requests, state_indices.shape[1], DK**-0.5 if scale is None else scale,
        *row_strides, *state_indices.stride(), states.stride(0),
    )  # fmt: skip
    dims = {"HV": HV, "HK": q.shape[1], "DK": DK, "DV": DV}
    if isinstance(config, RowConfig):
        block_v = min(config.block_v, DV)
        native_rows_kernel[grid(requests * HV * (DV // block_v), q.device)](
            *tensors,
            *numbers,
            **dims,
            BV=block_v,
            ONE_COLUMN=state_indices.shape[1] == 1,
            num_warps=config.num_warps,
        )
        return out
    check_config(config, states.dtype, q.device)
    heads = min(config.heads, HV)
    native_verify_kernel[grid(requests * (HV // heads), q.device)](
        *tensors, *numbers, **dims, T=TILE if max_rows <= TILE else MAX_ROWS, HEADS=heads,
        BV=min(config.block_v, DV), PRECISION=dot_precision(states.dtype, q.device),
        num_warps=config.num_warps,
    )  # fmt: skip
    return out
