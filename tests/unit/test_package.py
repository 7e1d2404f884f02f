"""The shape of the package: what it imports, where vLLM may be imported, how it installs."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("vllm_ascend_spec", "kernels", "graphs")
    for path in (ROOT / folder).rglob("*.py")
]
# Which of our own packages each may import: `budget` <- `verify`, `kernels` <- `drafters`,
# `graphs` <- `engine` <- everything that a user starts.
LAYERS = [{"budget"}, {"verify", "kernels"}, {"drafters", "graphs"}, {"engine"}]


def imported(path: Path) -> set[str]:
    """Every module that a file imports, at any depth of the code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    """The package that a source file belongs to: `budget`, `kernels`, `cli`, ..."""
    parts = path.relative_to(ROOT).parts
    return parts[0] if parts[0] != "vllm_ascend_spec" else Path(parts[1]).stem


def layer(name: str) -> int | None:
    return next((i for i, names in enumerate(LAYERS) if name in names), None)


def test_importing_the_package_and_its_entry_points_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, vllm_ascend_spec, vllm_ascend_spec.cli, vllm_ascend_spec.plugin\n"
        "assert vllm_ascend_spec.plugin.platform() is None\n"
        "heavy = {'torch', 'vllm', 'triton', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ASCEND_SPEC_PLATFORM"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("vllm.general_plugins", "ascend_spec", "vllm_ascend_spec.plugin:register"),
        ("vllm.platform_plugins", "ascend_spec", "vllm_ascend_spec.plugin:platform"),
        ("console_scripts", "vllm-ascend-spec", "vllm_ascend_spec.cli:main"),
    ],
)
def test_entry_points_are_installed(group: str, name: str, value: str) -> None:
    (found,) = entry_points(group=group, name=name)
    assert found.value == value
    assert callable(found.load())


def test_only_engine_imports_vllm() -> None:
    strays = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in imported(path)
        if name.split(".")[0] in ("vllm", "vllm_ascend") and room(path) != "engine"
    ]
    assert not strays


def test_rooms_import_only_rooms_below_them() -> None:
    strays = []
    for path in SOURCES:
        own = layer(room(path))
        for name in imported(path) if own is not None else ():
            parts = name.split(".")
            other = layer(parts[1]) if parts[0] == "vllm_ascend_spec" and parts[1:] else None
            if other is not None and own is not None and other > own:
                strays.append(f"{path.relative_to(ROOT)}: {name}")
    assert not strays


def test_source_files_stay_under_400_lines() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.cpp"], cwd=ROOT, capture_output=True, text=True
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    long = {
        name: lines
        for name in tracked.stdout.split()
        if (ROOT / name).exists() and (lines := len((ROOT / name).read_text().splitlines())) > 400
    }
    assert not long


@pytest.mark.parametrize("compiler", [True, False])
def test_wheel_holds_kernels_and_graphs_under_the_package(tmp_path: Path, compiler: bool) -> None:
    environment = dict(os.environ)
    if not compiler:
        missing = {"CC": "cc", "CXX": "c++", "CUDACXX": "nvcc"}
        environment |= {name: f"/nonexistent/{tool}" for name, tool in missing.items()}
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path)),
            # A folder of its own: CMake remembers the compiler that it did not find.
            f"--config-settings=build-dir={tmp_path / 'build'}",
            str(ROOT),
        ],
        check=True,
        env=environment,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if not name.startswith("vllm_ascend_spec-")}
    assert tops == {"vllm_ascend_spec"}
    assert "vllm_ascend_spec/kernels/gdn_verify/naive.py" in names
    assert "vllm_ascend_spec/graphs/__init__.py" in names
    native = [name for name in names if name.startswith("vllm_ascend_spec/_host")]
    assert bool(native) is compiler
    kernels = {f"vllm_ascend_spec/lib{name}.so" for name in ("gdn_verify", "pack_rows")}
    assert kernels & set(names) == (kernels if compiler and shutil.which("nvcc") else set())
