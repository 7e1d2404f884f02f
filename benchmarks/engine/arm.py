"""One engine in a process of its own: `python -m benchmarks.engine.arm '{...}'`.

Speaks JSON lines over the standard output that it was started with; vLLM's log goes to the error
stream. First line {"ready": seconds}, then an answer to every line on standard input.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from typing import Any

from benchmarks.engine import acceptance


def main() -> None:
    """Build the engine, then serve requests until standard input ends."""
    reply = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.argv[1])
    began = time.monotonic()
    engine = Engine(request)
    print(json.dumps({"ready": round(time.monotonic() - began, 1)}), file=reply)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(engine, command.pop("do"))(**command)
        print(json.dumps(answer), file=reply)


class Engine:
    """An LLM and what the driver may ask of it."""

    def __init__(self, request: dict[str, Any]) -> None:
        from vllm_ascend_spec.engine.launch import make_llm

        if request.get("acceptance"):
            acceptance.install()
        self.llm = make_llm(request["model"], **request["engine"])
        self.manager = getattr(self.runner, "adaptive_verification", None)
        if request.get("acceptance") and self.manager is not None:
            acceptance.noisy_confidences(self.manager)
        gc.collect()
        gc.freeze()

    @property
    def runner(self) -> Any:
        """vLLM's model runner; the engine lives in this process."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    def windows(
        self, loads: list[int], prompt_tokens: int, skip: int, steps: int, seed: int
    ) -> list[dict[str, Any]]:
        """Decode throughput at each load, largest first, in one batch that shrinks.

        Every prompt is prefilled once. For each load, `skip` steps settle and `steps` steps are
        timed: tokens that reached the caller over the time that passed.
        """
        engine, lengths = self.llm.llm_engine, {}
        names = [f"{seed}-{i}" for i in range(max(loads))]
        rng = random.Random(seed)
        for name in names:
            ids = [rng.randrange(10, 1000) for _ in range(prompt_tokens)]
            engine.add_request(name, {"prompt_token_ids": ids}, self._sampling(None))

        def step() -> None:
            for output in engine.step():
                lengths[output.request_id] = len(output.outputs[0].token_ids)

        while len(lengths) < len(names):
            step()
        found = []
        for load in sorted(loads, reverse=True):
            engine.abort_request(names[load:])
            names = names[:load]
            for _ in range(skip):
                step()
            before, counted = sum(lengths[n] for n in names), self.counters()
            began = time.perf_counter()
            for _ in range(steps):
                step()
            seconds = time.perf_counter() - began
            tokens = sum(lengths[n] for n in names) - before
            found.append(
                {
                    "load": load,
                    "tokens_per_s": tokens / seconds,
                    "step_ms": 1e3 * seconds / steps,
                    "counters": _difference(self.counters(), counted),
                }
            )
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        return found

    def answers(
        self, prompts: list[list[int]], new_tokens: int, logprobs: int | None = None
    ) -> dict[str, Any]:
        """Greedy answers as token ids; with `logprobs`, the gap of the two best at each token."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            self._sampling(new_tokens, logprobs),
            use_tqdm=False,
        )
        return {
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "gaps": [_gaps(o.outputs[0].logprobs) for o in outputs] if logprobs else None,
            "counters": self.counters(),
        }

    def surface(self) -> Any:
        """The measured cost surface, or None."""
        surface = getattr(self.manager, "surface", None)
        return None if surface is None else surface.model_dump(mode="json")

    def counters(self) -> dict[str, float]:
        """The planner's totals; empty where vLLM plans."""
        controller = getattr(self.manager, "controller", None)
        return {} if controller is None else dict(vars(controller.counters))

    @staticmethod
    def _sampling(new_tokens: int | None, logprobs: int | None = None) -> Any:
        from vllm_ascend_spec.engine.launch import sampling_params

        return sampling_params(
            temperature=0.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
        )


def _gaps(logprobs: Any) -> list[float]:
    """Distance of the two best log-probabilities of each token."""
    result = []
    for position in logprobs:
        best = sorted((value.logprob for value in position.values()), reverse=True)
        result.append(best[0] - best[1] if len(best) > 1 else float("inf"))
    return result


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


if __name__ == "__main__":
    main()
