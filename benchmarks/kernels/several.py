"""Several benchmarks in one process, which saves the start of torch, the GPU and vLLM each time.

PYTHONPATH=. python -m benchmarks.kernels.several FOLDER "NAME [options]" ...

FOLDER gets NAME.log and NAME.json (NAME_bf16.* with --only bf16), as far as each came.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
import traceback
from pathlib import Path


def run(folder: Path, name: str, options: list[str]) -> None:
    only = options[options.index("--only") + 1] if "--only" in options else None
    stem = f"{name}_{only}" if only else name
    sys.argv = [name, "--json", str(folder / f"{stem}.json"), *options]
    began = time.monotonic()
    with (folder / f"{stem}.log").open("w") as log, contextlib.redirect_stdout(log):
        try:
            importlib.import_module(f"benchmarks.kernels.{name}").main()
        except Exception:  # the others still have their turn
            traceback.print_exc(file=log)
    print(f"{stem}: {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    folder, jobs = Path(sys.argv[1]), [job.split() for job in sys.argv[2:]]
    folder.mkdir(parents=True, exist_ok=True)
    for name, *options in jobs:
        run(folder, name, options)


if __name__ == "__main__":
    main()
