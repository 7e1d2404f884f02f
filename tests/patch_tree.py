"""A source tree as a repository with an exported series on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_ascend_spec.cli import app


def as_user(monkeypatch: pytest.MonkeyPatch, name: str | None = "Ann Author") -> None:
    """Git's identity for this test; None for a git without one."""
    settings = {"user.name": name, "user.email": "ann@example.com"} if name else {}
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(settings)))
    for index, (key, value) in enumerate(settings.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{index}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{index}", value)


def git(tree: Path, *arguments: str) -> str:
    command = ["git", "-C", str(tree), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def export_series(engine: str, source: Path, out: Path) -> list[Path]:
    """Export by the command line."""
    options = ["--engine", engine, "--source", str(source), "--out", str(out)]
    answer = CliRunner().invoke(app, ["patches", "export", *options])
    assert answer.exit_code == 0, answer.output or answer.exception
    return sorted(out.glob("*.patch"))


def apply_series(tree: Path, patches: list[Path], files: Iterable[str] = (".",)) -> None:
    """Commit `files` of the tree, and the series on top."""
    git(tree, "init", "-q")
    git(tree, "add", *files)
    git(tree, "commit", "-q", "-m", "base")
    git(tree, "am", "-q", "--keep-non-patch", *map(str, patches))
