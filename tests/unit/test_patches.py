"""Placing edits by syntax and exporting a series."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patch_tree import apply_series, as_user, git
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.patches.anchors import AnchorError, Module
from vllm_ascend_spec.patches.export import SERIES
from vllm_ascend_spec.patches.series import Patch, Series

SOURCE = '''import os
from pack.b import one
from pack.d import two


class Box:
    """Ünïcode before the edit: columns are bytes in the tree."""

    def fill(self, size):
        label = "größe"; call(size, keep=size)  # a comment stays
        if size:
            total = size
        return total
'''


def test_edits_keep_what_is_around_them() -> None:
    module = Module("pack/a.py", SOURCE)
    fill = module.scope("Box.fill")
    module.add_import("pack.c", "three")
    module.replace(module.keyword(module.call(fill, "call"), "keep"), "None")
    module.insert_before(module.assignment(fill, "total"), "check(size)\nlog(size)")
    module.insert_after(module.assignment(fill, "label"), "after = 1")
    box = module.scope("Box")
    module.add_method(box, "def empty(self):\n    return 0")  # type: ignore[arg-type]
    expected = SOURCE.replace("from pack.d", "from pack.c import three\nfrom pack.d")
    expected = expected.replace("keep=size", "keep=None")
    expected = expected.replace(
        "            total", "            check(size)\n            log(size)\n            total"
    )
    expected = expected.replace("stays\n", "stays\n        after = 1\n")
    assert module.text() == expected + "\n    def empty(self):\n        return 0\n"


def test_what_is_not_there_is_named() -> None:
    module = Module("pack/a.py", SOURCE)
    with pytest.raises(AnchorError, match=r"pack/a.py: expected one definition of Box.spill"):
        module.scope("Box.spill")
    with pytest.raises(AnchorError, match="argument missing of call"):
        module.keyword(module.call(module.scope("Box.fill"), "call"), "missing")
    module.replace(module.scope("Box"), "")
    module.replace(module.scope("Box.fill"), "")
    with pytest.raises(AnchorError, match="overlap at line"):
        module.text()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    source = tmp_path / "tree"
    (source / "pack").mkdir(parents=True)
    (source / "pack/__init__.py").touch()
    (source / "pack/a.py").write_text(SOURCE)
    return source


def rename(module: Module) -> None:
    module.replace(module.call(module.scope("Box.fill"), "call").func, "renamed")


def series(*edits: str) -> Series:
    changes = dict.fromkeys(edits, rename)
    body = "One\nparagraph.\n\nAnother."
    return Series("engine", "pack", "1.0", [Patch("[Type] Rename the call", body, edits=changes)])


def test_exported_patches_are_signed_off_and_apply(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_user(monkeypatch)
    (written,) = series("pack/a.py").export(tree, tmp_path / "out")
    text = written.read_text()
    assert "From: Ann Author <ann@example.com>" in text
    assert "Signed-off-by: Ann Author <ann@example.com>" in text
    assert (tree / "pack/a.py").read_text() == SOURCE, "the given tree is only read"
    apply_series(tree, [written])
    assert "renamed(size, keep=size)  # a comment stays" in (tree / "pack/a.py").read_text()
    assert git(tree, "log", "-1", "--format=%s").strip() == "[Type] Rename the call"


def test_bad_input_names_the_option_and_the_mend(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_user(monkeypatch)
    with pytest.raises(UserError, match=r"--source .* holds no pack/"):
        series("pack/a.py").export(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match=r"has no pack/other.py; the series is written for"):
        series("pack/other.py").export(tree, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/0001-old.patch").touch()
    with pytest.raises(UserError, match=r"--out .* give an empty folder"):
        series("pack/a.py").export(tree, tmp_path / "full")
    as_user(monkeypatch, None)
    with pytest.raises(UserError, match=r"git's user.name is not set"):
        series("pack/a.py").export(tree, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_titles_and_texts_are_upstreams_convention_and_ours() -> None:
    for each in SERIES.values():
        for patch in each.patches:
            assert patch.title.startswith("[") and len(patch.title) <= 100
            assert all(len(line) <= 72 for line in patch.message().splitlines()[1:])
            assert any("test_" in Path(path).name for path in patch.files), "brings its tests"
