"""What an arm is measured at: so many requests of so many prompt tokens, and for how many steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SETTLE = 16  # steps before the first window, which compiles and learns and is not counted
BREATH = 4  # steps before each later one


@dataclass(frozen=True, order=True)
class Case:
    """prompt_tokens: of each request; load: requests at once."""

    prompt_tokens: int
    load: int

    def __str__(self) -> str:
        return f"{self.load} requests, {self.prompt_tokens} tokens"

    @property
    def steps(self) -> int:
        """Decode steps of a window: few requests have few draws in a step."""
        return 48 if self.load < 64 else 32

    def all_steps(self, repeats: int) -> int:
        """Decode steps that a request lives through: a window that only warms, and the others."""
        return SETTLE + self.steps + repeats * (BREATH + self.steps)


def parsed(prompt_tokens: str, loads: str) -> list[Case]:
    """Cases of "1024,8192" and "1,64;1,16": loads for each prompt length, or one list for all.

    Raises:
        ValueError: not numbers, or as many lists as there are lengths, or one.
    """
    lengths = numbers("--prompt-tokens", prompt_tokens)
    lists = [numbers("--loads", part) for part in loads.split(";")]
    if len(lists) == 1:
        lists *= len(lengths)
    if len(lists) != len(lengths):
        raise ValueError(
            f"--loads has {len(lists)} lists for {len(lengths)} lengths of --prompt-tokens: "
            "give one for all, or one for each, with semicolons between them"
        )
    return list(_paired(lengths, lists))


def _paired(lengths: list[int], lists: list[list[int]]) -> Iterator[Case]:
    for length, loads in zip(lengths, lists, strict=True):
        yield from (Case(length, load) for load in sorted(loads, reverse=True))


def numbers(option: str, text: str) -> list[int]:
    """Comma-separated whole numbers from 1 on; ValueError names the option that holds others."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{option}: {text!r} is not a list of whole numbers from 1 on")
    return [int(part) for part in parts]
