"""Oracle of `pack_rows` in plain torch; reads device values, so it is not for a captured step."""

from __future__ import annotations

import torch

from . import GRID_BITS, Batch, PackedRows, ScoreKind, check_shapes


def survival_levels(scores: torch.Tensor, kind: ScoreKind = "confidence") -> torch.Tensor:
    """Survival of each draft row in units of 2**-GRID_BITS, int64 [rows, K].

    scores: any float type, [rows, K]. float64 shows what the rounding costs.
    """
    one = 1 << GRID_BITS
    valid = (scores >= 0) & (scores <= 1)
    clean = torch.where(valid, scores.double(), 0.0)
    chances = (clean * one).round().long().clamp(max=one - 1)
    if kind == "survival":
        return chances.cummin(dim=1).values
    levels = chances.clone()
    for position in range(1, scores.shape[1]):
        levels[:, position] = (levels[:, position - 1] * chances[:, position]) >> GRID_BITS
    return levels


def best_rows(levels: torch.Tensor, limits: torch.Tensor, budget: int) -> torch.Tensor:
    """Draft rows admitted for each request, int64 [R].

    levels: int64 [R, K]; limits: int64 [R], eligible positions of each request.
    """
    requests, positions = levels.shape
    eligible = [
        (-int(levels[request, position]), position, request)
        for request in range(requests)
        for position in range(min(int(limits[request]), positions))
    ]
    admitted = sorted(eligible)[: max(budget, 0)]
    lengths = torch.zeros(requests, dtype=torch.int64)
    for _, _, request in admitted:
        lengths[request] += 1
    return lengths


def pack_rows(
    scores: torch.Tensor,
    budget: int | torch.Tensor,
    batch: Batch,
    out: PackedRows,
    *,
    kind: ScoreKind = "confidence",
    bonus_tokens: int = 1,
) -> PackedRows:
    """Fill `out` with the layout of the step (contract: `vllm_ascend_spec.kernels.pack_rows`).

    scores: [rows, K], fp32 or float64. budget: draft rows to verify in the whole batch.
    bonus_tokens: logits rows of a request besides its drafts.
    """
    requests, _ = check_shapes(scores, batch, out)
    count = requests if batch.num_requests is None else int(batch.num_requests)
    real = torch.arange(requests) < count
    limits = batch.draft_counts.cpu().long()
    if batch.caps is not None:
        limits = torch.minimum(limits, batch.caps.cpu().long())
    limits = torch.where(real, limits.clamp(min=0), 0)
    rows = torch.arange(requests) if batch.score_rows is None else batch.score_rows.cpu().long()
    rows = torch.where(limits > 0, rows, 0)  # a row without drafts may carry any index
    base = torch.where(real, batch.base_rows.cpu().long(), 0)

    lengths = best_rows(survival_levels(scores.cpu()[rows], kind), limits, int(budget))
    out.draft_lengths[:requests] = lengths.to(out.draft_lengths)
    _write_offsets(out.query_start_loc, base + lengths)
    _write_offsets(out.cu_num_logits, lengths + bonus_tokens * (base > 0))
    return out


def _write_offsets(buffer: torch.Tensor, lengths: torch.Tensor) -> None:
    """Exclusive prefix sums of `lengths`; the rest of the buffer is the total."""
    buffer.fill_(int(lengths.sum()))
    buffer[0] = 0
    buffer[1 : lengths.shape[0] + 1] = lengths.cumsum(0).to(buffer)
