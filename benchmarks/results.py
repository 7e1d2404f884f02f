"""The result file that every benchmark writes; committed ones lie in `benchmarks/results/`."""

from __future__ import annotations

import datetime
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

RESULTS = Path(__file__).parent / "results"


class Row(BaseModel):
    """One figure: `value` of `metric` for `case`, with the bar that it has to meet, if any.

    spread: relative, (p90 - p10) / (2 median) unless the benchmark says otherwise. baseline: the
    figure compared with, in the same run.
    """

    case: str
    metric: str
    value: float
    unit: str
    spread: float | None = None
    baseline: float | None = None
    bar: float | None = None
    better: Literal["higher", "lower"] = "higher"
    met: bool | None = None

    def model_post_init(self, _context: object) -> None:
        """Fill `met` from `value`, `bar` and `better` where a bar is given."""
        if self.bar is not None and self.met is None:
            higher = self.better == "higher"
            self.met = self.value >= self.bar if higher else self.value <= self.bar


class Result(BaseModel):
    """One run of one benchmark."""

    name: str
    command: str = Field(default_factory=lambda: _command())
    date: str = Field(default_factory=lambda: datetime.date.today().isoformat())
    device: str
    repeats: int
    versions: dict[str, str]
    rows: list[Row]
    notes: str = ""

    def write(self, path: Path) -> None:
        """Write indented JSON with a newline at its end."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")


def versions(*packages: str) -> dict[str, str]:
    """Versions of the installed packages among `packages`, and the commit of this checkout."""
    found = {"vllm_ascend_spec": commit()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Short commit id, with `+changes` where tracked files differ; `unknown` outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run([*git, "diff", "--quiet", "HEAD"]).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if dirty else head


def _command() -> str:
    """The command line without the machine's paths: `python -m module` where it was run so."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"-m {spec.name}" if spec is not None else Path(sys.argv[0]).name
    return " ".join(["python", program, *sys.argv[1:]])
