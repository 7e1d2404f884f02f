"""gdn_verify, replay layout: the CUDA kernel, its launch cuts, Triton's and vLLM's kernel.

PYTHONPATH=. python -m benchmarks.kernels.gdn_verify_cuda [--json PATH] [--repeats N]

Builds csrc/cuda/gdn_verify.cu with the nvcc of the host. Each kernel is checked against float64
before it is timed; one that is wrong is named and left out. Figures with a bar are of the launch
cut that the library picks by itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm_ascend_spec.kernels.gdn_verify import cuda

from benchmarks.kernels import _gdn, _measure
from benchmarks.kernels import gdn_verify as uniform
from benchmarks.kernels._gdn import DIM, MAX_ROWS, Kernel, Replay, Shape
from benchmarks.kernels.gdn_verify import BF16, FP32, row, sets_of

CHECK_SECONDS = 90
PICKED = "CUDA"


def cuda_kernel(opened: cuda.Library, variant: cuda.Variant | None) -> Kernel:
    """variant: None for the one that the library picks."""

    def run(*arguments: Any) -> Tensor:
        return cuda.replay_verify(*arguments, DIM**-0.5, opened, variant)

    return run


def check_one(path: str, number: int) -> None:
    """Exit code 0 if this launch cut agrees with float64; prints its errors."""
    opened = cuda.Library(Path(path))
    variant = opened.variants[number]
    errors = _gdn.replay_errors(variant.state_dtype, cuda_kernel(opened, variant))
    print(*(f"{error:.2e}" for error in errors))
    sys.exit(not within_limits(variant.state_dtype, errors))


def within_limits(state: torch.dtype, errors: tuple[float, float]) -> bool:
    return errors[0] < uniform.LIMITS[state] and errors[1] < uniform.CACHE_LIMITS[state]


def checked(opened: cuda.Library) -> list[cuda.Variant]:
    """Launch cuts that are right, each tried in a process of its own: one that faults or hangs
    takes no other with it."""
    module = "benchmarks.kernels.gdn_verify_cuda"
    running = [
        subprocess.Popen(
            [sys.executable, "-c",
             f"from {module} import check_one; check_one({str(opened.path)!r}, {v.number})"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for v in opened.variants
    ]  # fmt: skip
    right = []
    for variant, process in zip(opened.variants, running, strict=True):
        try:
            said = process.communicate(timeout=CHECK_SECONDS)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said = "hangs"
        fine = process.returncode == 0
        print(f"  {'right' if fine else 'WRONG'} {variant.state_dtype} {variant.name}: "
              f"{said.strip()[-300:]}", flush=True)  # fmt: skip
        right += [variant] if fine else []
    return right


def candidates(
    opened: cuda.Library, variants: list[cuda.Variant], state: torch.dtype
) -> dict[str, Kernel]:
    """By name: what is picked, each launch cut, and Triton's kernels that agree with float64."""
    kernels: dict[str, Kernel] = {PICKED: cuda_kernel(opened, None)}
    kernels |= {
        f"CUDA {v.name}": cuda_kernel(opened, v) for v in variants if v.state_dtype == state
    }
    for _, config in uniform.compiled([(state, config) for config in uniform.CONFIGS[state]]):
        kernel = _gdn.triton_kernel(config)
        errors = _gdn.replay_errors(state, kernel)
        cut = f"{config.heads} heads, {config.block_v} rows, {config.num_warps} warps"
        if within_limits(state, errors):
            kernels[f"Triton {cut}"] = kernel
        else:
            print(f"  WRONG {state} Triton {cut}: {errors}", flush=True)
    return kernels


def times(shape: Shape, kernels: dict[str, Kernel], repeats: int) -> dict[str, _measure.Time]:
    """Of each kernel on the same tensors; FloatingPointError if one leaves a cache not finite."""
    problem = Replay(shape, sets_of(shape))
    found = {}
    for name, kernel in kernels.items():
        found[name] = _measure.time_calls(problem.calls(kernel), repeats)
        if not problem.finite():
            raise FloatingPointError(f"{shape.name}, {name}: the cache is not finite afterwards")
    return found


def read_roof(state: torch.dtype, repeats: int) -> float:
    states = Replay(Shape(state, 256, MAX_ROWS), 2).cache.state[1:]
    return _measure.read_time(list(states.chunk(2)), repeats).us


