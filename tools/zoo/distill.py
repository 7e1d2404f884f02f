"""Lets a trained target answer prompts of the corpus; the drafters learn from these answers.

    python -m tools.zoo.distill --target DIR --out answers.safetensors --count 40000
    python -m tools.zoo.distill --target DIR --out held_out.safetensors --split held_out --count 300

Answers are greedy. A share of them (`--branches`) leaves the greedy path once, at a random place,
with a token sampled at temperature 0.7, and goes on greedily: drafters then also see contexts
that sampling requests lead to, still with the target's own continuation as truth.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from tools.zoo.config import IM_END_ID, MAX_ANSWER_TOKENS, PAD_ID
from tools.zoo.corpus import Split
from tools.zoo.drafters import load_frozen_target
from tools.zoo.drafters_data import Answers, pack_answers
from tools.zoo.generate import greedy_answers
from tools.zoo.modeling import Target

_SHARD = 2000
TEMPERATURE = 0.7


def _shard_prompts(job: tuple[Split, str, int]) -> list[list[int]]:
    from tools.zoo.packing import tokenise_shard

    return [tokens[:prompt] for tokens, prompt in tokenise_shard(job)]


def training_prompts(count: int, seed: int, workers: int) -> list[list[int]]:
    """Distinct prompts (token ids) of the training split; tasks over the length limits drop out."""
    jobs: list[tuple[Split, str, int]] = [
        ("train", f"distill-{seed}.{i}", min(_SHARD, count - i * _SHARD))
        for i in range(-(-count // _SHARD))
    ]
    if workers <= 1:
        shards = [_shard_prompts(job) for job in jobs]
    else:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            shards = pool.map(_shard_prompts, jobs, chunksize=1)
    return [list(p) for p in dict.fromkeys(tuple(p) for shard in shards for p in shard)]


def held_out_prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts (token ids) of the held-out split."""
    from tools.zoo.corpus import held_out_prompts as draw
    from tools.zoo.tokenizer import load_tokenizer

    tokenizer = load_tokenizer()
    return [tokenizer.encode(p.text).ids for p in draw(count, seed, tokenizer)]


@torch.no_grad()
def branch_points(
    target: Target, answers: Answers, generator: torch.Generator, batch: int = 512
) -> list[list[int]]:
    """One prefix per answer: prompt, the answer up to a random place, one sampled token there."""
    device = target.lm_head.weight.device
    prefixes: list[list[int]] = []
    for first in range(0, len(answers), batch):
        documents = [answers.document(i) for i in range(first, min(first + batch, len(answers)))]
        prompts = answers.prompt_lengths[first : first + len(documents)]
        spans = torch.tensor([len(d) for d in documents]) - prompts
        places = prompts + (torch.rand(len(documents), generator=generator) * spans).long()
        rows = torch.nn.utils.rnn.pad_sequence(documents, True, PAD_ID).to(device)
        hidden = target(rows).final[torch.arange(len(documents)), places.to(device) - 1]
        weights = (target.lm_head(hidden).float() / TEMPERATURE).softmax(-1).cpu()
        sampled = torch.multinomial(weights, 1, generator=generator).squeeze(-1).tolist()
        prefixes += [
            [*d[:place].tolist(), token]
            for d, place, token in zip(documents, places.tolist(), sampled, strict=True)
        ]
    return prefixes


def branched_answers(
    target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], seed: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Second answers to `prompts` that leave the greedy `answers` once (see module docstring)."""
    packed = pack_answers(prompts, answers)
    prefixes = branch_points(target, packed, torch.Generator().manual_seed(seed))
    lengths = packed.prompt_lengths.tolist()
    # A sampled end token closes the answer; nothing is left to draft after it.
    kept = [(p, n) for p, n in zip(prefixes, lengths, strict=True) if p[-1] != IM_END_ID]
    rest = greedy_answers(target, [p for p, _ in kept], MAX_ANSWER_TOKENS)
    return (
        [p[:n] for p, n in kept],
        [[*p[n:], *tail][:MAX_ANSWER_TOKENS] for (p, n), tail in zip(kept, rest, strict=True)],
    )


def main(
    target: Annotated[Path, typer.Option(help="Checkpoint of the target.")],
    out: Annotated[Path, typer.Option(help="Answers file (safetensors).")],
    count: Annotated[int, typer.Option(help="Tasks to draw.")] = 40_000,
    split: Annotated[str, typer.Option(help="train or held_out.")] = "train",
    branches: Annotated[float, typer.Option(help="Share that also branches once.")] = 0.1,
    seed: Annotated[int, typer.Option()] = 0,
    workers: Annotated[int, typer.Option(help="Processes that draw tasks.")] = 8,
    batch: Annotated[int, typer.Option(help="Rows decoded together.")] = 8192,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
) -> None:
    """Write the target's answers."""
    if split not in ("train", "held_out"):
        raise typer.BadParameter(f"--split {split!r}: choose train or held_out")
    began = time.monotonic()
    prompts = (
        training_prompts(count, seed, workers)
        if split == "train"
        else held_out_prompts(count, seed)
    )
    drawn = time.monotonic() - began
    model = load_frozen_target(target, torch.device(device))
    answers = greedy_answers(model, prompts, MAX_ANSWER_TOKENS, batch)
    branching = int(len(prompts) * branches) if split == "train" else 0
    if branching:
        more_prompts, more_answers = branched_answers(
            model, prompts[:branching], answers[:branching], seed
        )
        prompts, answers = more_prompts + prompts, more_answers + answers
    packed = pack_answers(prompts, answers)
    packed.save(out)
    ended = sum(a[-1] == IM_END_ID for a in answers if a) / max(1, len(packed))
    tokens = int(packed.tokens.numel() - packed.prompt_lengths.sum())
    typer.echo(
        f"{len(packed)} answers, {tokens} answer tokens, {ended:.1%} end by themselves; "
        f"prompts {drawn:.1f} s, all {time.monotonic() - began:.1f} s"
    )


if __name__ == "__main__":
    typer.run(main)
