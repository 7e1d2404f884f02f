"""Tokens of the double against the model's own: Hugging Face's implementation in float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

# A token whose logit is this close to the best one is rounding: bfloat16 logits of the zoo's size
# lie up to 0.125 apart.
NEAR_TIE = 0.25
# The same rounding moves the edge of a nucleus.
NUCLEUS_EDGE = 0.03


@dataclass(frozen=True)
class Judgement:
    """Generated tokens against the model's own logits, teacher-forced.

    gaps: for each token how far its logit lies below the best one; 0 where it is the best.
    """

    gaps: tuple[float, ...]

    @property
    def not_best(self) -> int:
        return sum(gap > 0 for gap in self.gaps)

    @property
    def worst(self) -> float:
        return max(self.gaps)

    @property
    def right(self) -> bool:
        return self.worst <= NEAR_TIE


def judge(model: str, answer: dict[str, Any]) -> Judgement:
    """Compare with Hugging Face's implementation in float32, given the tokens so far."""
    gaps: list[float] = []
    for rows, tokens in _logits(model, answer):
        chosen = rows.gather(1, tokens[:, None])[:, 0]
        gaps += (rows.max(-1).values - chosen).tolist()
    return Judgement(tuple(gaps))


def verified_lengths(answer: dict[str, Any]) -> list[list[int]]:
    """Rows of the requests that verify, for each step in which any does."""
    steps = (
        [rows for rows, prefill in zip(step["rows"], step["prefill"], strict=True) if not prefill]
        for step in answer["steps"]
    )
    return [lengths for lengths in steps if lengths]


def ragged_steps(answer: dict[str, Any]) -> int:
    """Steps in which requests verify different numbers of rows."""
    return sum(len(set(lengths)) > 1 for lengths in verified_lengths(answer))


@dataclass(frozen=True)
class Surprise:
    """Sampled tokens against the distribution that they should come from, given those before.

    outside: tokens beyond the nucleus, rounding of its edge apart. deviations: how far the mean
    log-probability of the tokens is from its expectation, in standard deviations: above for
    tokens that are too likely, as greedy ones are. spread: variance of the sum of
    log-probabilities; where the model leaves no choice it is small, and the measure is blind.
    """

    tokens: int
    outside: int
    deviations: float
    spread: float

    @property
    def right(self) -> bool:
        return self.outside == 0 and abs(self.deviations) < 4.0


def surprise(model: str, answer: dict[str, Any], temperature: float, top_p: float) -> Surprise:
    """How surprising sampled tokens are to the model."""
    tokens = outside = 0
    excess = spread = 0.0
    for rows, chosen in _logits(model, answer):
        probability = (rows.double() / temperature).softmax(-1)
        likely, order = probability.sort(dim=-1, descending=True)
        before = torch.empty_like(likely).scatter_(1, order, likely.cumsum(-1) - likely)
        kept = torch.where(before < top_p, probability, 0.0)
        kept /= kept.sum(-1, keepdim=True)
        log = kept.clamp(min=1e-300).log()
        mean = (kept * log).sum(-1)
        at = chosen[:, None]
        inside = before.gather(1, at)[:, 0] < top_p
        outside += int((before.gather(1, at)[:, 0] >= top_p + NUCLEUS_EDGE).sum())
        # A token at the edge counts as the least likely one inside.
        least = torch.where(kept > 0, log, 0.0).min(-1).values
        found = torch.where(inside, log.gather(1, at)[:, 0], least)
        excess += float((found - mean).sum())
        spread += float(((kept * log.square()).sum(-1) - mean.square()).sum())
        tokens += len(chosen)
    return Surprise(tokens, outside, excess / max(spread, 1e-9) ** 0.5, spread)


def _logits(model: str, answer: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """For each answer the logits [tokens, vocabulary] that its tokens [tokens] came from."""
    reference, found = _reference(model), []
    for prompt, tokens in zip(answer["prompts"], answer["tokens"], strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0].float()
        found.append((logits[len(prompt) - 1 : -1], torch.tensor(tokens)))
    return found


@cache
def _reference(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
