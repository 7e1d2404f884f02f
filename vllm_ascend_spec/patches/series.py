"""A series of patches and its export with `git format-patch`."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from vllm_ascend_spec.errors import UserError

from .anchors import Module

Edit = Callable[[Module], None]


@dataclass(frozen=True)
class Patch:
    """One commit. edits: file of the source tree to what changes in it. files: new ones.

    title: in upstream's convention. files maps the path in the tree to the name of our text below
    `patches/files`.
    """

    title: str
    body: str
    edits: Mapping[str, Edit] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def message(self) -> str:
        paragraphs = textwrap.dedent(self.body).strip().split("\n\n")
        return "\n\n".join([self.title, *(textwrap.fill(p, 72) for p in paragraphs)]) + "\n"


@dataclass(frozen=True)
class Series:
    """Patches for one engine. written_for: the version whose names the edits hang on."""

    engine: str
    package: str
    written_for: str
    patches: Sequence[Patch]

    def export(self, source: Path, out: Path) -> list[Path]:
        """Write the series for the tree `source` into the folder `out`, in order.

        The author and the sign-off are git's `user.name` and `user.email` as configured in
        `source`.

        Raises:
            UserError: `source` is no such tree, a place to edit is not found there, git or its
                identity is missing, or `out` holds patches already.
        """
        if not (source / self.package / "__init__.py").is_file():
            raise UserError(
                f"--source {source} holds no {self.package}/: give the root of a {self.engine} tree"
            )
        if out.is_dir() and any(out.glob("*.patch")):
            raise UserError(f"--out {out} holds patches already: give an empty folder")
        identity = _identity(source)
        with tempfile.TemporaryDirectory() as folder:
            repository = Path(folder)
            _git(repository, "init", "-q")
            for key, value in identity.items():
                _git(repository, "config", key, value)
            self._copy_edited(source, repository)
            _commit(repository, "base")
            for patch in self.patches:
                _apply(patch, repository)
                _commit(repository, patch.message(), "--signoff")
            out.mkdir(parents=True, exist_ok=True)
            written = _git(
                repository, "format-patch", "-q", "--zero-commit", f"-{len(self.patches)}",
                "-o", str(out.resolve()),
            )  # fmt: skip
        return [Path(line) for line in written.splitlines()] or sorted(out.glob("*.patch"))

    def _copy_edited(self, source: Path, repository: Path) -> None:
        """Only the files that a patch edits: the rest of the tree does not enter a diff."""
        made = {path for patch in self.patches for path in patch.files}
        for path in {path for patch in self.patches for path in patch.edits} - made:
            if not (source / path).is_file():
                raise UserError(
                    f"--source {source} has no {path}; the series is written for {self.engine} "
                    f"{self.written_for}"
                )
            (repository / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, repository / path)


def our_text(name: str) -> str:
    """A file of `patches/files`."""
    return resources.files(__package__).joinpath("files", name).read_text(encoding="utf-8")


def _apply(patch: Patch, repository: Path) -> None:
    for path, edit in patch.edits.items():
        target = repository / path
        module = Module(path, target.read_text(encoding="utf-8"))
        edit(module)
        target.write_text(module.text(), encoding="utf-8")
    for path, name in patch.files.items():
        target = repository / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(our_text(name), encoding="utf-8")


def _commit(repository: Path, message: str, *options: str) -> None:
    _git(repository, "add", "--all")
    _git(repository, "commit", "-q", "--no-verify", "--allow-empty", *options, "-m", message)


def _identity(source: Path) -> dict[str, str]:
    """user.name and user.email as git would use them in the tree."""
    if shutil.which("git") is None:
        raise UserError("patches export needs git on PATH")
    found = {}
    for key in ("user.name", "user.email"):
        answer = subprocess.run(
            ["git", "-C", str(source), "config", key], capture_output=True, text=True, check=False
        )
        found[key] = answer.stdout.strip()
        if not found[key]:
            raise UserError(
                f"git's {key} is not set, and the sign-off (DCO) needs it: git config --global "
                f"{key} ..."
            )
    return found


def _git(repository: Path, *arguments: str) -> str:
    run = subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise UserError(f"git {arguments[0]} failed: {run.stderr.strip() or run.stdout.strip()}")
    return run.stdout
