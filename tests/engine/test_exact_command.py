"""The exactness benchmark's command on the CPU engine: engines of their own, side by side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.results import Result

METHODS = ("ngram", "draft_model")


@pytest.mark.slow
@pytest.mark.thorough
def test_every_comparison_has_its_rows_and_meets_its_bars(tmp_path: Path):
    out, logs = tmp_path / "out.json", tmp_path / "logs"
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.engine.exact", "--methods", ",".join(METHODS),
            "--prompts", "4", "--tokens", "16", "--json", str(out), "--logs", str(logs),
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = Result.model_validate_json(out.read_text("utf-8"))
    compared = {row.case for row in result.rows if row.metric.startswith("largest top-2 gap")}
    assert compared == {
        f"{method} {kind}"
        for method in METHODS
        for kind in (
            "fixed against none",
            "adaptive against none",
            f"adaptive against {method} fixed",
        )
    }
    assert result.device == "CPU engine"
    made = {row.case: row.value for row in result.rows if row.metric == "draft tokens made"}
    assert set(made) == {f"{method} adaptive" for method in METHODS}
    assert all(value > 0 for value in made.values())
