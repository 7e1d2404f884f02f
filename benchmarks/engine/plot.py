"""Throughput of every arm over the adaptive one, by load, from results of the speed benchmark.

    python -m benchmarks.engine.plot OUT.svg RESULT.json ...

A panel for each prompt length. Arms of one load are compared within their group alone, which ran
side by side; whiskers are the spread of the repeats. Needs the extra `bench`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engine.groups import ADAPTIVE
from benchmarks.results import Result

# group, load, context, arm
_CASE = re.compile(r"group (\d+), (\d+) requests, (\d+) tokens, (.+)")

Point = tuple[float, float]  # throughput in tok/s, relative spread


def points(files: list[Path]) -> dict[tuple[str, int, int], dict[str, Point]]:
    """(file and group, load, context) -> arm -> its throughput."""
    found: dict[tuple[str, int, int], dict[str, Point]] = defaultdict(dict)
    for file in files:
        for row in Result.model_validate_json(file.read_text("utf-8")).rows:
            case = _CASE.fullmatch(row.case)
            if case is not None and row.metric == "throughput":
                group, load, context, arm = case.groups()
                key = (f"{file.stem} {group}", int(load), int(context))
                found[key][arm] = (row.value, row.spread or 0.0)
    return dict(found)


def over_adaptive(
    found: dict[tuple[str, int, int], dict[str, Point]],
) -> dict[int, dict[str, dict[int, list[Point]]]]:
    """context -> arm -> load -> (its throughput over the adaptive arm's beside it, spread)."""
    ratios: dict[int, dict[str, dict[int, list[Point]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for (_, load, context), arms in found.items():
        if ADAPTIVE not in arms:
            continue
        own, own_spread = arms[ADAPTIVE]
        for arm, (speed, spread) in arms.items():
            if arm != ADAPTIVE:
                ratios[context][arm][load].append((speed / own, spread + own_spread))
    return {
        context: {arm: dict(by_load) for arm, by_load in by_arm.items()}
        for context, by_arm in ratios.items()
    }


def main(
    out: Annotated[Path, typer.Argument(help="Image to write; its suffix says which kind.")],
    files: Annotated[list[Path], typer.Argument(help="Results of benchmarks.engine.adaptive.")],
) -> None:
    """Draw the fixed arms against the adaptive one, which is 1."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "adaptive"  # the same file from the same results
    from matplotlib import pyplot

    ratios = over_adaptive(points(files))
    figure, panels = pyplot.subplots(
        1, len(ratios), figsize=(7 * len(ratios), 4), layout="constrained", squeeze=False
    )
    arms = sorted({arm for by_arm in ratios.values() for arm in by_arm})
    colours = {arm: f"C{number}" for number, arm in enumerate(arms)}
    for axes, context in zip(panels[0], sorted(ratios), strict=True):
        _draw(axes, ratios[context], colours)
        axes.set_title(f"prompts of {context} tokens")
    shown = {
        label: line
        for axes in panels[0]
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown.keys(), loc="outside right center")
    figure.suptitle(Result.model_validate_json(files[0].read_text("utf-8")).device)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _draw(axes: Any, by_arm: dict[str, dict[int, list[Point]]], colours: dict[str, str]) -> None:
    for arm, by_load in sorted(by_arm.items()):
        loads = sorted(by_load)
        best = [max(by_load[load]) for load in loads]
        values = [value for value, _ in best]
        whiskers = [value * spread for value, spread in best]
        axes.errorbar(
            loads, values, yerr=whiskers, marker="o", capsize=3, label=arm, color=colours[arm]
        )
    axes.axhline(1.0, color="black", linewidth=1.5, label=ADAPTIVE)
    axes.set_xscale("log", base=2)
    ticks = sorted({load for by_load in by_arm.values() for load in by_load})
    axes.set_xticks(ticks, [str(load) for load in ticks])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("throughput, adaptive = 1")


if __name__ == "__main__":
    typer.run(main)
