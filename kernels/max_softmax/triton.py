"""`max_softmax` for CUDA and Ascend: logits are read once, nothing of size [N, V] is written.

A program walks one segment of one row. Every lane keeps its own running maximum and sum, so a step
has no exchange between lanes, and four tiles share one rescaling of the sum: 1.25 exponentials and
8 instructions a logit on sm_90, of which the exponentials bind first. The argmax costs one
comparison a lane and step: a lane notes the step in which its maximum last rose, and at the end
only the earliest winning step is read again to find the id. A second small launch folds the
segments of a row, as it folds the shards of a parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .._launch import device_cores, grid
from . import FLOOR, check_logits

MAX_SEGMENTS = 64
GROUP = 4  # tiles that share one rescaling; eight were slower on an H200
_GROUP = tl.constexpr(GROUP)
_NO_ID = tl.constexpr(3.0e38)
_FLOOR = tl.constexpr(FLOOR)
_LOG2_E = tl.constexpr(1.4426950408889634)
_TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2**23, added and taken away: rounds to whole numbers


@triton.jit
def _scale(temperature):
    """Factor from logits to base-2 exponents; greedy rows (temperature 0) keep temperature 1."""
    return 1.0 / tl.where(temperature > 0.0, temperature, 1.0) * _LOG2_E


@triton.jit
def _four(at, BLOCK: tl.constexpr):
    """Four tiles as they lie, BLOCK columns apart."""
    z0, z1 = tl.load(at), tl.load(at + BLOCK)
    return z0, z1, tl.load(at + 2 * BLOCK), tl.load(at + 3 * BLOCK)


@triton.jit
def _four_before(base, column, end, BLOCK: tl.constexpr):
    """The same, -inf from column `end` on."""
    low = float("-inf")
    z0 = tl.load(base + column, mask=column < end, other=low)
    z1 = tl.load(base + column + BLOCK, mask=column + BLOCK < end, other=low)
    z2 = tl.load(base + column + 2 * BLOCK, mask=column + 2 * BLOCK < end, other=low)
    z3 = tl.load(base + column + 3 * BLOCK, mask=column + 3 * BLOCK < end, other=low)
    return z0, z1, z2, z3


@triton.jit
def _top(z0, z1, z2, z3):
    return tl.maximum(
        tl.maximum(z0.to(tl.float32), z1.to(tl.float32)),
        tl.maximum(z2.to(tl.float32), z3.to(tl.float32)),
    )


@triton.jit
def _sum(z0, z1, z2, z3, shift, scale):
    """Of 2 ** (z scale - shift)."""
    total = tl.exp2(z0.to(tl.float32) * scale - shift) + tl.exp2(z1.to(tl.float32) * scale - shift)
    total += tl.exp2(z2.to(tl.float32) * scale - shift)
    return total + tl.exp2(z3.to(tl.float32) * scale - shift)


@triton.jit
def _absorb(z0, z1, z2, z3, step, best, shift, total, found, scale):
    """Fold four tiles into each lane's maximum, shift, sum and step of the maximum.

    A lane's sum is over 2 ** shift, a whole number near its maximum: moving the sum to another
    shift is exact, and a term costs one multiply-add beside its exponential.
    """
    top = _top(z0, z1, z2, z3)
    found = tl.where(top > best, step, found)  # strictly: the earliest of equals stays
    top = tl.maximum(best, top)
    new_shift = (top * scale + _TO_WHOLE) - _TO_WHOLE
    total = total * tl.exp2(shift - new_shift) + _sum(z0, z1, z2, z3, new_shift, scale)
    return top, new_shift, total, found


@triton.jit
def _first_column(base, start, end, top, best, found, BLOCK: tl.constexpr):
    """Lowest column of the segment that holds `top`, as fp32; `start` if none does."""
    lane = tl.arange(0, BLOCK)
    step = tl.min(tl.where(best == top, found, 1 << 24), axis=0)
    winner = (best == top) & (found == step)
    column = start + step * (_GROUP * BLOCK) + lane
    first = _NO_ID
    for i in tl.static_range(_GROUP):
        here = column + i * BLOCK
        z = tl.load(base + here, mask=winner & (here < end), other=float("-inf")).to(tl.float32)
        first = tl.minimum(first, tl.min(tl.where(z == top, here.to(tl.float32), _NO_ID), axis=0))
    return tl.where(first < _NO_ID, first, start.to(tl.float32))


@triton.jit
def _partials(
    logits, row_stride, vocabulary, temperature, first_id, out, rows, segment, segments,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out: fp32 [segments, 3, rows]."""
    lane = tl.arange(0, BLOCK)
    for work in range(tl.program_id(0), rows * segments, tl.num_programs(0)):
        row = work // segments
        index = work - row * segments
        start = index * segment
        end = tl.minimum(start + segment, vocabulary)
        base = logits + row.to(tl.int64) * row_stride
        scale = _LOG2_E
        if temperature is not None:
            scale = _scale(tl.load(temperature + row).to(tl.float32))

        best = tl.full([BLOCK], _FLOOR, tl.float32)
        shift = (best * scale + _TO_WHOLE) - _TO_WHOLE
        total = tl.zeros([BLOCK], tl.float32)
        found = tl.zeros([BLOCK], tl.int32)
        steps = (end - start) // (_GROUP * BLOCK)
        for step in tl.range(0, steps, num_stages=STAGES):
            z0, z1, z2, z3 = _four(base + start + step * (_GROUP * BLOCK) + lane, BLOCK)
            best, shift, total, found = _absorb(
                z0, z1, z2, z3, step, best, shift, total, found, scale
            )
        if start + steps * (_GROUP * BLOCK) < end:
            column = start + steps * (_GROUP * BLOCK) + lane
            z0, z1, z2, z3 = _four_before(base, column, end, BLOCK)
            best, shift, total, found = _absorb(
                z0, z1, z2, z3, steps, best, shift, total, found, scale
            )
        top = tl.max(best, axis=0)
        column = _first_column(base, start, end, top, best, found, BLOCK)
        at = out + index * 3 * rows + row
        # ascend: three scalars a segment of thousands of logits
        tl.store(at, top)
        tl.store(at + rows, tl.sum(total * tl.exp2(shift - top * scale), axis=0))
        tl.store(at + 2 * rows, column + first_id)


