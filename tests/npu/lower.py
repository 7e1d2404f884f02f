"""Lowers recorded kernel launches for an Ascend chip; runs in the environment of tools/npu_env.sh.

    python lower.py REPOSITORY CHIP < launches.json > results.json

Python -> Triton IR -> linalg (triton-ascend) -> HIVM with on-chip memory planned and waits inserted
(bishengir-compile). The step after it, HIVM to machine code, ships with CANN only, and is not run.
Neither torch nor CANN is needed: launchers are imported, never run.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

TIMEOUT_S = 120


class _NoTorch(types.ModuleType):
    """Stands for torch while kernel modules are imported: any name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def to_linalg(kernel: Any, launch: dict[str, Any], chip: str) -> str:
    """MLIR (linalg) of one specialisation."""
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendBackend
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    target = GPUTarget("npu", chip, 0)
    backend = AscendBackend(target)
    options = backend.parse_options({"compile_on_910_95": True} if "950" in chip else {})
    constants = launch["constants"]
    signature = {**launch["signature"], **dict.fromkeys(constants, "constexpr")}
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(kernel, signature, constants)
    module = source.make_ir(options, backend.get_codegen_implementation(), {}, context)
    metadata = {"hash": "none", "target": target, **options.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    return stages["ttadapter"](stages["ttir"](module, metadata), metadata)


def to_hivm(linalg: str, chip: str) -> str:
    """HIVM of linalg MLIR; RuntimeError with the compiler's own words if a pass fails."""
    import ascendnpuir

    name = "bishengir-compile-a5" if "950" in chip else "bishengir-compile"
    compiler = Path(ascendnpuir.__file__).parent / "bin" / name
    linalg = re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg)  # as the back end itself does
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.mlir")
        source.write_text(linalg)
        command = [
            str(compiler), str(source), f"--target={chip}", "--enable-auto-multi-buffer=true",
            "--enable-auto-bind-sub-block=true", "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true", "--enable-triton-kernel-compile=true",
            f"--save-temps={folder}", "-o", f"{folder}/kernel.o",
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        # The command fails in any case, at machine code; this file is there if HIVM was reached.
        out = Path(folder, "module.hivm.opt.mlir")
        if not out.exists():
            errors = [line for line in run.stderr.splitlines() if "error" in line]
            raise RuntimeError("\n".join(errors)[:2000] or run.stderr[:2000])
        return out.read_text()


def scalar_accesses_in_loops(hivm: str) -> int:
    """Loads and stores of single elements inside loops: what the vector unit does not do."""
    depth, loops, count = 0, [], 0
    for line in hivm.splitlines():
        if re.search(r"\bscf\.(for|while)\b", line):
            loops.append(depth)
        count += bool(loops and re.search(r"\bmemref\.(load|store)\b", line))
        depth += line.count("{") - line.count("}")
        while loops and depth <= loops[-1]:
            loops.pop()
    return count


def lower(launch: dict[str, Any], chip: str) -> dict[str, Any]:
    """{"error": text or None, "scalar_accesses": int, "seconds": float}."""
    started = time.monotonic()
    error, scalars = None, 0
    try:
        kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"])
        scalars = scalar_accesses_in_loops(to_hivm(to_linalg(kernel, launch, chip), chip))
    except subprocess.CalledProcessError as failure:
        error = f"linalg: {failure.stderr.decode(errors='replace')[:2000]}"
    except Exception as failure:  # reported per kernel: one that fails must not hide the others
        error = f"{type(failure).__name__}: {failure}"[:2000]
    seconds = time.monotonic() - started
    return {"error": error, "scalar_accesses": scalars, "seconds": round(seconds, 2)}


def main() -> None:
    repository, chip = sys.argv[1:]
    sys.modules["torch"] = _NoTorch("torch")
    sys.path[:0] = [repository, str(Path(repository, "tests/npu"))]
    launches = json.load(sys.stdin)
    results = {name: lower(launch, chip) for name, launch in launches.items()}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
