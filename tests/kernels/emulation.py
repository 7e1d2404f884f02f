"""CUDA kernels of csrc/cuda: built with nvcc for a GPU, or for the CPU, with fibers as threads."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from kernels import _cuda_library

ROOT = Path(__file__).parents[2]

HAS_CXX = shutil.which("g++") is not None
needs_cxx = pytest.mark.skipif(not HAS_CXX, reason="the emulation is built with g++")


@functools.cache
def emulated(kernel: str) -> Path:
    """The library of tests/csrc/<kernel>_emulation.cpp, with the interface of <kernel>.cu."""
    path = Path(tempfile.mkdtemp()) / f"{kernel}.so"
    subprocess.run(
        ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", f"-I{ROOT / 'csrc/cuda'}",
         f"-I{ROOT / 'tests/csrc'}", ROOT / f"tests/csrc/{kernel}_emulation.cpp", "-o", path],
        check=True,
    )  # fmt: skip
    return path


def built(kernel: str) -> Path:
    """The library for the GPU of this host; skips the test where there is none."""
    try:
        return _cuda_library.library(kernel)
    except _cuda_library.MissingLibraryError as missing:
        pytest.skip(str(missing))
