"""gdn_verify, replay layout: the CUDA kernel, its launch cuts, Triton's and vLLM's kernel.

PYTHONPATH=. python -m benchmarks.kernels.gdn_verify_cuda [--json PATH] [--repeats N]

Builds csrc/cuda/gdn_verify.cu with the nvcc of the host. Each kernel is checked against float64
before it is timed; one that is wrong is named and left out. --only bf16 or fp32: one state type.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm_ascend_spec.kernels._launch import device_cores
from vllm_ascend_spec.kernels.gdn_verify import cuda

from benchmarks.kernels import _gdn, _measure
from benchmarks.kernels import gdn_verify as uniform
from benchmarks.kernels._gdn import DIM, MAX_ROWS, Kernel, Native, Replay, Shape
from benchmarks.kernels.gdn_verify import BF16, FP32, row, sets_of

CHECK_SECONDS = 25


def cuda_kernel(opened: cuda.Library, variant: cuda.Variant | None) -> Kernel:
    """variant: None for the one that the library picks."""

    def run(*arguments: Any) -> Tensor:
        return cuda.replay_verify(*arguments, DIM**-0.5, opened, variant)

    return run


def check_one(path: str, number: int) -> None:
    """Exit code 0 if this launch cut agrees with float64; prints its errors."""
    opened = cuda.Library(Path(path))
    variant = next(v for v in opened.variants if v.number == number)
    few = _gdn.replay_errors(variant.state_dtype, cuda_kernel(opened, variant))
    many = beside_direct(opened, variant, Shape(variant.state_dtype, 256, None, flush=True), 1)
    full = beside_direct(opened, variant, Shape(variant.state_dtype, 256, MAX_ROWS), 40)
    print(*(f"{error:.2e}" for error in (*few, *many, *full)))
    sys.exit(not all(within_limits(variant.state_dtype, x) for x in (few, many, full)))


def beside_direct(
    opened: cuda.Library, variant: cuda.Variant, shape: Shape, times: int
) -> tuple[float, float]:
    """(outputs, worst cache tensor) against the cut in which no warp waits for another one. The
    oracle's batch is small, and gives blocks that stay no second round. times: of the same step,
    which changes nothing without flushes; a race need not show in one."""
    direct = next(
        v for v in opened.variants
        if v.state_dtype == variant.state_dtype and v.name.startswith("direct")
    )  # fmt: skip
    expected, found = Replay(shape, 1), Replay(shape, 1)
    expected.calls(cuda_kernel(opened, direct))[0]()
    for _ in range(times):
        found.calls(cuda_kernel(opened, variant))[0]()
    pairs = zip(found.cache.tensors(), expected.cache.tensors(), strict=True)
    out = _gdn.error(found.rows[0].out, expected.rows[0].out)
    return out, max(_gdn.error(x, y) for x, y in pairs)


def within_limits(state: torch.dtype, errors: tuple[float, float]) -> bool:
    return errors[0] < uniform.LIMITS[state] and errors[1] < uniform.CACHE_LIMITS[state]


def checked(opened: cuda.Library, states: Sequence[torch.dtype]) -> list[cuda.Variant]:
    """Launch cuts that are right, each tried in a process of its own: one that faults or hangs
    takes no other with it."""
    module = "benchmarks.kernels.gdn_verify_cuda"
    tried = [v for v in opened.variants if v.state_dtype in states]
    running = [
        subprocess.Popen(
            [sys.executable, "-c",
             f"from {module} import check_one; check_one({str(opened.path)!r}, {v.number})"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for v in tried
    ]  # fmt: skip
    deadline = time.monotonic() + CHECK_SECONDS
    compile_others(states)
    right = []
    for variant, process in zip(tried, running, strict=True):
        try:
            said = process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said = "hangs"
        fine = process.returncode == 0
        print(f"  {'right' if fine else 'WRONG'} {variant.state_dtype} {variant.name}: "
              f"{said.strip()[-300:]}", flush=True)  # fmt: skip
        right += [variant] if fine else []
    return right


def compile_others(states: Sequence[torch.dtype]) -> None:
    """What is not ours to build, while the launch cuts are being checked: nothing is timed yet."""
    for state in states:
        shape = Shape(state, 16, 1, 0)
        Replay(shape, 1).calls(_gdn.triton_kernel(uniform.CONFIGS[state][0]))[0]()
        if _gdn.HAS_VLLM:
            Native(shape, 1).vllm_calls()[0]()
    torch.cuda.synchronize()


def candidates(
    opened: cuda.Library, variants: list[cuda.Variant], state: torch.dtype
) -> dict[str, Kernel]:
    """By name: each launch cut of the state type, and Triton's default if it is right."""
    kernels = {f"CUDA {v.name}": cuda_kernel(opened, v) for v in variants if v.state_dtype == state}
    config = uniform.CONFIGS[state][0]
    kernel = _gdn.triton_kernel(config)
    errors = _gdn.replay_errors(state, kernel)
    cut = f"Triton {config.heads} heads, {config.block_v} rows, {config.num_warps} warps"
    if within_limits(state, errors):
        return kernels | {cut: kernel}
    print(f"  WRONG {state} {cut}: {errors}", flush=True)
    return kernels