def compare(state: torch.dtype, kernels: dict[str, Kernel]) -> list[dict[str, Any]]:
    """Every kernel's times."""
    shapes = (
        Shape(state, 256, MAX_ROWS), Shape(state, 256, 1, 0),
        Shape(state, 256, MAX_ROWS, flush=True), Shape(state, 256, 0, 0), Shape(state, 32, 1, 0),
    )  # fmt: skip
    found = [times(shape, kernels, 10) for shape in shapes]
    print("  us at " + ", ".join(shape.name for shape in shapes), flush=True)
    entries = []
    for name in kernels:
        us = [by_name[name].us for by_name in found]
        print(f"  {name:44s} {[round(x, 1) for x in us]}", flush=True)
        entries += [
            row(f"{shape.name} {name}", "time", value, "us", better="lower")
            for shape, value in zip(shapes, us, strict=True)
        ]
    return entries


def figures(state: torch.dtype, name: str, kernel: Kernel, repeats: int) -> list[dict[str, Any]]:
    """What the bars of this state dtype ask."""
    only = {name: kernel}

    def us(*shape: Any, **more: Any) -> float:
        return times(Shape(state, *shape, **more), only, repeats)[name].us

    whole = us(256, MAX_ROWS)
    roof, bf16 = read_roof(state, repeats), state == BF16
    label = Shape(state, 256, MAX_ROWS).name
    entries = [
        row(label, "time", whole, "us", better="lower"),
        row(label, "time over read roof", whole / roof, baseline=roof, better="lower",
            bar=uniform.ROOF_BAR if bf16 else None),
        row(label, "bandwidth", Shape(state, 256, MAX_ROWS).bytes() / whole / 1e6, "TB/s"),
        row(f"{label} flush 1/8", "time over no flush", us(256, MAX_ROWS, flush=True) / whole,
            baseline=whole, bar=uniform.FLUSH_BAR, better="lower"),
        row(Shape(state, 256, 0, 0).name, "time", us(256, 0, 0), "us", bar=uniform.ZERO_BAR_US,
            better="lower"),
    ]  # fmt: skip
    low, ragged = us(256, 1), us(256, None)
    one, eight, mixed = (Shape(state, 256, rows).bytes() for rows in (1, MAX_ROWS, None))
    predicted = low + (whole - low) / (eight - one) * (mixed - one)
    entries.append(
        row(Shape(state, 256, None).name, "time over prediction by bytes", ragged / predicted,
            baseline=predicted, bar=uniform.RAGGED_BAR, better="lower")
    )  # fmt: skip
    for requests in (32, 128, 256):
        entries += beside_vllm(
            Shape(state, requests, 1, 0),
            us(requests, 1, 0),
            repeats,
            uniform.DECODE_BAR if bf16 else None,
        )
    entries += beside_vllm(Shape(state, 256, MAX_ROWS), whole, repeats, uniform.SPEEDUP_BARS[state])
    if _gdn.HAS_VLLM:
        for what, (ours, theirs) in _gdn.errors_beside_vllm(state, kernel).items():
            entries.append(
                row(f"{label} {what}", "error over vllm's", ours / theirs, baseline=theirs,
                    bar=None if bf16 else 1.0, better="lower")
            )  # fmt: skip
    return entries


def beside_vllm(shape: Shape, ours: float, repeats: int, bar: float | None) -> list[dict[str, Any]]:
    entries = [row(shape.name, "time", ours, "us", better="lower")]
    theirs = uniform.vllm_us(shape, repeats)
    if theirs:
        entries.append(
            row(shape.name, "speedup over vllm", theirs / ours, baseline=theirs, bar=bar)
        )
    return entries


def all_rows(states: Sequence[torch.dtype], repeats: int) -> list[dict[str, Any]]:
    """RuntimeError if a launch cut is wrong: it could be the one that is picked."""
    opened = cuda.library()
    variants = checked(opened)
    if len(variants) < len(opened.variants):
        raise RuntimeError("a launch cut is wrong (above): no figures")
    tried, reached = [], []
    for state in states:
        kernels = candidates(opened, variants, state)
        tried += compare(state, kernels)
        reached += figures(state, PICKED, kernels[PICKED], repeats)
        torch.cuda.empty_cache()
    return tried + reached


def main() -> None:
    options = _measure.arguments(__doc__ or "")
    entries = all_rows((BF16, FP32), options.repeats)
    notes = (
        f"HV {_gdn.HV}, HK {_gdn.HK}, d {DIM}, ring {_gdn.RING}. Captured graph of calls over "
        "input sets larger than L2, time a call. Read roof: the states of the batch, read and "
        "added up, in the same run. Figures with a bar are of the launch cut that is picked. "
        f"vLLM: {'fused_sigmoid_gating_delta_rule_update' if _gdn.HAS_VLLM else 'not installed'}."
    )
    _measure.report("kernels/gdn_verify_cuda", entries, options, notes)


if __name__ == "__main__":
    main()
