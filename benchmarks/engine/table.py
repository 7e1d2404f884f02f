"""Markdown tables of results of the speed benchmark: tok/s of every arm, one table a prompt length.

    python -m benchmarks.engine.table RESULT.json ...

The adaptive arm has a figure for each group that it ran in; its ratios are over the best of no
speculation and fixed K of all groups, each compared within its own group, and over vLLM's own
adaptive arm where that ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.engine.groups import ADAPTIVE, NONE, VLLM_ADAPTIVE
from benchmarks.engine.plot import Point, points

Groups = list[dict[str, Point]]  # of one load and context


def by_context(files: list[Path]) -> dict[int, dict[int, Groups]]:
    """context -> load -> the arms of each group."""
    found: dict[int, dict[int, Groups]] = defaultdict(lambda: defaultdict(list))
    for (_, load, context), arms in points(files).items():
        found[context][load].append(arms)
    return {context: dict(by_load) for context, by_load in sorted(found.items())}


def over_fixed(groups: Groups) -> float | None:
    """The adaptive arm over the fixed arm beside it that comes nearest, in any group."""
    own = (ADAPTIVE, VLLM_ADAPTIVE)
    return _least(groups, lambda name: name not in own and not name.endswith("states"))


def over_vllms(groups: Groups) -> float | None:
    """The same over vLLM's own adaptive arm."""
    return _least(groups, lambda name: name == VLLM_ADAPTIVE)


def _least(groups: Groups, is_rival: Callable[[str], bool]) -> float | None:
    ratios = [
        arms[ADAPTIVE][0] / speed
        for arms in groups
        if ADAPTIVE in arms
        for name, (speed, _) in arms.items()
        if is_rival(name)
    ]
    return min(ratios, default=None)


def lines(by_load: dict[int, Groups]) -> list[str]:
    """One table. Spreads above one per cent are given beside the figure."""
    names = list(dict.fromkeys(n for groups in by_load.values() for arms in groups for n in arms))
    names.sort(key=lambda name: name == ADAPTIVE)
    head = ["requests", *("none" if n == NONE else n for n in names)]
    rivals = {"over the best": over_fixed, "over vLLM's": over_vllms}
    if VLLM_ADAPTIVE not in names:
        del rivals["over vLLM's"]
    head += rivals
    table = [head, ["---"] * len(head)]
    for load, groups in sorted(by_load.items()):
        cells = [" / ".join(_cell(arms[n]) for arms in groups if n in arms) for n in names]
        ratios = [ratio_of(groups) for ratio_of in rivals.values()]
        table.append([str(load), *cells, *("" if r is None else f"{r:.3f}" for r in ratios)])
    return ["| " + " | ".join(row) + " |" for row in table]


def _cell(point: Point) -> str:
    speed, spread = point
    return f"{speed:.0f}" + (f" ±{100 * spread:.0f} %" if spread > 0.01 else "")


def main(
    files: Annotated[list[Path], typer.Argument(help="Results of benchmarks.engine.adaptive.")],
) -> None:
    """Print the tables."""
    for context, by_load in by_context(files).items():
        print(f"Prompts of {context} tokens, tok/s\n")
        print("\n".join(lines(by_load)) + "\n")


if __name__ == "__main__":
    typer.run(main)
