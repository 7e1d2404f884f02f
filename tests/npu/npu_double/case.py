"""Child process of the double's tests: one engine, one batch, everything it did as JSON.

Run as `python -m npu_double.case REQUEST.json ANSWER.json`; `harness.py` writes and reads both.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import startup

if TYPE_CHECKING:
    from .device import NpuDouble

ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    # The profile run computes this many tokens under the interpreter.
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "seed": 0,
    "disable_log_stats": False,
    "enable_prefix_caching": False,
}


def main(request_path: str, answer_path: str) -> None:
    request = json.loads(Path(request_path).read_text())
    double = startup.install(Path(request["vllm_ascend"]))
    answer: dict[str, Any] = {"error": None}
    try:
        answer |= _run(request, double)
    except BaseException as error:
        answer["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
    Path(answer_path).write_text(json.dumps(answer))
    sys.stdout.flush()
    # torch_npu's own shutdown waits for threads that the double never started.
    os._exit(0)


def _run(request: dict[str, Any], double: NpuDouble) -> dict[str, Any]:
    from . import mutations, observe

    for name in (request["mutation"] or "").split("+"):
        if name:
            getattr(mutations, name)()
    with double:
        llm = _engine(request)
        steps = observe.steps(_runner(llm))
        double.calls.clear()
        captures = double.graphs.counts["captures"]
        double.graphs.counts.clear()
        double.graphs.lengths.clear()
        outputs = _generate(llm, request)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "prompts": [list(output.prompt_token_ids) for output in outputs],
            "limits": [limit for _ in range(request["rounds"]) for limit in _limits(request)],
            "cached_tokens": [output.num_cached_tokens or 0 for output in outputs],
            "engine": _describe(llm),
            "counters": _counters(llm),
            "steps": steps,
            "operators": {k: n for k, n in double.calls.items() if not k.startswith("aten")},
            "missing": sorted(double.missing),
            "graphs": {"captures": captures, **double.graphs.counts},
            "updated_lengths": double.graphs.lengths,
            "captured_lengths": double.graphs.captured_lengths,
            "waiting": double.graphs.waiting(),
            "replacements": observe.replacements(),
        }


def _engine(request: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        model=request["model"],
        speculative_config=request["speculative_config"],
        **(ENGINE | request["engine"]),
    )


def _generate(llm: Any, request: dict[str, Any]) -> list[Any]:
    from vllm import SamplingParams, TokensPrompt

    tokenizer, cuts = llm.get_tokenizer(), request["prompt_tokens"]
    prompts = [
        TokensPrompt(prompt_token_ids=tokenizer.encode(text)[: cuts[position % len(cuts)]])
        for position, text in enumerate(request["prompts"])
    ]
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    outputs: list[Any] = []
    for turn in range(request["rounds"]):
        sampling = [
            SamplingParams(
                max_tokens=limit,
                seed=turn * len(prompts) + position,
                **(greedy | request["sampling"]),
            )
            for position, limit in enumerate(_limits(request))
        ]
        outputs += llm.generate(prompts, sampling, use_tqdm=False)
    return outputs


def _limits(request: dict[str, Any]) -> list[int]:
    limits = request["max_tokens"]
    return [limits[position % len(limits)] for position in range(len(request["prompts"]))]


def _runner(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def _describe(llm: Any) -> dict[str, Any]:
    from vllm.platforms import current_platform

    runner, config = _runner(llm), llm.llm_engine.vllm_config
    groups = [group for groups in runner.attn_groups for group in groups]
    return {
        "platform": _name(type(current_platform)),
        "runner": _name(type(runner)),
        "runner_bases": [_name(base) for base in type(runner).__mro__],
        "lane": _lane(runner),
        "ranks": config.parallel_config.world_size,
        "speculator": _name(type(runner.speculator)) if runner.speculator else None,
        "backends": sorted({_name(group.backend) for group in groups}),
        "builders": sorted({_name(type(group.get_metadata_builder(0))) for group in groups}),
        "device": str(runner.device),
        "async_scheduling": config.scheduler_config.async_scheduling,
        "graphs": config.compilation_config.cudagraph_mode.name,
    }


def _lane(runner: Any) -> str | None:
    planner = getattr(runner, "length_planner", None)
    return planner.lane.value if planner else None


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _counters(llm: Any) -> dict[str, float]:
    return {
        metric.name.removeprefix("vllm:spec_decode_num_"): float(metric.value)
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")
    }


if __name__ == "__main__":
    main(*sys.argv[1:3])
