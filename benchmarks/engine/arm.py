"""One engine in a process of its own: `python -m benchmarks.engine.arm '{...}'`.

Speaks JSON lines over the standard output that it was started with; vLLM's log goes to the error
stream. First line {"ready": seconds}, then an answer to every line on standard input. An arm whose
request says "turns" says {"loaded": seconds} before, waits for a line, and gives its cache back
when it is ready: many engines then have room on a device whose caches would not fit together.
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import pstats
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine import acceptance, turns


def main() -> None:
    """Build the engine, then serve requests until standard input ends."""
    reply = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.argv[1])
    began = time.monotonic()

    def say(what: str) -> None:
        print(json.dumps({what: round(time.monotonic() - began, 1)}), file=reply)

    def wait_for_turn() -> None:
        gc.collect()
        say("loaded")
        sys.stdin.readline()

    prepare(request, wait_for_turn)
    engine = Engine(request)
    say("ready")
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(engine, command.pop("do"))(**command)
        print(json.dumps(answer), file=reply)


def prepare(request: dict[str, Any], wait_for_turn: Callable[[], None]) -> None:
    """What an engine needs imported and declared, without touching the device."""
    from vllm_ascend_spec.engine import launch

    if request.get("acceptance"):
        acceptance.install()
    if request.get("turns"):
        turns.install(wait_for_turn)
    launch.set_up()
    from vllm import LLM  # noqa: F401


class Engine:
    """An LLM and what the driver may ask of it."""

    def __init__(self, request: dict[str, Any]) -> None:
        from vllm_ascend_spec.engine.launch import make_llm

        self.llm = make_llm(request["model"], **request["engine"])
        self.manager = getattr(self.runner, "adaptive_verification", None)
        self._names: list[str] = []
        if request.get("acceptance") and self.manager is not None:
            acceptance.noisy_confidences(self.manager)
        if request.get("turns"):
            turns.give_back()
        gc.collect()
        gc.freeze()

    @property
    def runner(self) -> Any:
        """vLLM's model runner; the engine lives in this process."""
        from vllm_ascend_spec.engine.launch import model_runner

        return model_runner(self.llm)

    def begin(self, requests: int, prompt_tokens: int, seed: int) -> float:
        """Take the cache, and prefill so many requests, which go on; returns the seconds."""
        began = time.perf_counter()
        turns.take()
        acceptance.draws.seed = seed
        self._names = self._prefilled(requests, prompt_tokens, seed)
        acceptance.draws.follow(self._numbers(self._names))
        return time.perf_counter() - began

    def window(self, skip: int, steps: int) -> dict[str, Any]:
        """Decode throughput over `steps` steps, after `skip` others.

        Tokens that the scheduler took over the time that passed. No output is made for a caller
        meanwhile: a server does that in another process.
        """
        engine = self.llm.llm_engine
        for _ in range(skip):
            engine.step()
        before, counted = sum(self._emitted()), self.counters()
        began, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        for _ in range(steps):
            engine.step()
        seconds = time.perf_counter() - began
        thread, process = time.thread_time() - thread, time.process_time() - process
        if self._running() < len(self._names):
            raise RuntimeError(
                f"{self._running()} of {len(self._names)} requests ran at the end of a window: the "
                "cache is too small for them all (benchmarks.engine.shapes.cache_mib)"
            )
        return {
            "tokens_per_s": (sum(self._emitted()) - before) / seconds,
            "step_ms": 1e3 * seconds / steps,
            "thread_ms": 1e3 * thread / steps,
            "process_ms": 1e3 * process / steps,
            "counters": _difference(self.counters(), counted),
        }

    def end(self) -> None:
        """Drop the requests and give the cache back."""
        self._end(self._names)

    def trace(
        self, requests: int, prompt_tokens: int, steps: int, folder: str, name: str
    ) -> dict[str, float]:
        """Host and device profile of decode steps, into `folder`; ms of a step.

        NAME.host.txt: functions by their own time. NAME.kernels.txt: kernels by their time.
        NAME.json.gz: the torch profiler's trace.
        """
        turns.take()
        names = self._prefilled(requests, prompt_tokens, seed=99)
        engine, place = self.llm.llm_engine, Path(folder)
        for _ in range(24):
            engine.step()
        host = cProfile.Profile()
        began = time.perf_counter()
        host.enable()
        for _ in range(steps):
            engine.step()
        host.disable()
        profiled_ms = 1e3 * (time.perf_counter() - began) / steps
        with (place / f"{name}.host.txt").open("w") as text:
            pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(60)
        device = _device_profile(engine.step, steps, place, name)
        self._end(names)
        return {"step_ms_under_cprofile": profiled_ms, **device}

    def _prefilled(self, requests: int, prompt_tokens: int, seed: int) -> list[str]:
        """Names of requests that have emitted their first token, and go on."""
        names = [f"{seed}-{i}" for i in range(requests)]
        rng = random.Random(seed)
        sampling = self._sampling(None)
        sampling.output_kind = type(sampling.output_kind).FINAL_ONLY
        for name in names:
            ids = [rng.randrange(10, 1000) for _ in range(prompt_tokens)]
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, sampling)
        while len(self._emitted()) < requests or min(self._emitted()) == 0:
            if not self.llm.llm_engine.has_unfinished_requests():
                raise RuntimeError(
                    f"{requests} requests did not run at once: the cache or max_num_seqs is too "
                    "small for them all (benchmarks.engine.shapes.cache_mib)"
                )
            self.llm.llm_engine.step()
        return names

    def _numbers(self, names: list[str]) -> dict[int, int]:
        """Place of each request in `names` by its slot; the runner's names end in a suffix."""
        found = self.runner.req_states.req_id_to_index.items()
        return {slot: names.index(name.rpartition("-")[0]) for name, slot in found}

    def _emitted(self) -> list[int]:
        """Tokens of each unfinished request, as the scheduler knows them."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        return [request.num_output_tokens for request in scheduler.requests.values()]

    def _running(self) -> int:
        return len(self.llm.llm_engine.engine_core.engine_core.scheduler.running)

    def _end(self, names: list[str]) -> None:
        engine = self.llm.llm_engine
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        # Of a cache that is given back, a prefix found later would be of zeros.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests still hold blocks")
        turns.give_back()

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
            "cached_tokens": sum(o.num_cached_tokens or 0 for o in outputs),
            "gaps": [_gaps(o.outputs[0].logprobs) for o in outputs] if logprobs else None,
            "counters": self.counters(),
        }

    def surface(self) -> Any:
        """The measured cost surface, or None."""
        surface = getattr(self.manager, "surface", None)
        return None if surface is None else surface.model_dump(mode="json")

    def host_ms(self) -> list[float]:
        """The host's time of a step as learnt, by octave of requests."""
        cost = getattr(getattr(self.manager, "controller", None), "cost", None)
        if cost is None:
            return []
        octaves = range(self.runner.max_num_reqs.bit_length() + 1)
        return [cost.host.least(1 << octave >> 1) / 1e6 for octave in octaves]

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


def _device_profile(
    step: Callable[[], Any], steps: int, place: Path, name: str
) -> dict[str, float]:
    """Kernel time and wall time of a step under the torch profiler, ms, and how often it waits."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    averages = recorded.key_averages()
    with (place / f"{name}.kernels.txt").open("w") as text:
        text.write(averages.table(sort_by="self_cuda_time_total", row_limit=60))
    recorded.export_chrome_trace(str(place / f"{name}.json.gz"))
    kernels = sum(e.self_device_time_total for e in averages if "CUDA" in str(e.device_type))
    # Calls in which the host waits for the main stream; the last one of all is this function's.
    waits = sum(e.count for e in averages if e.key in ("cudaStreamSynchronize", "cudaMemcpy"))
    return {
        "step_ms_under_torch_profiler": 1e3 * wall / steps,
        "kernel_ms": kernels / 1e3 / steps,
        "host_waits": waits / steps,
    }


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