def times(shape: Shape, kernels: dict[str, Kernel], repeats: int) -> dict[str, _measure.Time]:
    """Of each kernel on the same tensors. One that leaves a cache that is not finite is named and
    left out."""
    problem = Replay(shape, sets_of(shape))
    found = {}
    for name, kernel in kernels.items():
        time = _measure.time_calls(problem.calls(kernel), repeats)
        if problem.finite():
            found[name] = time
        else:
            print(f"  WRONG {shape.name} {name}: the cache is not finite afterwards", flush=True)
            problem = Replay(shape, sets_of(shape))
    return found


def read_roof(state: torch.dtype, repeats: int) -> float:
    states = Replay(Shape(state, 256, MAX_ROWS), 2).cache.state[1:]
    return _measure.read_time(list(states.chunk(2)), repeats).us


def compare(
    state: torch.dtype, kernels: dict[str, Kernel], repeats: int
) -> Iterator[dict[str, Any]]:
    """Every kernel's times, the shape with the bars first."""
    shapes = (
        Shape(state, 256, MAX_ROWS), Shape(state, 256, 1, 0),
        Shape(state, 256, MAX_ROWS, flush=True), Shape(state, 256, 0, 0),
        Shape(state, 32, 1, 0), Shape(state, 64, MAX_ROWS), Shape(state, 256, 1, 12),
    )  # fmt: skip
    for shape in shapes:
        for name, found in times(shape, kernels, repeats).items():
            yield row(f"{shape.name} {name}", "time", found.us, "us", better="lower",
                      spread=found.spread)  # fmt: skip


def figures(state: torch.dtype, name: str, kernel: Kernel, repeats: int) -> Iterator[Any]:
    """What the bars of this state dtype ask."""
    only = {name: kernel}

    def us(*shape: Any, **more: Any) -> float:
        return times(Shape(state, *shape, **more), only, repeats)[name].us

    whole = us(256, MAX_ROWS)
    roof, bf16 = read_roof(state, repeats), state == BF16
    label = Shape(state, 256, MAX_ROWS).name
    yield row(f"{label}: {name}", "time", whole, "us", better="lower")
    yield row(label, "time over read roof", whole / roof, baseline=roof, better="lower",
              bar=uniform.ROOF_BAR if bf16 else None)  # fmt: skip
    yield row(label, "bandwidth", Shape(state, 256, MAX_ROWS).bytes() / whole / 1e6, "TB/s")
    yield row(f"{label} flush 1/8", "time over no flush", us(256, MAX_ROWS, flush=True) / whole,
              baseline=whole, bar=uniform.FLUSH_BAR, better="lower")  # fmt: skip
    yield row(Shape(state, 256, 0, 0).name, "time", us(256, 0, 0), "us", bar=uniform.ZERO_BAR_US,
              better="lower")  # fmt: skip
    for requests in (32, 128, 256):
        yield from beside_vllm(
            Shape(state, requests, 1, 0),
            us(requests, 1, 0),
            repeats,
            uniform.DECODE_BAR if bf16 else None,
        )
    yield from beside_vllm(Shape(state, 256, MAX_ROWS), whole, repeats, uniform.SPEEDUP_BARS[state])
    low, ragged = us(256, 1), us(256, None)
    one, eight, mixed = (Shape(state, 256, rows).bytes() for rows in (1, MAX_ROWS, None))
    predicted = low + (whole - low) / (eight - one) * (mixed - one)
    yield row(Shape(state, 256, None).name, "time over prediction by bytes", ragged / predicted,
              baseline=predicted, bar=uniform.RAGGED_BAR, better="lower")  # fmt: skip
    if _gdn.HAS_VLLM:
        for what, (ours, theirs) in _gdn.errors_beside_vllm(state, kernel).items():
            # Outputs are bf16 in both, which is nearly all of their error: six digits are told.
            ratio = round(ours / theirs, 6)
            yield row(f"{label} {what}", "error over vllm's", ratio, baseline=theirs,
                      bar=None if bf16 else 1.0, better="lower")  # fmt: skip


