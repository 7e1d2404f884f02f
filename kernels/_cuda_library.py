"""The libraries of csrc/cuda: built with the package, or here with nvcc.

CMake builds them where a CUDA toolkit is. In a source tree nvcc builds them at their first use,
once for each state of the sources, into the user's cache; it takes seconds. For a machine that has
a source tree and no nvcc: `python -m kernels._cuda_library vllm_ascend_spec` on one that has.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

ARCHITECTURE = "90a"  # bulk copies need sm_90; nothing else was measured
_SOURCES = Path(__file__).parents[1] / "csrc" / "cuda"
_OPTIONS = (
    "-O3", "-std=c++17", f"-gencode=arch=compute_{ARCHITECTURE},code=sm_{ARCHITECTURE}",
    "-Xcompiler", "-fPIC", "-shared",
)  # fmt: skip


class MissingLibraryError(RuntimeError):
    """The library is not installed and cannot be built here."""


def device_obstacle() -> str | None:
    """Why the kernels of csrc/cuda cannot run on the GPU of this host, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"csrc/cuda is for sm_90, this device is sm_{capability[0]}{capability[1]}"
    return None


def unavailable(open_library: Callable[[], object]) -> str | None:
    """Why no call on this host can take a library's kernels, or None. May build the library."""
    reason = device_obstacle()
    if reason is None:
        try:
            open_library()
        except (RuntimeError, OSError) as failure:  # missing, or built from other sources
            return str(failure)
    return reason


@functools.cache
def library(name: str) -> Path:
    """Path of lib<name>.so.

    Raises:
        MissingLibraryError: with what was looked for, or nvcc's words.
    """
    compiler = _nvcc()
    if _SOURCES.is_dir() and compiler is not None:
        return _built(name, compiler)
    import vllm_ascend_spec

    for folder in vllm_ascend_spec.__path__:
        if (Path(folder) / f"lib{name}.so").is_file():
            return Path(folder) / f"lib{name}.so"
    raise MissingLibraryError(
        f"lib{name}.so was not built with the package and there is no nvcc for csrc/cuda: put nvcc "
        "on PATH (or set CUDA_HOME) and install again"
    )


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    in_home = Path(home) / "bin" / "nvcc" if home else None
    return str(in_home) if in_home is not None and in_home.is_file() else shutil.which("nvcc")


def build_into(folder: Path) -> list[Path]:
    """Build every library into a folder, for a machine of the same system that has no nvcc.

    MissingLibraryError without nvcc or sources, or with nvcc's words.
    """
    compiler = _nvcc()
    if compiler is None:
        raise MissingLibraryError("there is no nvcc: put it on PATH or set CUDA_HOME")
    names = sorted(source.stem for source in _SOURCES.glob("*.cu"))
    return [Path(shutil.copy2(_built(name, compiler), folder / f"lib{name}.so")) for name in names]


def _built(name: str, compiler: str) -> Path:
    state = hashlib.sha256(" ".join((compiler, *_OPTIONS)).encode())
    for source in sorted(_SOURCES.glob("*.cu*")):
        state.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    target = cache / "vllm_ascend_spec" / "cuda" / state.hexdigest()[:16] / f"lib{name}.so"
    if not target.is_file():
        logger.info("building %s with %s", target, compiler)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            output = Path(folder) / target.name
            command = [compiler, *_OPTIONS, "-o", str(output), str(_SOURCES / f"{name}.cu")]
            found = subprocess.run(command, capture_output=True, text=True)
            if found.returncode:
                raise MissingLibraryError(f"nvcc refused {name}.cu: {found.stderr.strip()[-2000:]}")
            output.replace(target)  # at once: other processes may build it, too
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m kernels._cuda_library FOLDER")
    print(*build_into(Path(sys.argv[1])), sep="\n")
