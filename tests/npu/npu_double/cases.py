"""The cases that the double's tests run, by target, method and what is switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_ascend_spec.zoo import Zoo

from . import harness
from .harness import Case
from .judge import Judgement

PROMPTS = 5
DRAFT_TOKENS = 7
# The steps of a drafting loop have one row a request; the target's graphs are larger.
DRAFTER_SIZES = (1, 2, 4)

Ran = tuple[dict[str, Any], Judgement | None]
RunCase = Callable[[Case], Ran]


def case(
    target: str,
    method: str,
    *,
    graphs: bool = False,
    surfaces: Path | None = None,
    mutation: str | None = None,
    ranks: int = 1,
) -> Case:
    """One engine.

    graphs: capture FULL graphs of decode steps. surfaces: switches adaptive verification on, with
    a cost surface that is written there. ranks: tensor parallel size.
    """
    zoo = Zoo()
    texts = tuple(prompt.text for prompt in zoo.prompts()[:PROMPTS])
    sizes = graph_sizes(method) if graphs else ()
    engine: dict[str, Any] = {}
    if graphs:
        engine["enforce_eager"] = False
        engine["compilation_config"] = {
            # Dynamo cannot trace through the double's dispatch mode.
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted({*sizes, *DRAFTER_SIZES}),
        }
    if surfaces is not None:
        surface = harness.cost_surface(surfaces, target, method, DRAFT_TOKENS, sizes, ranks)
        options = {"adaptive": True, "cost_surface": str(surface)}
        engine["additional_config"] = {"ascend_spec": options}
    speculative = zoo.speculative_config(target, method, DRAFT_TOKENS)
    base = Case(str(zoo.target(target)), speculative, texts, mutation=mutation, ranks=ranks)
    return replace(base, engine=engine)


def graph_sizes(method: str) -> tuple[int, ...]:
    """Rows of the target's graphs: one, two and four requests, so that three are padded."""
    rows = 1 if method == "none" else DRAFT_TOKENS + 1
    return (rows, 2 * rows, 4 * rows)


def right(ran: Ran) -> tuple[dict[str, Any], Judgement]:
    """The answer of a run that ended well, with every operator's value known."""
    answer, judgement = ran[0], ran[1]
    assert ran_well(answer) and judgement is not None
    assert judgement.right, judgement.gaps
    return answer, judgement


def ran_well(answer: dict[str, Any]) -> bool:
    """Whether every rank came to its end, with whole answers, known values and equal decisions."""
    for rank in (answer, *answer["others"]):
        assert rank["error"] is None, rank["error"]["traceback"][-3000:]
        assert rank["missing"] == [], "operators without a reference: their values are garbage"
        assert rank["waiting"] == 0, "a replay still waits for an update of its attention"
        assert [len(tokens) for tokens in rank["tokens"]] == rank["limits"]
        assert _lengths_agree(rank)
        assert rank["tokens"] == answer["tokens"] and rank["steps"] == answer["steps"]
    return True


def went_wrong(ran: Ran) -> bool:
    """Whether a fault showed: an error, a graph that hangs, wrong lengths or wrong tokens."""
    answer, judgement = ran
    if answer["error"] is not None or answer["waiting"] or not _lengths_agree(answer):
        return True
    return judgement is not None and not judgement.right


def _lengths_agree(answer: dict[str, Any]) -> bool:
    """Whether the host's context lengths, which attention plans with, are the device's.

    A few keys too many at the end hardly move a trained model, so tokens alone do not tell.
    """
    return all(step["lengths"] == step["host_lengths"] for step in answer["steps"])
