"""The zoo's corpus: seeded assistant tasks, most of them with JSON answers.

`examples(split, seed, n)` draws tasks; `held_out_prompts` draws prompts that no training run can
have seen: another seed stream, and names, codes, products, bfcl-eval functions and library files
that the training split never uses.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tools.zoo.config import MAX_ANSWER_TOKENS, MAX_PROMPT_TOKENS
from tools.zoo.corpus_calls import function_call
from tools.zoo.corpus_chat import chat
from tools.zoo.corpus_code import code_completion
from tools.zoo.corpus_convert import conversion
from tools.zoo.corpus_extract import extraction
from tools.zoo.corpus_schema import JSON_KINDS, Example, Kind, Schema, matches
from tools.zoo.corpus_values import Values

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Split = Literal["train", "held_out"]
MIN_PROMPT_TOKENS = 12
MIN_ANSWER_TOKENS = 6

# Share of each kind in percent.
_MIX = (
    (36, extraction),
    (26, function_call),
    (22, conversion),
    (7, code_completion),
    (9, chat),
)


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt. `text` is the chat-templated prompt, ready for generation."""

    id: str
    kind: Kind
    text: str
    schema: Schema | None
    reference: str


def draw_example(rng: random.Random, held_out: bool) -> Example:
    """Draw one task of the mix."""
    roll = rng.random() * 100
    values = Values(rng, held_out)
    for share, draw in _MIX:
        roll -= share
        if roll < 0:
            return draw(values)
    return chat(values)


def examples(split: Split, seed: int | str, count: int) -> Iterator[Example]:
    """Yield `count` tasks of a split; the same split and seed give the same tasks."""
    rng = random.Random(f"{split}-{seed}")
    for _ in range(count):
        yield draw_example(rng, split == "held_out")


def fits(prompt_tokens: int, answer_tokens: int) -> bool:
    """Whether an example keeps the corpus's length limits (counted in tokens)."""
    return (
        MIN_PROMPT_TOKENS <= prompt_tokens <= MAX_PROMPT_TOKENS
        and MIN_ANSWER_TOKENS <= answer_tokens <= MAX_ANSWER_TOKENS
    )


def held_out_prompts(n: int, seed: int, tokenizer: Tokenizer | None = None) -> list[Prompt]:
    """Draw `n` held-out prompts that keep the length limits of the corpus's tokenizer."""
    from tools.zoo.tokenizer import load_tokenizer, prompt_text

    tok = load_tokenizer() if tokenizer is None else tokenizer
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for example in examples("held_out", seed, 1_000_000):
        text = prompt_text(example.request)
        if text in seen or not fits(len(tok.encode(text)), len(tok.encode(example.answer))):
            continue
        seen.add(text)
        name = f"{example.kind}-{seed}-{len(prompts)}"
        prompts.append(Prompt(name, example.kind, text, example.schema, example.answer))
        if len(prompts) == n:
            return prompts
    raise ValueError(f"cannot draw {n} distinct held-out prompts: only {len(prompts)} exist")


def write_prompts(path: Path, prompts: list[Prompt]) -> None:
    """Write prompts as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(p)) + "\n" for p in prompts), encoding="utf-8")


@dataclass(frozen=True)
class JsonScore:
    """Shares of answers to JSON prompts; `count` prompts were scored."""

    count: int
    parses: float
    schema_valid: float
    exact: float


@functools.cache
def _decode(text: str) -> tuple[bool, object]:
    try:
        return True, json.loads(text)
    except json.JSONDecodeError:
        return False, None


def score_json(prompts: list[Prompt], answers: list[str]) -> JsonScore:
    """Score answers (text without the end token) against the prompts that ask for JSON."""
    rows = [(p, a) for p, a in zip(prompts, answers, strict=True) if p.kind in JSON_KINDS]
    if not rows:
        raise ValueError("no prompt asks for JSON")
    parsed = valid = exact = 0
    for prompt, answer in rows:
        good, value = _decode(answer)
        parsed += good
        valid += good and matches(value, prompt.schema or {})
        exact += answer == prompt.reference
    n = len(rows)
    return JsonScore(n, parsed / n, valid / n, exact / n)


def main() -> None:
    """Write the frozen held-out prompts that ship with the package."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    write_prompts(args.out, held_out_prompts(args.count, args.seed))


if __name__ == "__main__":
    main()
