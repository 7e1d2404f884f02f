"""The talk's two tables with this run's figures beside the talk's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from benchmarks.npu.arms import Answer
from benchmarks.npu.talk import FIGURES, METHODS, TITLES, Figure

Key = tuple[int, str, bool]  # batch, method, dynamic
Seen = Mapping[Key, Answer | str]  # an answer, or why there is no figure
NOT_RUN = "not run"


def table(batch: int, seen: Seen) -> str:
    """One batch size as Markdown: fixed and dynamic lengths, this run and the talk."""
    lines = [
        f"### BS {batch}",
        "",
        "| | fixed, this run | fixed, talk | dynamic, this run | dynamic, talk |",
        "|---|---|---|---|---|",
    ]
    for method in METHODS:
        cells = [
            text
            for dynamic in (False, True)
            for text in (
                _cell(batch, method, dynamic, seen),
                str(FIGURES.get((batch, method, dynamic), Figure())),
            )
        ]
        if method == "none":
            cells[2:] = ["", ""]
        lines.append(" | ".join([f"| {TITLES[method]}", *cells]) + " |")
    return "\n".join(lines)


def ratio(batch: int, method: str, dynamic: bool, seen: Seen) -> float | None:
    """Throughput relative to the target alone, if both have a figure."""
    own, target = seen.get((batch, method, dynamic)), seen.get((batch, "none", False))
    if not isinstance(own, Answer) or not isinstance(target, Answer):
        return None
    return statistics.median(own.tokens_per_s) / statistics.median(target.tokens_per_s)


def _cell(batch: int, method: str, dynamic: bool, seen: Seen) -> str:
    found = seen.get((batch, method, dynamic), NOT_RUN)
    if isinstance(found, str):
        return found
    parts = [f"{statistics.median(found.tokens_per_s):.0f} tok/s"]
    relative = ratio(batch, method, dynamic, seen)
    parts += [f"{relative:.2f}x"] if relative is not None else []
    parts += [f"length {found.acceptance_length:.2f}"] if found.acceptance_length else []
    return ", ".join(parts)
