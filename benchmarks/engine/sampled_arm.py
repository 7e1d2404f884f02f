"""One engine of `sampled` in a process of its own: `python -m benchmarks.engine.sampled_arm FILE`.

Samples from a toy model and keeps, for every token that came out, the logits row that it was
sampled from and how it came about. Writes them as arrays; see `main`.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Columns = dict[str, list[np.ndarray[Any, Any]]]


@dataclass
class Tokens:
    """What a run emitted, one entry a token, in the order in which it was emitted.

    request: number of the prompt. logits: float32 [V], the target's, before temperature and top-p.
    offset: place in its step. verified, drafted: draft tokens of its request in that step.
    """

    names: dict[str, int] = field(default_factory=dict)
    columns: Columns = field(
        default_factory=lambda: {
            name: [] for name in ("request", "token", "logits", "offset", "verified", "drafted")
        }
    )

    def step(
        self, requests: list[str], drafted: Any, rows: Any, sampled: Any, emitted: Any, logits: Any
    ) -> None:
        """One step: logits rows [R + 1] as offsets, sampled [R, K + 1], emitted [R]."""
        counts = emitted.astype(np.int64)
        owner = np.repeat(np.arange(len(requests)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        offset = np.arange(counts.sum()) - first
        numbers = np.array([self._number(name) for name in requests])
        values = {
            "request": numbers[owner],
            "token": sampled[owner, offset],
            "logits": logits[rows[owner] + offset],
            "offset": offset,
            "verified": (np.diff(rows) - 1)[owner],
            "drafted": drafted[owner],
        }
        for name, value in values.items():
            self.columns[name].append(value)

    def _number(self, name: str) -> int:
        return self.names.setdefault(name.rpartition("-")[0] or name, len(self.names))

    def arrays(self) -> dict[str, Any]:
        """Everything in one array a column."""
        return {name: np.concatenate(parts) for name, parts in self.columns.items()}


def watch(runner: Any, tokens: Tokens) -> None:
    """Let `tokens` see every step of a runner."""
    sample, compute = runner.sample, runner.model.compute_logits

    def observed(hidden: Any, batch: Any, grammar: Any) -> Any:
        seen: list[Any] = []

        def compute_logits(*args: Any, **named: Any) -> Any:
            logits = compute(*args, **named)
            seen.append(logits.float().clone())  # what follows changes the rows in place
            return logits

        runner.model.compute_logits = compute_logits
        try:
            output, num_sampled, num_rejected = sample(hidden, batch, grammar)
        finally:
            runner.model.compute_logits = compute
        drafted = batch.num_draft_tokens_per_req
        tokens.step(
            list(batch.req_ids),
            np.zeros(batch.num_reqs, np.int64) if drafted is None else drafted.copy(),
            batch.cu_num_logits.cpu().numpy().astype(np.int64)[: batch.num_reqs + 1],
            output.sampled_token_ids.cpu().numpy().reshape(batch.num_reqs, -1),
            num_sampled.cpu().numpy()[: batch.num_reqs],
            seen[-1].cpu().numpy(),
        )
        return output, num_sampled, num_rejected

    runner.sample = observed


def main() -> None:
    """Build the engine, sample every prompt, write the arrays to `out`."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if request.get("fault"):
        module, _, name = request["fault"].partition(":")
        getattr(importlib.import_module(module), name)()
    from vllm_ascend_spec.engine.launch import make_llm, model_runner, sampling_params

    llm = make_llm(request["model"], **request["engine"])
    runner = model_runner(llm)
    tokens = Tokens()
    watch(runner, tokens)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in request["prompts"]],
        [
            sampling_params(**sampling, ignore_eos=True, detokenize=False)
            for sampling in request["sampling"]
        ],
        use_tqdm=False,
    )
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    arrays = tokens.arrays()
    # Numbers were given in the order in which requests were first seen.
    order = np.array([tokens.names[output.request_id] for output in outputs])
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    arrays["request"] = place[arrays["request"]]
    manager = getattr(runner, "adaptive_verification", None)
    counters = getattr(getattr(manager, "controller", None), "counters", None)
    np.savez(
        request["out"],
        answers=np.array(answers, dtype=object),
        counters=json.dumps(vars(counters) if counters is not None else {}),
        **arrays,
    )


if __name__ == "__main__":
    main()
