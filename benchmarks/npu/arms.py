"""Engine arms: what one is asked, what it answers, and whether the answer may be reported."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from benchmarks.npu.talk import METHODS

VLLM_METHODS = {"dspark": "dspark", "dflash": "dflash", "eagle3": "eagle3"}
NEAR_TIE = 0.25  # a different token whose log-probability lies this close to the best one's


class Plan(BaseModel):
    """The whole engine benchmark, as the command line gave it.

    drafters: drafter directory by method. prompts: texts, repeated as often as an arm needs.
    engine: further arguments of vLLM's LLM. rounds: batches a timed run generates.
    """

    model: str
    drafters: dict[str, str]
    batches: list[int]
    draft_tokens: int
    prompts: list[str]
    output_tokens: int = 256
    rounds: int = 2
    repeats: int = 3
    check_prompts: int = 8
    check_tokens: int = 64
    platform: str = "auto"
    engine: dict[str, Any] = Field(default_factory=dict)


class Arm(BaseModel):
    """One engine: a batch size, a method, and whether lengths are dynamic.

    cost_surface: file of this engine's step costs, without which nothing is trimmed on an NPU.
    """

    batch: int
    method: str
    dynamic: bool
    plan: Plan
    cost_surface: str | None = None

    @property
    def name(self) -> str:
        lengths = "dynamic" if self.dynamic else "fixed"
        return f"BS {self.batch} {self.method}" + ("" if self.method == "none" else f" {lengths}")

    def llm_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `engine.launch.make_llm`."""
        arguments: dict[str, Any] = {
            "max_num_seqs": self.batch,
            "disable_log_stats": False,
            "seed": 0,
            **self.plan.engine,
        }
        if self.method != "none":
            arguments["speculative_config"] = {
                "method": VLLM_METHODS[self.method],
                "model": self.plan.drafters[self.method],
                "num_speculative_tokens": self.plan.draft_tokens,
            }
            ours: dict[str, Any] = {"adaptive": self.dynamic}
            if self.cost_surface is not None:
                ours["cost_surface"] = self.cost_surface
            given = arguments.get("additional_config", {})
            arguments["additional_config"] = given | {"ascend_spec": ours}
        return arguments


class Answer(BaseModel):
    """What an arm saw.

    check_tokens: greedy answers to the check prompts. check_logprobs: for the target alone, the
    log-probabilities of the best tokens at each position. tokens_per_s: one figure a repeat.
    """

    check_tokens: list[list[int]]
    check_logprobs: list[list[dict[int, float]]] | None = None
    tokens_per_s: list[float]
    acceptance_length: float | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    device: str = ""


def arms_of(plan: Plan) -> list[Arm]:
    """Every arm of the two tables for which a drafter was given, the target alone first."""
    given = [method for method in METHODS if method == "none" or method in plan.drafters]
    return [
        Arm(batch=batch, method=method, dynamic=dynamic, plan=plan)
        for batch in plan.batches
        for method in given
        for dynamic in ((False,) if method == "none" else (False, True))
    ]


def differs(answer: Answer, target: Answer) -> str | None:
    """Where an arm's greedy answers leave the target's by more than a near-tie, or None.

    From the first different token on the contexts differ, so only that one is judged.
    """
    assert target.check_logprobs is not None
    pairs = zip(answer.check_tokens, target.check_tokens, target.check_logprobs, strict=True)
    for prompt, (tokens, expected, logprobs) in enumerate(pairs):
        if len(tokens) != len(expected):
            return f"prompt {prompt}: {len(tokens)} tokens, the target gives {len(expected)}"
        same = [found == wanted for found, wanted in zip(tokens, expected, strict=True)]
        if all(same):
            continue
        at = same.index(False)
        found = logprobs[at].get(tokens[at])
        gap = None if found is None else logprobs[at][expected[at]] - found
        if gap is None or gap > NEAR_TIE:
            size = "further than the best tokens" if gap is None else f"{gap:.2f}"
            return f"prompt {prompt}, token {at}: {tokens[at]} for {expected[at]}, gap {size}"
    return None


def spread(values: list[float]) -> float:
    """Half the range, relative to the median."""
    return (max(values) - min(values)) / (2 * statistics.median(values))


def read_prompts(path: Path) -> list[str]:
    """The `text` or `prompt` of each line of a JSON-lines file."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [line.get("prompt") or line["text"] for line in lines]