def beside_vllm(shape: Shape, ours: float, repeats: int, bar: float | None) -> Iterator[Any]:
    yield row(shape.name, "time", ours, "us", better="lower")
    theirs = uniform.vllm_us(shape, repeats)
    if theirs:
        yield row(shape.name, "speedup over vllm", theirs / ours, baseline=theirs, bar=bar)


def fastest(
    opened: cuda.Library, state: torch.dtype, compared: list[dict[str, Any]]
) -> tuple[str, Kernel]:
    """What the library would pick if this run's best cuts were its defaults: for many heads by the
    product of the times at 8 rows, with flushes and without, and at 1; for as many as one wave of
    the direct cut has by the time of one row of 32 requests."""
    us = {e["case"]: e["value"] for e in compared}
    ours = [v for v in opened.variants if v.state_dtype == state]

    def best(*shapes: Shape) -> cuda.Variant:
        return min(
            ours,
            key=lambda v: math.prod(us.get(f"{x.name} CUDA {v.name}", math.inf) for x in shapes),
        )

    many = best(
        Shape(state, 256, MAX_ROWS),
        Shape(state, 256, MAX_ROWS, flush=True),
        Shape(state, 256, 1, 0),
    )
    few = best(Shape(state, 32, 1, 0))
    most = 8 * device_cores(torch.device("cuda"))

    def run(*arguments: Any) -> Tensor:
        heads = arguments[8].shape[0] * _gdn.HV  # slots
        return cuda.replay_verify(
            *arguments, DIM**-0.5, opened, few if heads <= most else many
        )  # fmt: skip

    return f"{many.name}, up to {most} heads {few.name}", run


def all_rows(states: Sequence[torch.dtype], repeats: int) -> Iterator[dict[str, Any]]:
    """Of each state type the launch cuts beside each other, then the bars' figures of the best."""
    opened = cuda.library()
    variants = checked(opened, states)
    for state in states:
        compared = []
        for entry in compare(state, candidates(opened, variants, state), 15):
            compared.append(entry)
            yield entry
        name, kernel = fastest(opened, state, compared)
        print(f"  bars of {state}: {name}", flush=True)
        yield from figures(state, name, kernel, repeats)
        torch.cuda.empty_cache()


def main() -> None:
    options = _measure.arguments(__doc__ or "")
    states = {"bf16": (BF16,), "fp32": (FP32,)}.get(options.only, (BF16, FP32))
    notes = (
        f"HV {_gdn.HV}, HK {_gdn.HK}, d {DIM}, ring {_gdn.RING}. Captured graph of calls over "
        "input sets larger than L2, time a call. Read roof: the states of the batch, read and "
        "added up, in the same run. Figures with a bar are of the best cut by the product of its "
        "times at B256 T8 P4, with flushes too, and T1 P0, up to 8 heads a multiprocessor of the "
        "best at B32 T1 P0. "
        f"vLLM: {'fused_sigmoid_gating_delta_rule_update' if _gdn.HAS_VLLM else 'not installed'}."
    )
    rows = all_rows(states, options.repeats)
    _measure.report("kernels/gdn_verify_cuda", rows, options, notes)


if __name__ == "__main__":
    main()
