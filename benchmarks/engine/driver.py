"""Starts arms side by side and talks to them; starting costs minutes, and overlaps."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), 640, 768, 1024, 1280, 1536, 2048)


def engine_arguments(
    speculative_config: dict[str, Any] | None,
    *,
    kv_cache_mib: int,
    planner: str = "plugin",
    gdn_state: str = "native",
    max_draft_rows: int | None = None,
    max_model_len: int = 2048,
    max_num_seqs: int = 256,
    largest_graph: int = 2048,
    **more: Any,
) -> dict[str, Any]:
    """Arguments of `make_llm`: full decode graphs without Inductor; `more` goes before all.

    kv_cache_mib: cache size; engines side by side cannot measure what is free. gdn_state: vLLM's
    layout unless asked otherwise, for upstream's arms to be upstream's.
    """
    return {
        "speculative_config": speculative_config,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": kv_cache_mib << 20,
        "gpu_memory_utilization": 0.1,
        "enable_prefix_caching": False,
        "seed": 0,
        "additional_config": {
            "gdn_prefill_backend": "triton",
            "ascend_spec": {
                "planner": planner,
                "gdn_state": gdn_state,
                "max_draft_rows": max_draft_rows,
            },
        },
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [s for s in GRAPH_SIZES if s <= largest_graph],
        },
    } | more


def slug(name: str) -> str:
    """Name of an arm's files and folders."""
    return name.replace(" ", "_").replace("=", "")


def log_of(name: str, folder: Path) -> Path:
    """Where an arm that was started in `folder` writes its log."""
    return folder / f"{slug(name)}.log"


class Arm:
    """An engine in a process of its own; its log is `log_of(name, folder)`.

    A request with "turns" stops before it allocates its cache, until it is let go, and gives the
    cache back once the engine is built.
    """

    def __init__(self, name: str, request: dict[str, Any], folder: Path) -> None:
        self.name, self.takes_turns = name, bool(request.get("turns"))
        self.log = log_of(name, folder)
        cache = Path(tempfile.gettempdir()) / f"vllm_cache_{slug(name)}"
        environment = os.environ | {
            "VLLM_CACHE_ROOT": str(cache),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **request.pop("environment", {}),
        }
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engine.arm", json.dumps(request)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        # One that hangs does not see that its input was closed, and would keep the device.
        atexit.register(self._process.kill)

    def let_go(self) -> None:
        """Let an arm that takes turns allocate its cache."""
        self._write("")

    def answered(self) -> bool:
        """Wait for its next line, "loaded" or "ready"; False where it ended, its log says why."""
        return self._read() is not None

    def ask(self, **command: Any) -> Any:
        """The answer, or None where the engine ended."""
        return self._read() if self._write(json.dumps(command)) else None

    def close(self) -> None:
        """End the engine."""
        with contextlib.suppress(BrokenPipeError):  # of one that is gone already
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _write(self, line: str) -> bool:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(line + "\n")
            stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None


def start(requests: dict[str, dict[str, Any]], folder: Path) -> list[Arm]:
    """Start all arms at once; returns those that came up, says which did not.

    Arms that take turns allocate their caches and capture their graphs one after the other, in the
    order given: the last one has the device to itself, and plans with what it measures then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    arms = [Arm(name, request, folder) for name, request in requests.items()]
    ready = []
    for arm in arms:
        up = arm.answered()
        if up and arm.takes_turns:
            loaded = time.monotonic() - began
            arm.let_go()
            up = arm.answered()
            print(f"{arm.name}: loaded by {loaded:.0f} s", flush=True)
        state = "ready" if up else f"did not start, see {arm.log.name}"
        print(f"{arm.name}: {state} after {time.monotonic() - began:.0f} s", flush=True)
        if up:
            ready.append(arm)
    return ready


def median(values: Sequence[float]) -> float:
    """Middle value; the mean of the two middle ones of an even number."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-middle - 1]) / 2


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / (2 median): with three repeats there are no percentiles."""
    return (max(values) - min(values)) / (2 * median(values))
