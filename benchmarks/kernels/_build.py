"""Kernels of csrc/cuda, built with the nvcc of the host for its GPU."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parents[2] / "csrc/cuda"


@functools.cache
def library(name: str) -> Path:
    """csrc/cuda/<name>.cu as a shared library; CalledProcessError with nvcc's words above it."""
    major, minor = torch.cuda.get_device_capability()
    target = f"{major}{minor}" + ("a" if major >= 9 else "")
    path = Path(tempfile.mkdtemp()) / f"lib{name}.so"
    subprocess.run(
        ["nvcc", "-O3", "-std=c++17", f"-gencode=arch=compute_{target},code=sm_{target}",
         "-Xcompiler", "-fPIC", "-shared", "-o", path, SOURCES / f"{name}.cu"],
        check=True,
    )  # fmt: skip
    return path
