"""Oracle of `max_softmax` in plain torch, in float64 inside."""

from __future__ import annotations

import torch

from . import FLOOR, check_logits


def _divisor(temperature: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Temperature as float64 [rows, 1]; greedy rows (0 or less) count as 1."""
    if temperature is None:
        return torch.ones(rows, 1, dtype=torch.float64)
    divisor = temperature.double().cpu()
    return torch.where(divisor > 0, divisor, 1.0).unsqueeze(1)


def max_softmax_partial(
    logits: torch.Tensor, *, temperature: torch.Tensor | None = None, first_id: int = 0
) -> torch.Tensor:
    """What one vocabulary shard contributes, fp32 [3, N]: max, sum, token id.

    logits: [N, V], any float type. first_id: vocabulary id of its column 0.
    """
    rows, _ = check_logits(logits, temperature)
    z = logits.double().cpu()
    # NaN never wins; torch.argmax gives the first of equal maxima
    ranked = torch.where(z.isnan(), -torch.inf, z)
    top = ranked.max(dim=1, keepdim=True).values.clamp(min=FLOOR)
    token = ranked.argmax(dim=1) + first_id
    total = torch.exp((z - top) / _divisor(temperature, rows)).sum(dim=1)
    return torch.stack([top.squeeze(1), total, token.double()]).float().to(logits.device)


def combine_partials(
    partials: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(confidence fp32 [N], token int64 [N]) from the partials [P, 3, N] of all shards."""
    part = partials.double().cpu()
    tops, totals, tokens = part[:, 0], part[:, 1], part[:, 2]
    top = tops.max(dim=0).values
    weight = torch.exp((tops - top) / _divisor(temperature, part.shape[2]).T)
    total = (totals * weight).sum(dim=0)
    token = torch.where(tops == top, tokens, torch.inf).min(dim=0).values.long()
    usable = top.isfinite() & (top > FLOOR) & total.isfinite() & (total > 0)
    confidence = torch.where(usable, 1 / total, 0.0).float()
    if d2t is not None:
        token = token + d2t.cpu().long()[token]
    return confidence.to(partials.device), token.to(partials.device)


def max_softmax(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(confidence fp32 [N], token int64 [N]) of logits [N, V] (contract: the package's docstring).

    temperature: [N] or None. d2t: int [V] or None.
    """
    partial = max_softmax_partial(logits, temperature=temperature)
    return combine_partials(partial.unsqueeze(0), temperature=temperature, d2t=d2t)
