"""`python -m benchmarks.summary`: every committed figure that has a bar, missed ones first."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.results import RESULTS, Result, Row


def barred_rows(folder: Path = RESULTS) -> list[tuple[str, Row]]:
    """(benchmark, row) of each row with a bar, missed ones first, else in file order."""
    rows = [
        (result.name, row)
        for path in sorted(folder.rglob("*.json"))
        for result in [Result.model_validate_json(path.read_text(encoding="utf-8"))]
        for row in result.rows
        if row.bar is not None
    ]
    return sorted(rows, key=lambda item: bool(item[1].met))


def main() -> None:
    """Print the table."""
    table = Table("benchmark", "case", "metric", "value", "bar", "met")
    for name, row in barred_rows():
        relation = ">=" if row.better == "higher" else "<="
        table.add_row(
            name,
            row.case,
            row.metric,
            f"{row.value:.4g} {row.unit}",
            f"{relation} {row.bar:g}",
            "[green]yes[/]" if row.met else "[red]no[/]",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
