"""Child process of the engine tests: one engine, some batches, everything it did as JSON.

Run as `python case.py REQUEST.json ANSWER.json`; `harness.py` writes and reads both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm_ascend_spec.engine import recorder
from vllm_ascend_spec.engine.launch import make_llm, model_runner


def main(request_path: str, answer_path: str) -> None:
    request = json.loads(Path(request_path).read_text())
    if request["mutation"]:
        import mutations

        getattr(mutations, request["mutation"])()
    observer = recorder.install(recorder.Recorder())
    llm = make_llm(
        request["model"],
        platform="cpu",
        speculative_config=request["speculative_config"],
        disable_log_stats=False,
        seed=0,
        **request["engine"],
    )
    spy = _SchedulerSpy(llm)
    answer = {
        "batches": {
            name: _run_batch(llm, observer, spy, batch)
            for name, batch in request["batches"].items()
        },
        "config": _describe(llm.llm_engine.vllm_config),
        "compute_hash": llm.llm_engine.vllm_config.compute_hash(),
    }
    Path(answer_path).write_text(json.dumps(answer))


def _run_batch(llm: Any, observer: recorder.Recorder, spy: _SchedulerSpy, batch: Any) -> Any:
    tokenizer = llm.get_tokenizer()
    prompts = [_prompt_ids(tokenizer, prompt) for prompt in batch["prompts"]]
    before = _counters(llm)
    observer.clear()
    spy.clear()
    outputs = []
    for group in [[p] for p in prompts] if batch["one_at_a_time"] else [prompts]:
        outputs += _generate(llm, group, batch)
    return {
        "answers": [_answer(output, observer.trace(output.request_id)) for output in outputs],
        "scheduled": spy.scheduled,
        "preemptions": spy.preemptions,
        "lengths": spy.lengths,
        "counters": {name: value - before.get(name, 0.0) for name, value in _counters(llm).items()},
    }


def _generate(llm: Any, prompts: list[list[int]], batch: Any) -> list[Any]:
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    limits = batch["max_tokens"]

    def more(index: int) -> dict[str, Any]:
        in_turn = batch["sampling_in_turn"]
        given = batch["sampling"] | in_turn[index % len(in_turn)]
        if "structured_outputs" in given:
            structured = StructuredOutputsParams(**given["structured_outputs"])
            given = given | {"structured_outputs": structured}
        return given

    sampling = [
        SamplingParams(
            **{
                "temperature": batch["temperature"],
                "seed": batch["seed"],
                "max_tokens": limits[i % len(limits)],
                "ignore_eos": True,
                "detokenize": False,
                "logprobs": 2 if batch["logprobs"] else None,
                **more(i),
            }
        )
        for i in range(len(prompts))
    ]
    inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    return llm.generate(inputs, sampling, use_tqdm=False)


def _prompt_ids(tokenizer: Any, prompt: Any) -> list[int]:
    """Token ids of a prompt given as ids or text, repeated or cut to its `length` if it has one."""
    ids = prompt.get("ids") or tokenizer.encode(prompt["text"])
    length = prompt.get("length") or len(ids)
    return (ids * (length // len(ids) + 1))[:length]


def _answer(output: Any, trace: recorder.Trace) -> Any:
    completion = output.outputs[0]
    top_two = [
        sorted((entry.logprob for entry in position.values()), reverse=True)
        for position in completion.logprobs or []
    ]
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "tokens": list(completion.token_ids),
        "text": completion.text,
        "others": [list(other.token_ids) for other in output.outputs[1:]],
        "gaps": [scores[0] - scores[1] for scores in top_two],
        "steps": [
            {
                "engine_step": step.engine_step,
                "prefill": step.prefill,
                "drafted": step.drafted,
                "verified": step.verified,
                "accepted": step.accepted,
            }
            for step in trace.keep(len(completion.token_ids))
        ],
    }


class _SchedulerSpy:
    """Rows that the scheduler gave each request in each step, and how often it preempted one.

    lengths: tokens that each round was to draft for a request, where that may differ.
    """

    def __init__(self, llm: Any) -> None:
        self.clear()
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule
        manager = getattr(model_runner(llm), "adaptive_verification", None)
        if hasattr(manager, "draft_length"):
            self._watch(manager)

        def observed(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if output.num_scheduled_tokens:
                self.scheduled.append(list(output.num_scheduled_tokens.values()))
            self.preemptions += len(output.preempted_req_ids or ())
            return output

        scheduler.schedule = observed

    def clear(self) -> None:
        self.scheduled: list[list[int]] = []
        self.lengths: list[int] = []
        self.preemptions = 0

    def _watch(self, manager: Any) -> None:
        draft_length = manager.draft_length

        def observed() -> int | None:
            length: int | None = draft_length()
            self.lengths.append(length or manager.num_speculative_steps)
            return length

        manager.draft_length = observed


def _counters(llm: Any) -> dict[str, float]:
    return {
        metric.name: float(metric.value)
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value")
    }


def _describe(config: Any) -> dict[str, Any]:
    return {
        "model_runner_v2": config.use_v2_model_runner,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "adaptive": bool(getattr(config.speculative_config, "enable_adaptive_verification", False)),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
