"""Runs engine cases in processes of their own and compares what they generated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# A first difference between two greedy answers where the two best logits are this close is
# rounding: bfloat16 logits of this size lie 0.03 to 0.06 apart.
NEAR_TIE = 0.25
TIMEOUT_S = 300


@dataclass(frozen=True)
class Batch:
    """Prompts of one `generate` call: {"ids": ...} or {"text": ...}, with an optional "length".

    max_tokens: one limit for each prompt in turn, so that requests leave and enter in between.
    sampling: more of vLLM's sampling parameters; `structured_outputs` as a plain object.
    sampling_in_turn: still more, for each prompt in turn.
    """

    prompts: list[dict[str, Any]]
    max_tokens: tuple[int, ...] = (24,)
    one_at_a_time: bool = False
    logprobs: bool = False
    temperature: float = 0.0
    seed: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    sampling_in_turn: tuple[dict[str, Any], ...] = ({},)


@dataclass(frozen=True)
class Case:
    """One engine and what it is asked."""

    model: str
    speculative_config: dict[str, Any] | None
    batches: dict[str, Batch]
    engine: dict[str, Any] = field(default_factory=dict)
    mutation: str | None = None


class EngineError(RuntimeError):
    """The engine's process ended with an error; carries its log."""


def run(case: Case, folder: Path) -> dict[str, Any]:
    """The case's answer as `case.py` wrote it.

    Raises:
        EngineError: the process failed.
    """
    request, answer = folder / "request.json", folder / "answer.json"
    request.write_text(json.dumps(asdict(case)))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        # Shared by the session: vLLM imports every model class in a process of its own to look at
        # it, and keeps the answer here. Nothing is compiled that a case could leave for another.
        "VLLM_CACHE_ROOT": str(folder.parent / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("case.py")), str(request), str(answer)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=TIMEOUT_S,
        check=False,
    )
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        raise EngineError(done.stdout[-4000:] + done.stderr[-8000:])
    return json.loads(answer.read_text())


class Cases:
    """Runs cases side by side, one engine a core, and keeps their results."""

    def __init__(self, make_folder: Callable[[], Path]) -> None:
        self._make_folder = make_folder
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._started: dict[str, Future[dict[str, Any]]] = {}

    def start(self, case: Case) -> Future[dict[str, Any]]:
        """The case's answer once it is there; a case that was started before is not run again."""
        key = repr(case)
        if key not in self._started:
            self._started[key] = self._pool.submit(run, case, self._make_folder())
        return self._started[key]

    def close(self) -> None:
        """Drop what has not begun."""
        self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Difference:
    """First position at which two answers to one prompt differ."""

    prompt: int
    position: int
    gap: float


def differences(reference: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    """First difference of each answer of two runs of a batch.

    The gap is the reference's between its two best logits there; infinite where it has none.
    """
    found = []
    pairs = zip(reference["answers"], other["answers"], strict=True)
    for prompt, (expected, got) in enumerate(pairs):
        assert len(expected["tokens"]) == len(got["tokens"])
        for position, tokens in enumerate(zip(expected["tokens"], got["tokens"], strict=True)):
            if tokens[0] != tokens[1]:
                gaps = expected["gaps"]
                found.append(Difference(prompt, position, gaps[position] if gaps else float("inf")))
                break
    return found


def real_differences(reference: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    """Differences that rounding does not explain; the reference must have logprobs."""
    assert all(answer["gaps"] for answer in reference["answers"])
    return [d for d in differences(reference, other) if d.gap > NEAR_TIE]


def decode_steps(batch: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Verification steps of each answer, in order."""
    return [[s for s in answer["steps"] if not s["prefill"]] for answer in batch["answers"]]


def accepted_share(batch: dict[str, Any]) -> float:
    """Draft tokens accepted of those verified."""
    steps = [step for request in decode_steps(batch) for step in request]
    return float(sum(s["accepted"] for s in steps) / sum(s["verified"] for s in steps))
