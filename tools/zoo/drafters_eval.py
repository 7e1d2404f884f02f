"""Offline acceptance of drafters on held-out answers, without the engine.

The answers are the target's own greedy ones, so greedy verification accepts exactly the drafts
that equal the answer. Acceptance length is 1 + accepted drafts per step over all steps; drafts
past the end of an answer count as rejected, which makes the figure a slight underestimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tools.zoo.drafters import DrafterSpec
from tools.zoo.drafters_data import Answers, HiddenStates, Packer
from tools.zoo.drafters_propose import propose


@dataclass
class Acceptance:
    """Counts over verification steps: `reached[k]` steps in which drafts before `k` were all
    accepted, `accepted[k]` those in which `k` was too. `scores[k]`: confidence and outcome of
    each draft that was reached."""

    steps: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    scores: list[list[tuple[float, bool]]] = field(default_factory=list)

    def add_step(self, matches: Sequence[bool], confidence: Sequence[float] | None) -> int:
        """Record one step's drafts (right or wrong, in order); returns how many are accepted."""
        while len(self.reached) < len(matches):
            self.reached.append(0)
            self.accepted.append(0)
            self.scores.append([])
        self.steps += 1
        for k, match in enumerate(matches):
            self.reached[k] += 1
            if confidence is not None:
                self.scores[k].append((confidence[k], match))
            if not match:
                return k
            self.accepted[k] += 1
        return len(matches)

    def report(self) -> dict[str, Any]:
        """Acceptance length, conditional acceptance and confidence AUC per draft position."""
        result: dict[str, Any] = {
            "steps": self.steps,
            "acceptance_length": 1 + sum(self.accepted) / max(1, self.steps),
            "conditional_acceptance": [
                a / r if r else None for a, r in zip(self.accepted, self.reached, strict=True)
            ],
        }
        if any(self.scores):
            result["confidence_auc"] = [
                area_under_roc([s for s, _ in pos], [m for _, m in pos]) for pos in self.scores
            ]
        return result


def area_under_roc(scores: Sequence[float], labels: Sequence[bool]) -> float | None:
    """Probability that an accepted draft scores above a rejected one (ties count half).

    None if one of the two classes is empty.
    """
    values = torch.tensor(scores, dtype=torch.float64)
    positive = torch.tensor(labels, dtype=torch.bool)
    good, bad = values[positive], values[~positive].sort().values
    if good.numel() == 0 or bad.numel() == 0:
        return None
    below = torch.searchsorted(bad, good, right=False)
    not_above = torch.searchsorted(bad, good, right=True)
    return float(((below + not_above) / 2).sum() / (good.numel() * bad.numel()))


def walk_answer(
    acceptance: Acceptance,
    answer: Sequence[int],
    drafts: Sequence[Sequence[int]],
    confidence: Sequence[Sequence[float]] | None,
) -> None:
    """Replay one request: `drafts[i]` are the drafts made when `answer[i]` was the last token.

    The first answer token comes from prefill; each step then emits its accepted drafts and one
    token of the target.
    """
    position = 0
    while position < len(answer) - 1:
        truth = answer[position + 1 :]
        proposed = drafts[position]
        matches = [k < len(truth) and t == truth[k] for k, t in enumerate(proposed)]
        scores = None if confidence is None else confidence[position]
        position += acceptance.add_step(matches, scores) + 1


@torch.no_grad()
def simulate(
    model: nn.Module,
    spec: DrafterSpec,
    answers: Answers,
    hidden: HiddenStates,
    tokens_per_batch: int,
) -> Acceptance:
    """Replay every answer of `answers` through `model`, drafting from all anchors at once."""
    packer = Packer(
        answers,
        hidden,
        shifted=spec.method in ("mtp", "eagle3"),
        targets_in_place=False,
        tokens_per_batch=tokens_per_batch,
        seed=0,
    )
    acceptance = Acceptance()
    for documents in _groups(answers, tokens_per_batch - spec.block_size):
        batch = packer.batch(documents)
        drafts = propose(model, spec, batch)
        owner = batch.document_ids[0, drafts.rows].tolist()
        tokens = drafts.tokens.tolist()
        scores = None if drafts.confidence is None else drafts.confidence.tolist()
        for number, document in enumerate(documents):
            mine = [i for i, o in enumerate(owner) if o == number]
            answer = answers.document(document)[int(answers.prompt_lengths[document]) :].tolist()
            walk_answer(
                acceptance,
                answer,
                [tokens[i] for i in mine],
                None if scores is None else [scores[i] for i in mine],
            )
    return acceptance


def _groups(answers: Answers, limit: int) -> list[list[int]]:
    """Documents in order, cut into groups of at most `limit` tokens."""
    groups: list[list[int]] = [[]]
    used = 0
    for document, length in enumerate(answers.lengths.tolist()):
        if used + length > limit and groups[-1]:
            groups.append([])
            used = 0
        groups[-1].append(document)
        used += length
    return groups
