"""Greedy answers of the zoo's hybrid model on a GPU: adaptive, fixed K and no speculation.

    python -m benchmarks.engine.exact [--json PATH] [--methods mtp,dspark] [--prompts N]

For each answer the first token that differs, and how far the two best log-probabilities of the
first-named arm lay apart there: at most 0.25 is a near-tie of bf16 logits. The adaptive arms run
under vLLM's check for synchronising calls, and with a limit on draft rows: the host is slower than
a GPU with a model this small, so that every row would be worth verifying.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engine.driver import Arm, engine_arguments, start
from benchmarks.results import Result, Row, versions
from vllm_ascend_spec.zoo import DRAFT_TOKENS, Zoo

NEAR_TIE = 0.25
CACHE_MIB = 600
MAX_DRAFT_ROWS = 96  # of 224


def first_differences(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Top-2 gap of `one` at the first token where each pair of answers parts."""
    gaps = []
    for mine, theirs, gap in zip(one["tokens"], other["tokens"], one["gaps"], strict=True):
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if place is not None:
            gaps.append(gap[place])
    return gaps


def compared(case: str, one: dict[str, Any], other: dict[str, Any]) -> list[Row]:
    """Rows of one comparison."""
    gaps = first_differences(one, other)
    return [
        Row(
            case=case,
            metric="answers with another token",
            value=len(gaps),
            unit=f"of {len(one['tokens'])}",
            better="lower",
        ),
        Row(
            case=case,
            metric="largest top-2 gap where they part",
            value=round(max(gaps, default=0.0), 3),
            unit="logprob",
            bar=NEAR_TIE,
            better="lower",
        ),
    ]


def requests(methods: list[str], adaptive_state: str = "replay") -> dict[str, dict[str, Any]]:
    """An arm without speculation, and for every method upstream's fixed K and an adaptive arm."""
    zoo = Zoo()
    small = {"kv_cache_mib": CACHE_MIB, "max_model_len": 512, "max_num_seqs": 32}

    def arm(
        config: dict[str, Any] | None,
        state: str = "native",
        most: int | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        engine = engine_arguments(
            config, largest_graph=256, gdn_state=state, max_draft_rows=most, **small
        )
        return {"model": str(zoo.target("hybrid")), "engine": engine, **more}

    arms = {"none": arm(None)}
    for method in methods:
        arms[f"{method} fixed"] = arm(zoo.speculative_config("hybrid", method))
        arms[f"{method} adaptive"] = arm(
            zoo.speculative_config("hybrid", method, adaptive=True),
            state=adaptive_state,
            most=MAX_DRAFT_ROWS,
            environment={"VLLM_GPU_SYNC_CHECK": "warn"},
        )
    return arms


def synchronising_calls(arm: Arm) -> int:
    """What vLLM's check found while the engine served."""
    return arm.log.read_text(errors="replace").count("sync detected")


def figures(arm: Arm, answer: dict[str, Any]) -> list[Row]:
    """What an adaptive arm counted."""
    counters = answer["counters"]
    values = {
        "acceptance length over all steps": counters["emitted"] / counters["requests"],
        "draft tokens trimmed": 1 - counters["verified"] / counters["drafted"],
        "expected over real acceptances": counters["expected_accepted"] / counters["accepted"],
        "predicted over real step time": counters["predicted_ms"] / counters["real_ms"],
    }
    rows = [
        Row(case=arm.name, metric=metric, value=round(value, 3), unit="")
        for metric, value in values.items()
    ]
    rows.append(
        Row(
            case=arm.name,
            metric="synchronising calls that vLLM's check saw",
            value=synchronising_calls(arm),
            unit="calls",
            bar=0,
            better="lower",
        )
    )
    return rows


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = "mtp,eagle3,dflash,dspark",
    adaptive_state: Annotated[str, typer.Option(help="GDN states: native or replay.")] = "replay",
    prompts: Annotated[int, typer.Option(min=1)] = 256,
    tokens: Annotated[int, typer.Option(min=1)] = 128,
    logs: Annotated[Path | None, typer.Option(help="Folder for the engines' logs.")] = None,
) -> None:
    """Compare the arms and print what differs."""
    import torch
    from tokenizers import Tokenizer

    zoo = Zoo()
    tokenizer = Tokenizer.from_file(str(zoo.target("hybrid") / "tokenizer.json"))
    texts = [prompt.text for prompt in zoo.prompts()[:prompts]]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    chosen = [name.strip() for name in methods.split(",") if name.strip()]
    arms = start(requests(chosen, adaptive_state), logs or Path(tempfile.mkdtemp()))
    answers = {
        a.name: a.ask(do="answers", prompts=ids, new_tokens=tokens, logprobs=2) for a in arms
    }
    rows = []
    for method in chosen:
        for one, other in (
            ("none", f"{method} fixed"),
            ("none", f"{method} adaptive"),
            (f"{method} fixed", f"{method} adaptive"),
        ):
            if answers.get(one) and answers.get(other):
                rows += compared(f"{other} against {one}", answers[one], answers[other])
    for arm in arms:
        if arm.name.endswith("adaptive") and answers[arm.name]:
            rows += figures(arm, answers[arm.name])
        arm.close()
    result = Result(
        name="engine/adaptive_exact",
        device=torch.cuda.get_device_name(),
        repeats=1,
        versions=versions("vllm", "torch", "triton", "transformers"),
        rows=rows,
        notes=f"Zoo hybrid (GDN), {len(ids)} held-out prompts x {tokens} tokens, greedy, K = "
        f"{DRAFT_TOKENS}, adaptive arms with {adaptive_state} states and at most {MAX_DRAFT_ROWS} "
        "draft rows, up to 32 requests at once, FULL_DECODE_ONLY graphs, async scheduling.",
    )
    for row in rows:
        print(json.dumps(row.model_dump(exclude_none=True)))
    if json_path is not None:
        result.write(json_path)


if __name__ == "__main__":
    typer.run(main)
