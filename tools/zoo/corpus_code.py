"""Code completion from the standard library of the running Python."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

from tools.zoo.corpus_schema import Example
from tools.zoo.corpus_values import Values, is_held_out

_SKIP = {"test", "tests", "idlelib", "site-packages", "lib2to3", "encodings", "__pycache__",
         "turtledemo", "ensurepip", "pydoc_data", "unicodedata"}  # fmt: skip
_MAX_BYTES = 120_000


@functools.cache
def library_files(held_out: bool) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(relative path, lines) of plain ASCII library modules of one split.

    The hash of the path decides the split, so a file stays held out across Python versions.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _SKIP & set(path.relative_to(root).parts) or is_held_out(name) != held_out:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.isascii() and 400 < len(text) < _MAX_BYTES:
            found.append((name, tuple(text.splitlines())))
    return tuple(found)


def code_completion(v: Values) -> Example:
    """Draw 4 to 9 consecutive lines to read and 2 to 5 to write."""
    while True:
        _, lines = v.rng.choice(library_files(v.held_out))
        given, wanted = v.integer(4, 9), v.integer(2, 5)
        if len(lines) <= given + wanted:
            continue
        first = v.integer(0, len(lines) - given - wanted)
        before = "\n".join(lines[first : first + given]).strip("\n")
        after = "\n".join(lines[first + given : first + given + wanted]).rstrip()
        if len(after) > 30 and 60 < len(before) < 380 and len(after) < 260 and before.strip():
            return Example("code", f"Continue this Python code:\n{before}\n", after)
