"""`record_round` in one launch, for CUDA and Ascend. Contract: `naive.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._launch import grid
from . import RoundTables, Verdict, check_shapes

ROWS = 16  # requests of one program


@triton.jit
def record_round_kernel(
    confidence_ptr,
    slots_ptr,
    chances_ptr,
    classes_ptr,
    whole_ptr,
    ranking_ptr,
    figures_ptr,
    verified_ptr,
    sampled_ptr,
    requests,
    confidence_stride,
    ranking_stride,
    figures_stride,
    K: tl.constexpr,
    K2: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_FIGURES: tl.constexpr,
    HAS_VERIFIED: tl.constexpr,
):
    """ROWS requests a program, as one [ROWS, K] tile."""
    position = tl.arange(0, K2)
    for block in range(tl.program_id(0), tl.cdiv(requests, ROWS), tl.num_programs(0)):
        request = block * ROWS + tl.arange(0, ROWS)
        real = request < requests
        tile = real[:, None] & (position < K)[None, :]
        slot = tl.load(slots_ptr + request, mask=real, other=0).to(tl.int64)
        raw = tl.load(
            confidence_ptr + request[:, None] * confidence_stride + position[None, :],
            mask=tile,
            other=0.0,
        ).to(tl.float32)
        valid = (raw >= 0.0) & (raw <= 1.0)
        level = (tl.where(valid, raw, 0.0) * (LEVELS - 1) + 0.5).to(tl.int32)
        # ascend: classes and chances are looked up, every request may have another
        kind = tl.load(classes_ptr + slot, mask=real, other=0)
        place = (kind[:, None] * K + position[None, :]) * LEVELS + level
        chance = tl.load(chances_ptr + place, mask=tile, other=0.0)
        whole = tl.load(whole_ptr + slot, mask=real, other=0) != 0
        whole = whole | (tl.min(valid.to(tl.int32), axis=1) == 0)
        tl.store(
            ranking_ptr + slot[:, None] * ranking_stride + position[None, :],
            tl.where(whole[:, None], 1.0, chance),
            mask=tile,
        )
        if HAS_FIGURES:
            line = figures_ptr + request * figures_stride
            tl.store(line[:, None] + position[None, :], raw, mask=tile)
            verified = tl.zeros([ROWS], dtype=tl.float32)
            if HAS_VERIFIED:
                verified = tl.load(verified_ptr + request, mask=real, other=0).to(tl.float32)
            tl.store(line + K, verified, mask=real)
            sampled = tl.load(sampled_ptr + request, mask=real, other=0).to(tl.float32)
            tl.store(line + K + 1, sampled, mask=real)


def record_round(
    confidence: torch.Tensor,
    slots: torch.Tensor,
    tables: RoundTables,
    ranking: torch.Tensor,
    figures: torch.Tensor | None = None,
    verdict: Verdict | None = None,
) -> None:
    """As `naive.record_round`; figures must be contiguous within a row."""
    check_shapes(confidence, slots, tables, ranking, figures)
    requests, depth = confidence.shape
    if requests == 0:
        return
    told = figures is not None and verdict is not None
    verified = verdict.verified if verdict is not None else None
    record_round_kernel[grid(triton.cdiv(requests, ROWS), confidence.device)](
        confidence, slots, tables.chances, tables.classes, tables.whole, ranking,
        figures if told else ranking, slots if verified is None else verified,
        verdict.sampled if told and verdict is not None else slots, requests,
        confidence.stride(0), ranking.stride(0), figures.stride(0) if figures is not None else 0,
        K=depth, K2=max(2, triton.next_power_of_2(depth)), LEVELS=tables.chances.shape[2],
        ROWS=ROWS, HAS_FIGURES=told, HAS_VERIFIED=verified is not None,
    )  # fmt: skip
