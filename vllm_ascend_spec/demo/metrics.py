"""Figures of speculation from step records. Pure: no engine, no model.

Definitions, each guarding against a way to fool oneself:

- Acceptance length counts every decode step. Leaving out steps without a draft turns 2 into 3.4.
- A trimmed draft token was never verified: it is neither accepted nor rejected.
- Position i is *reached* in a step where it was verified and positions 1..i-1 were accepted. Other
  steps say nothing about it and are left out of its denominator (they are censored). Survival is
  the product of the rates (Kaplan and Meier 1958). Adaptive verification keeps the drafts that it
  trusts, so an adaptive arm's rates describe the drafts it chose to verify, not all drafts.
- A step that the end of the answer cut says nothing about positions past the cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_ascend_spec.demo.records import PositionRow, ReliabilityBin, StepRecord

RELIABILITY_BINS = 10


@dataclass(frozen=True)
class Totals:
    """Sums over request-steps; `draftless` counts steps in which nothing was drafted."""

    steps: int
    draftless: int
    emitted: int
    drafted: int
    verified: int
    accepted: int

    @property
    def trimmed(self) -> int:
        return self.drafted - self.verified

    @property
    def rejected(self) -> int:
        return self.verified - self.accepted

    @property
    def acceptance_length(self) -> float | None:
        """Answer tokens a decode step, over all decode steps."""
        return self.emitted / self.steps if self.steps else None

    @property
    def acceptance_length_drafted(self) -> float | None:
        """1 + accepted / steps with a draft: the figure that engines report."""
        drafting = self.steps - self.draftless
        return 1 + self.accepted / drafting if drafting else None


def totals(steps: Iterable[StepRecord]) -> Totals:
    listed = list(steps)
    return Totals(
        steps=len(listed),
        draftless=sum(step.drafted == 0 for step in listed),
        emitted=sum(step.emitted for step in listed),
        drafted=sum(step.drafted for step in listed),
        verified=sum(step.verified for step in listed),
        accepted=sum(step.accepted for step in listed),
    )


@dataclass(frozen=True)
class Reached:
    """The uncensored outcomes of one position: confidence (NaN if none) and acceptance a step."""

    confidence: np.ndarray
    accepted: np.ndarray


def reached(steps: Iterable[StepRecord], position: int) -> Reached:
    """Outcomes of draft position `position` (1-based) in the steps that reached it."""
    confidence, accepted = [], []
    for step in steps:
        cut = step.emitted <= step.accepted
        known = min(step.verified, step.emitted) if cut else step.verified
        if known < position or step.accepted < position - 1:
            continue
        score = step.confidence[position - 1] if step.confidence else float("nan")
        confidence.append(score)
        accepted.append(step.accepted >= position)
    return Reached(np.asarray(confidence, dtype=np.float64), np.asarray(accepted, dtype=bool))


def auc(confidence: np.ndarray, accepted: np.ndarray) -> float | None:
    """Area under the ROC curve: chance that an accepted token has the higher confidence.

    Ties count half (Mann and Whitney). None without both outcomes, or with a missing confidence.
    """
    positives = int(accepted.sum())
    negatives = len(accepted) - positives
    if not positives or not negatives or np.isnan(confidence).any():
        return None
    _, inverse, counts = np.unique(confidence, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(mean_rank[inverse][accepted].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def positions(steps: Sequence[StepRecord], draft_tokens: int) -> list[PositionRow]:
    """One row a draft position 1..K."""
    rows, survival = [], 1.0
    for position in range(1, draft_tokens + 1):
        outcome = reached(steps, position)
        count, hits = len(outcome.accepted), int(outcome.accepted.sum())
        survival = survival * hits / count if count else float("nan")
        rows.append(
            PositionRow(
                position=position,
                reached=count,
                accepted=hits,
                rate=hits / count if count else None,
                survival=None if np.isnan(survival) else survival,
                auc=auc(outcome.confidence, outcome.accepted),
            )
        )
    return rows


def reliability(
    steps: Sequence[StepRecord], draft_tokens: int, bins: int = RELIABILITY_BINS
) -> list[ReliabilityBin]:
    """Confidence against acceptance in equal bins of [0, 1], all positions; [] if no confidence."""
    outcomes = [reached(steps, position) for position in range(1, draft_tokens + 1)]
    confidence = np.concatenate([outcome.confidence for outcome in outcomes] or [np.empty(0)])
    accepted = np.concatenate([outcome.accepted for outcome in outcomes] or [np.empty(0)])
    if not len(confidence) or np.isnan(confidence).any():
        return []
    index = np.clip((confidence * bins).astype(int), 0, bins - 1)
    rows = []
    for number in range(bins):
        chosen = index == number
        count = int(chosen.sum())
        rows.append(
            ReliabilityBin(
                low=number / bins,
                high=(number + 1) / bins,
                count=count,
                confidence=float(confidence[chosen].mean()) if count else None,
                accepted=float(accepted[chosen].mean()) if count else None,
            )
        )
    return rows


def calibration_error(rows: Sequence[ReliabilityBin]) -> float | None:
    """Expected calibration error: |confidence - acceptance|, weighted by count (Naeini 2015)."""
    total = sum(row.count for row in rows)
    if not total:
        return None
    return (
        sum(
            row.count * abs(row.confidence - row.accepted)
            for row in rows
            if row.confidence is not None and row.accepted is not None
        )
        / total
    )
