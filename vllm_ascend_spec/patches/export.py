"""`vllm-ascend-spec patches export`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from . import vllm, vllm_ascend
from .series import Series

SERIES: dict[str, Series] = {series.engine: series for series in (vllm.SERIES, vllm_ascend.SERIES)}


def run(engine: str, source: Path, out: Path) -> None:
    """Write the series for `engine` and say how it is applied."""
    written = SERIES[engine].export(source, out)
    console = Console(soft_wrap=True, highlight=False)
    for path in written:
        console.print(escape(path.name))
    # Without the option git drops the [Type][Module] that upstream's titles begin with.
    console.print(f"apply: git am --keep-non-patch {escape(str(out))}/*.patch")
