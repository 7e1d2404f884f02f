"""Oracle of `record_round` in plain torch; waits for nothing, but takes two dozen launches."""

from __future__ import annotations

import torch

from . import RoundTables, Verdict, check_shapes


def record_round(
    confidence: torch.Tensor,
    slots: torch.Tensor,
    tables: RoundTables,
    ranking: torch.Tensor,
    figures: torch.Tensor | None = None,
    verdict: Verdict | None = None,
) -> None:
    """Fill `ranking` at the slots and `figures` in batch order (contract: the package).

    Args:
        confidence: any float type [R, K], raw. A request with a value outside [0, 1] or NaN gets
            chance 1 everywhere: it ranks before all others, and its draft is verified whole.
        slots: int [R], each request's slot.
        ranking: float32 [S, K], written at the slots.
        figures: float32 [R or more, K + 2]: raw confidences, verified, emitted. None: not wanted.
        verdict: the step's, with figures.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    check_shapes(confidence, slots, tables, ranking, figures)
    requests, depth = confidence.shape
    levels = tables.chances.shape[2]
    valid = (confidence >= 0) & (confidence <= 1)
    level = (torch.where(valid, confidence.float(), 0.0) * (levels - 1) + 0.5).long()
    place = tables.classes[slots.long()].long()[:, None] * depth + torch.arange(
        depth, device=confidence.device
    )
    chances = tables.chances.reshape(-1)[place * levels + level]
    whole = ~valid.all(dim=1, keepdim=True) | (tables.whole[slots.long()] != 0)[:, None]
    ranking[slots.long()] = torch.where(whole, 1.0, chances)
    if figures is None or verdict is None:
        return
    figures[:requests, :depth] = confidence
    figures[:requests, depth] = 0.0 if verdict.verified is None else verdict.verified.float()
    figures[:requests, depth + 1] = verdict.sampled.float()
