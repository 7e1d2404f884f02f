"""Child process of `test_drawn_drafts.py`: few requests whose draft tokens are drawn.

Run as `python drawn_case.py ANSWER.json METHOD adaptive|fixed|faulty`. Faulty: adaptive, with the
drafter's first pass in full graphs as vLLM has it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine import chi_square, exact, exact_arms
from benchmarks.engine.sampled_arm import Tokens, watch
from vllm_ascend_spec.engine import first_pass
from vllm_ascend_spec.engine.launch import make_llm, model_runner, sampling_params

REQUESTS, PROMPTS, NEW_TOKENS = 3, 60, 96
TEMPERATURE, TOP_P = 1.0, 0.9


def count_nan(runner: Any) -> list[int]:
    """After every step, how many requests have drafts with a NaN in their logits."""
    counts: list[int] = []
    propose = runner.speculator.propose

    def observed(*args: Any, **named: Any) -> Any:
        drafts = propose(*args, **named)
        counts.append(int(runner.speculator.draft_logits.isnan().any(-1).any(-1).sum()))
        return drafts

    runner.speculator.propose = observed
    return counts


def main() -> None:
    answer, method, kind = sys.argv[1:4]
    if kind == "faulty":
        first_pass.piecewise_part = lambda mode: mode  # type: ignore[assignment]
    host = exact_arms.Host.here(Path(answer).parent)
    arm = f"{method} {'fixed' if kind == 'fixed' else 'adaptive'}"
    asked = exact_arms.requests([method], host)[arm]
    asked["engine"]["speculative_config"]["draft_sample_method"] = "probabilistic"
    llm = make_llm(asked["model"], **asked["engine"])
    runner = model_runner(llm)
    tokens = Tokens()
    watch(runner, tokens)
    counts = count_nan(runner)
    sampling = sampling_params(
        temperature=TEMPERATURE, top_p=TOP_P, max_tokens=NEW_TOKENS, ignore_eos=True
    )
    # Fewer than the engine has room for: its graphs are laid out for more requests than run.
    prompts = [{"prompt_token_ids": ids} for ids in exact.prompt_ids(PROMPTS)]
    for first in range(0, PROMPTS, REQUESTS):
        llm.generate(prompts[first : first + REQUESTS], sampling, use_tqdm=False)
    seen = tokens.arrays()
    result = {
        "tokens": len(seen["token"]),
        "impossible": chi_square.impossible(seen["logits"], seen["token"], TEMPERATURE, TOP_P),
        "requests_with_nan": int(np.sum(counts)),
        "steps": int((seen["offset"] == 0).sum()),
        "verified_whole": float((seen["verified"] == seen["drafted"]).mean()),
    }
    Path(answer).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
