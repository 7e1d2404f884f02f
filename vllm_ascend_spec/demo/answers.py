"""Are the answers right: valid JSON, and the same as without speculation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_ascend_spec.demo.records import Agreement, AnswerRecord

# bf16 logits of a small model step by 0.03 to 0.06; a gap of a few steps is settled by rounding.
NEAR_TIE_GAP = 0.25

Verdict = Literal["equal", "near-tie", "real"]


@dataclass(frozen=True)
class Comparison:
    """Where two answers part, and whether rounding explains it."""

    verdict: Verdict
    position: int | None = None
    gap: float | None = None


def compare(reference: Sequence[int], gaps: Sequence[float], answer: Sequence[int]) -> Comparison:
    """Compare token ids with the reference's; `gaps` are its top-2 logprob gaps by position.

    The first difference decides: after it the two runs answer different texts. One answer ending
    inside the other is a real difference, since the end is a token of its own.
    """
    for position, (expected, found) in enumerate(zip(reference, answer, strict=False)):
        if expected != found:
            gap = gaps[position]
            return Comparison("near-tie" if gap <= NEAR_TIE_GAP else "real", position, gap)
    if len(reference) != len(answer):
        return Comparison("real", min(len(reference), len(answer)))
    return Comparison("equal")


def agreement(reference: Sequence[AnswerRecord], answers: Sequence[AnswerRecord]) -> Agreement:
    """Count verdicts over the prompts that both sides answered; the rest are real differences."""
    by_prompt = {answer.prompt_id: answer for answer in answers}
    counts: dict[Verdict, int] = {"equal": 0, "near-tie": 0, "real": 0}
    real_prompts = []
    for expected in reference:
        found = by_prompt.get(expected.prompt_id)
        verdict: Verdict = "real"
        if found is not None:
            verdict = compare(expected.token_ids, expected.gaps or [], found.token_ids).verdict
        counts[verdict] += 1
        if verdict == "real":
            real_prompts.append(expected.prompt_id)
    return Agreement(
        equal=counts["equal"],
        near_tie=counts["near-tie"],
        real=counts["real"],
        real_prompts=real_prompts,
    )


def json_verdict(text: str, schema: dict[str, Any]) -> tuple[bool, bool]:
    """(parses as JSON, also satisfies `schema`)."""
    from jsonschema import Draft202012Validator

    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return False, False
    return True, Draft202012Validator(schema).is_valid(value)