@triton.jit
def _combine(
    partials, temperature, d2t, confidence, tokens, merged, rows, parts,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold fp32 [parts, 3, rows] over parts, into `merged` [3, rows] or into the two results."""
    part = tl.arange(0, BLOCK_P)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_N), tl.num_programs(0)):
        row = block * BLOCK_N + tl.arange(0, BLOCK_N)
        live = row < rows
        at = partials + part[:, None] * 3 * rows + row[None, :]
        mask = (part < parts)[:, None] & live[None, :]
        tops = tl.load(at, mask=mask, other=_FLOOR)
        totals = tl.load(at + rows, mask=mask, other=0.0)
        ids = tl.load(at + 2 * rows, mask=mask, other=_NO_ID)
        top = tl.max(tops, axis=0)
        distance = tops - top[None, :]
        if temperature is not None:
            value = tl.load(temperature + row, mask=live, other=1.0).to(tl.float32)
            distance *= _scale(value)[None, :]
        else:
            distance *= _LOG2_E
        total = tl.sum(totals * tl.exp2(distance), axis=0)
        token = tl.min(tl.where(tops == top[None, :], ids, _NO_ID), axis=0)
        if merged is not None:
            tl.store(merged + row, top, mask=live)
            tl.store(merged + rows + row, total, mask=live)
            tl.store(merged + 2 * rows + row, token, mask=live)
        else:
            # the comparisons are false for NaN
            usable = (top > _FLOOR) & (top < -_FLOOR) & (total > 0.0)
            chance = tl.minimum(1.0 / total, 1.0)  # a sum that rounding left below 1
            tl.store(confidence + row, tl.where(usable, chance, 0.0), mask=live)
            token = token.to(tl.int32)
            if d2t is not None:
                token += tl.load(d2t + token, mask=live, other=0).to(tl.int32)
            tl.store(tokens + row, token.to(tl.int64), mask=live)


@dataclass(frozen=True)
class Tiling:
    """How `max_softmax` walks a row; the defaults are for wide fp32 rows on an H200, and Ascend.

    lane_bytes: bytes of one load of one tile. programs_per_core: programs that the work is cut
    into, at least, for each core, as far as rows are long enough. stages: steps whose tiles are in
    flight on CUDA, copied into shared memory ahead of the arithmetic; 1: none are ahead, and tiles
    go to registers.
    """

    lane_bytes: int = 4096
    num_warps: int = 8
    programs_per_core: int = 32
    stages: int = 1

    def segments(self, rows: int, vocabulary: int, group: int, cores: int) -> tuple[int, int]:
        """(columns of a segment, segments of a row); a segment is a multiple of `group`."""
        wanted = triton.cdiv(self.programs_per_core * cores, max(rows, 1))
        wanted = min(wanted, MAX_SEGMENTS, triton.cdiv(vocabulary, group))
        segment = triton.cdiv(triton.cdiv(vocabulary, wanted), group) * group
        return segment, triton.cdiv(vocabulary, segment)


# The best of what was timed on an H200 (benchmarks/results/kernels/max_softmax.json): bf16 with
# 2048 rows, bf16 with 256 and with 32, fp32 with 32000 tokens, where 131072 keep Tiling(). fp16
# was not timed: its arithmetic is that of bf16.
HALF = Tiling(lane_bytes=1024, num_warps=4, programs_per_core=30, stages=4)
HALF_FEW_ROWS = Tiling(lane_bytes=1024, num_warps=4, programs_per_core=40, stages=3)
NARROW = Tiling(lane_bytes=2048, num_warps=4, stages=3)


def default_tiling(dtype: torch.dtype, device: torch.device, rows: int, vocabulary: int) -> Tiling:
    """On CUDA by what was timed, which left out 256 to 2048 rows and 32000 to 131072 tokens."""
    if device.type != "cuda":
        return Tiling()
    if dtype.itemsize == 2:
        return HALF if rows > 256 else HALF_FEW_ROWS
    return NARROW if vocabulary <= 65536 else Tiling()


def _segment_partials(
    logits: torch.Tensor, temperature: torch.Tensor | None, first_id: int, tiling: Tiling | None
) -> torch.Tensor:
    """fp32 [segments, 3, N]."""
    rows, vocabulary = check_logits(logits, temperature)
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits must be float32, bfloat16 or float16, got {logits.dtype}")
    tiling = tiling or default_tiling(logits.dtype, logits.device, rows, vocabulary)
    block = tiling.lane_bytes // logits.element_size()
    cores = device_cores(logits.device)
    segment, segments = tiling.segments(rows, vocabulary, GROUP * block, cores)
    out = torch.empty(segments, 3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _partials[grid(rows * segments, logits.device)](
            logits, logits.stride(0), vocabulary, temperature, first_id, out, rows, segment,
            segments, BLOCK=block, STAGES=tiling.stages, num_warps=tiling.num_warps,
        )  # fmt: skip
    return out


def _fold(
    partials: torch.Tensor,
    temperature: torch.Tensor | None,
    d2t: torch.Tensor | None,
    results: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
) -> None:
    parts, _, rows = partials.shape
    if not rows:
        return
    block_p = triton.next_power_of_2(parts)
    block_n = max(8, min(64, 1024 // block_p))
    _combine[grid(triton.cdiv(rows, block_n), partials.device)](
        partials, temperature, d2t, *results, rows, parts, BLOCK_P=block_p, BLOCK_N=block_n,
        num_warps=4,
    )  # fmt: skip


def max_softmax_partial(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    first_id: int = 0,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """What one vocabulary shard contributes, fp32 [3, N]: max, sum, token id.

    logits: fp32, bf16 or fp16 [N, V], rows contiguous, any row stride. temperature: [N] or None.
    first_id: vocabulary id of column 0.
    """
    parts = _segment_partials(logits, temperature, first_id, tiling)
    if parts.shape[0] == 1:
        return parts[0]
    merged = torch.empty_like(parts[0])
    _fold(parts, temperature, None, (None, None, merged))
    return merged


def combine_partials(
    partials: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(confidence fp32 [N], token int64 [N]) from the partials fp32 [P, 3, N] of all shards."""
    if partials.dim() != 3 or partials.shape[1] != 3 or partials.dtype != torch.float32:
        raise ValueError(f"partials must be fp32 [P, 3, N], got {tuple(partials.shape)}")
    rows = partials.shape[2]
    confidence = torch.empty(rows, dtype=torch.float32, device=partials.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=partials.device)
    _fold(partials.contiguous(), temperature, d2t, (confidence, tokens, None))
    return confidence, tokens


def max_softmax(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(confidence fp32 [N], token int64 [N]) of logits [N, V] (contract: the package's docstring).

    logits: fp32, bf16 or fp16, rows contiguous, any row stride. temperature: [N] or None.
    d2t: int [V] or None. Two launches, no wait for the host.
    """
    parts = _segment_partials(logits, temperature, 0, tiling)
    return combine_partials(parts, temperature=temperature, d2t=d2t)
