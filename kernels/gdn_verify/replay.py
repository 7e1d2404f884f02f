"""Verification in the replay layout on CUDA and Ascend (Triton). Mathematics: `replay_naive.py`.

Contract
- A request's rows are its last token and its draft tokens, 0 to `max_rows` of them; they start from
  the committed state and the pending rows, whatever they draft. One row is plain decode.
- Lengths, cursors and slots are read from device memory only. The number of requests is an upper
  bound: entries with no rows or with the null slot touch nothing, their outputs included.
- New rows are appended behind the pending ones (pending + rows <= W), so a launch overwrites
  nothing that it reads. Outputs and appended rows are the same with and without `flush`.
- Rejected rows are overwritten by the next step; only the cursor (`replay_cursor.py`) knows
  how many were accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .._launch import grid
from .layout import MAX_ROWS, ReplayCache, ReplayLayout, StepCursor
from .rows import TILE, checked_rows
from .triton_replay import replay_flush_kernel, replay_verify_kernel
from .triton_system import dot_precision


@dataclass(frozen=True)
class ReplayConfig:
    """How a launch is cut.

    heads: value heads of one program; their small systems are solved together. block_v: rows of a
    state per tile. fold_v, fold_k: rows and columns of a tile of a flush. num_warps, num_stages:
    CUDA only.
    """

    heads: int = 8
    block_v: int = 64
    num_warps: int = 4
    num_stages: int = 2
    fold_v: int = 64
    fold_k: int = 64


def default_config(state_dtype: torch.dtype, max_rows: int, device: torch.device) -> ReplayConfig:
    """CUDA up to 8 rows: the fastest on an H200; beyond: sized for registers, not measured.

    Elsewhere: the largest cut tried that fits Ascend's 192 KB.
    """
    if device.type != "cuda":
        tile = 16 if max_rows > TILE or state_dtype == torch.float32 else 32
        return ReplayConfig(heads=1 if max_rows > TILE else 2, block_v=tile, fold_v=tile)
    if max_rows > TILE:
        return ReplayConfig(heads=4, block_v=32 if state_dtype == torch.float32 else 64)
    if state_dtype == torch.float32:
        return ReplayConfig(heads=2, block_v=16, num_warps=2, num_stages=3)
    return ReplayConfig(heads=4, block_v=128)


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
    max_rows: int = TILE,
    scale: float | None = None,
    config: ReplayConfig | None = None,
) -> Tensor:
    """Outputs of R requests' rows; appends the rows to the cache's rings, in place.

    Args:
        q, k: bfloat16 [N, HK, dk]; v: [N, HV, dv]; a, b: [N, HV], raw gate inputs. Rows may be
            strided, all else contiguous. q and k are normalised here, q is scaled.
        A_log, dt_bias: [HV].
        query_start_loc: int32 [R + 1]; slots: int32 [R]; both on the device.
        step: cursor of each request (`replay_cursor.stage`).
        out: [N, HV, dv]; rows of no request keep what they hold. None: new zeros.
        max_rows: upper bound of rows per request, at most 16. A request with more rows would be
            cut without notice: the value is a promise of whoever packed the batch.
        scale: of q; dk ** -0.5 if None.

    Returns:
        out.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel does not take.
    """
    layout = cache.check()
    check_ring(layout.ring_rows, max_rows)
    out, row_strides = checked_rows(q, k, v, a, b, out)
    requests = slots.shape[0]
    if requests == 0:
        return out
    config = config or default_config(layout.state_dtype, max_rows, q.device)
    heads = min(config.heads, layout.value_heads)
    replay_verify_kernel[grid(requests * (layout.value_heads // heads), q.device)](
        q, k, v, a, b, A_log, dt_bias, query_start_loc, slots,
        step.start, step.pending, step.flush, *cache.tensors(), out,
        requests, layout.key_dim**-0.5 if scale is None else scale,
        *row_strides, *(x.stride(0) for x in cache.tensors()), **_shape_constants(layout),
        T=TILE if max_rows <= TILE else MAX_ROWS, HEADS=heads,
        BV=min(config.block_v, layout.value_dim),
        FOLD_BV=min(config.fold_v, layout.value_dim), FOLD_DK=min(config.fold_k, layout.key_dim),
        PRECISION=dot_precision(layout.state_dtype, q.device),
        STAGES=config.num_stages, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def replay_flush(
    slots: Tensor, step: StepCursor, cache: ReplayCache, config: ReplayConfig | None = None
) -> None:
    """Fold the pending rows of R requests into their states, with no step.

    Afterwards the cursor of those slots must be reset (`Cursor.reset`): their rings are spent.
    """
    layout = cache.check()
    config = config or default_config(layout.state_dtype, TILE, slots.device)
    heads = min(config.heads, layout.value_heads)
    requests = slots.shape[0]
    if requests == 0:
        return
    replay_flush_kernel[grid(requests * (layout.value_heads // heads), slots.device)](
        slots, step.start, step.pending, *cache.tensors(), requests,
        *(x.stride(0) for x in cache.tensors()), **_shape_constants(layout), HEADS=heads,
        FOLD_BV=min(config.fold_v, layout.value_dim), FOLD_DK=min(config.fold_k, layout.key_dim),
        num_warps=config.num_warps,
    )  # fmt: skip


def _shape_constants(layout: ReplayLayout) -> dict[str, int]:
    return {
        "HV": layout.value_heads, "HK": layout.key_heads, "DK": layout.key_dim,
        "DV": layout.value_dim, "W": layout.ring_rows,
        "W2": max(16, triton.next_power_of_2(layout.ring_rows)),
    }  # fmt: skip


def check_ring(ring_rows: int, max_rows: int) -> None:
    """Refuse a ring that cannot hold a step behind the rows that a flush leaves pending."""
    if not 1 <= max_rows <= MAX_ROWS:
        raise ValueError(f"max_rows must be 1 to {MAX_ROWS}, got {max_rows}")
    if ring_rows < 2 * max_rows:
        raise ValueError(f"{max_rows} rows a step need a ring of {2 * max_rows}, got {ring_rows}")
