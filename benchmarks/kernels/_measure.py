"""Device time of one call, from CUDA graph replays over inputs that do not fit the L2 cache."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

REPEATS = 30
COLD_BYTES = 160 << 20  # an H200 has 60 MB of L2
MAX_SETS = 1024
WARM_MS = 10.0  # of replays before the first that counts: short ones begin on an idle clock
Job = TypeVar("Job")


@dataclass(frozen=True)
class Time:
    """Microseconds a call: median over replays, and spread (p90 - p10) / (2 median)."""

    us: float
    spread: float


def set_count(bytes_per_call: int) -> int:
    """Input sets to rotate through so that each is cold when its turn comes again."""
    return max(1, min(MAX_SETS, -(-COLD_BYTES // max(bytes_per_call, 1))))


def time_calls(calls: Sequence[Callable[[], object]], repeats: int = REPEATS) -> Time:
    """Time a call when `calls`, one per input set, run back to back in one captured graph."""
    calls[0]()  # compiles
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times: list[float] = []
    warm = 0.0
    while len(times) < repeats:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        ms = start.elapsed_time(end)
        if warm < WARM_MS:
            warm += ms
        else:
            times.append(ms * 1e3 / len(calls))
    median = statistics.median(times)
    tenths = statistics.quantiles(times, n=10)
    return Time(median, (tenths[-1] - tenths[0]) / (2 * median))


def failure_of(calls: Sequence[Callable[[], object]]) -> str | None:
    """Run the first call; what went wrong, or None."""
    try:
        calls[0]()
        torch.cuda.synchronize()
    except Exception as failure:  # the setting is reported and left out
        return f"{type(failure).__name__}: {str(failure)[:200]}"
    return None


def compiled(jobs: list[Job], compile_one: Callable[[Job], str | None]) -> list[Job]:
    """The jobs that compile and launch, each tried in a process of its own, so that the disk cache
    is full when the timing starts. compile_one: a function of a module; None, or what failed."""
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        failures = list(pool.map(compile_one, jobs))
    for job, failure in zip(jobs, failures, strict=True):
        if failure:
            print(f"left out {job}: {failure}", flush=True)
    return [job for job, failure in zip(jobs, failures, strict=True) if not failure]


def launches(call: Callable[[], object]) -> int:
    """Kernels, copies and fills that one call puts on the device."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kinds = (torch.autograd.DeviceType.CUDA,)
    return sum(1 for event in profile.events() if event.device_type in kinds)


@triton.jit
def _read(x, n, out, BLOCK: tl.constexpr):
    """Reads and adds, nothing else: what the memory gives."""
    at = tl.program_id(0).to(tl.int64) * (4 * BLOCK) + tl.arange(0, BLOCK)
    total = tl.load(x + at).to(tl.float32) + tl.load(x + at + BLOCK).to(tl.float32)
    total += tl.load(x + at + 2 * BLOCK).to(tl.float32) + tl.load(x + at + 3 * BLOCK).to(tl.float32)
    total = tl.sum(total, axis=0)
    if total == 12345.678:
        tl.store(out, total)


def read_time(tensors: Sequence[torch.Tensor], repeats: int = REPEATS) -> Time:
    """Time to read one of the tensors, which are contiguous and large: the roof of this run."""
    out = torch.zeros(1, device=tensors[0].device)
    best = None
    for warps in (4, 8):
        block = warps * 32 * (16 // tensors[0].element_size())
        tiles = tensors[0].numel() // (4 * block)
        found = time_calls(
            [
                lambda t=t, b=block, w=warps, n=tiles: _read[(n,)](
                    t, t.numel(), out, BLOCK=b, num_warps=w
                )
                for t in tensors
            ],
            repeats,
        )
        if best is None or found.us < best.us:
            best = found
    assert best is not None
    return best


def arguments(description: str) -> argparse.Namespace:
    """--json, --repeats and --tune; a clear end without a GPU."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result file here")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="replays per figure")
    parser.add_argument("--tune", action="store_true", help="time other settings too")
    parser.add_argument("--only", default="", help="cases of this type alone: bf16 or fp32")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: these figures are of a GPU")
    return options


def report(
    name: str, rows: Iterable[dict[str, Any]], options: argparse.Namespace, notes: str
) -> None:
    """Print each row as it comes and, with --json, write a benchmarks.results.Result so far.

    `rows` may measure while it is read: a run that is cut off leaves what it had.
    """
    write = _writer(name, options, notes) if options.json else None
    found = []
    for row in rows:
        print(_line(row), flush=True)
        found.append(row)
        if write is not None:
            write(found)


def _writer(
    name: str, options: argparse.Namespace, notes: str
) -> Callable[[list[dict[str, Any]]], None]:
    words = sys.argv[1:]
    words = [
        Path(word).name if before == "--json" else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    facts = {
        "name": name,
        "command": " ".join(["python -m", f"benchmarks.{name.replace('/', '.')}", *words]),
        "device": torch.cuda.get_device_name(), "repeats": options.repeats, "notes": notes,
    }  # fmt: skip
    library = {"torch": torch.__version__, "triton": triton.__version__}
    try:
        from benchmarks import results
    except ModuleNotFoundError as missing:  # a bare GPU host: keep the figures, check them later
        print(f"{missing}: raw rows written, not checked as a result file")
        raw = facts | {"versions": library}
        return lambda rows: _replace(options.json, json.dumps(raw | {"rows": rows}, indent=1))
    versions = results.versions() | library

    def write(rows: list[dict[str, Any]]) -> None:
        part = options.json.with_suffix(".part")
        results.Result(**facts, versions=versions, rows=rows).write(part)
        part.replace(options.json)

    return write


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(path)  # at once: a run that is cut off leaves a whole file


def _line(row: dict[str, Any]) -> str:
    bar, met = row.get("bar"), ""
    if bar is not None:
        lower = row.get("better") == "lower"
        met = "met" if (row["value"] <= bar if lower else row["value"] >= bar) else "MISSED"
    said = [f"{row['case']:44s} {row['metric']:28s} {row['value']:10.2f} {row['unit']:4s}"]
    said += [f"+-{row['spread']:.1%}"] if row.get("spread") is not None else []
    said += [f"baseline {row['baseline']:.1f}"] if row.get("baseline") is not None else []
    said += [f"bar {bar:g} {met}"] if bar is not None else []
    return "  ".join(said)
