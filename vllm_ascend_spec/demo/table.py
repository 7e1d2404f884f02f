"""The demo's table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from vllm_ascend_spec.demo.records import ArmRow

SPEED_NOTE = (
    "tokens/s: Triton's interpreter on one core an arm. It says nothing about any method's speed."
)


def table(rows: Sequence[ArmRow]) -> Table:
    """One line an arm."""
    shown = Table(title=None, header_style="bold", pad_edge=False)
    shown.add_column("method", no_wrap=True)
    for heading in (
        "acceptance\nlength",
        "draft tokens:\ndrafted /\nverified /\naccepted",
        "JSON\nvalid\n(schema)",
        "answers:\nequal /\nnear-tie /\ndifferent",
        "tokens/s",
    ):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(*cells(row), style="dim" if row.status == "not yet" else None)
    return shown


def cells(row: ArmRow) -> list[Text]:
    """The row's cells, styled where something is wrong."""
    if row.status != "ok":
        style = "bold red" if row.status == "failed" else "dim"
        return [Text(row.title), Text(row.status, style), *([Text("")] * 4)]
    agreed = row.agreement
    return [
        Text(row.title),
        Text(number(row.acceptance_length, 2), "bold"),
        Text(f"{row.drafted} / {row.verified} / {row.accepted}" if row.drafted else "-"),
        Text(
            f"{share(row.json_valid, row.json_answers)} "
            f"({share(row.schema_valid, row.json_answers)})"
        ),
        Text("reference")
        if agreed is None
        else Text(
            f"{agreed.equal} / {agreed.near_tie} / {agreed.real}",
            "bold red" if agreed.real else "green",
        ),
        Text(number(row.tokens_per_second, 1), "dim"),
    ]


def share(part: int, whole: int) -> str:
    """A whole percentage, "-" of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
