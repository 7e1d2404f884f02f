"""gdn_verify, native layout: our Triton kernels beside those of vLLM, at 8 rows and at 1.

PYTHONPATH=. python -m benchmarks.kernels.gdn_verify_native [--json PATH] [--repeats N] [--tune]

Each setting is checked against float64 before it is timed; one that is wrong is named and left
out. The default comes first, with its bar; --tune adds the settings of CONFIGS.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from vllm_ascend_spec.kernels.gdn_verify import triton as native
from vllm_ascend_spec.kernels.gdn_verify.triton import NativeConfig, RowConfig

from benchmarks.kernels import _gdn, _measure
from benchmarks.kernels import gdn_verify as uniform
from benchmarks.kernels._gdn import DIM, MAX_ROWS, Native, Shape
from benchmarks.kernels.gdn_verify import BF16, FP32, row

REQUESTS = 256
Config: TypeAlias = NativeConfig | RowConfig | None
# Slower on an H200 than these by 5 % and more: RowConfig(32, 2) and (64, 4), NativeConfig(8, 64).
# Fewer registers a lane (maxnreg) lost, too, but at 1 row in fp32, where 112 of them won 2 %.
ROW_CONFIGS = [RowConfig(32, 1), RowConfig(16, 1), RowConfig(64, 2)]
CONFIGS: dict[torch.dtype, list[NativeConfig | RowConfig]] = {
    BF16: [*ROW_CONFIGS, NativeConfig(4, 32, 2)],
    FP32: [*ROW_CONFIGS, NativeConfig(4, 16, 2)],
}


def packed_decode_calls(problem: Native) -> list[partial[Any]]:
    """vLLM's kernel for steps of one row, which takes q, k and v as the convolution leaves them."""
    from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
        fused_recurrent_gated_delta_rule_packed_decode,
    )

    calls = []
    for rows, indices in zip(problem.rows, problem.indices, strict=True):
        mixed = torch.cat([x.flatten(1) for x in (rows.q, rows.k, rows.v)], 1)
        calls.append(
            partial(
                fused_recurrent_gated_delta_rule_packed_decode, mixed, rows.a, rows.b, rows.A_log,
                rows.dt_bias, DIM**-0.5, problem.states, rows.out[:, None], indices[:, 0],
                use_qk_l2norm_in_kernel=True,
            )
        )  # fmt: skip
    return calls


def bytes_of(shape: Shape) -> int:
    """A state read for each request, one written for each row, inputs and outputs."""
    tokens = int(shape.lengths().sum())
    state = _gdn.HV * DIM * DIM * shape.state.itemsize
    inputs = 2 * (2 * _gdn.HK * DIM + 2 * _gdn.HV * DIM + 2 * _gdn.HV)
    return (shape.requests + tokens) * state + tokens * inputs


def right(state: torch.dtype, config: Config) -> bool:
    try:
        uniform.check_native(state, config)
    except AssertionError as failure:
        print(f"  WRONG {state} {config}: {failure}", flush=True)
        return False
    return True


def compile_one(job: tuple[torch.dtype, int, Config]) -> str | None:
    state, rows, config = job
    return _measure.failure_of(Native(Shape(state, 16, rows, 0), 1).calls(config))


def measure(state: torch.dtype, rows: int, options: Any) -> Iterator[dict[str, Any]]:
    """Rows of one shape."""
    shape = Shape(state, REQUESTS, rows, pending=0)
    problem = Native(shape, 2)
    name = f"native layout {shape.name}"
    theirs = None
    if _gdn.HAS_VLLM:
        calls = packed_decode_calls(problem) if rows == 1 else problem.vllm_calls()
        theirs = _measure.time_calls(calls, options.repeats).us
        yield row(f"{name} vLLM's", "time", theirs, "us", better="lower")
    default = native.default_config(rows, torch.device("cuda"))
    others = [config for config in CONFIGS[state] if config != default]
    for config in [default, *(others if options.tune else [])]:
        if not right(state, config):
            continue
        found = _measure.time_calls(
            problem.calls(config), options.repeats if config == default else 10
        )
        yield row(f"{name} {config}", "time", found.us, "us", better="lower", spread=found.spread)
        yield row(f"{name} {config}", "bandwidth", bytes_of(shape) / found.us / 1e6, "TB/s")
        if theirs:
            yield row(f"{name} {config}", "speedup over vllm", theirs / found.us, baseline=theirs,
                      bar=1.0 if config == default else None)  # fmt: skip
    right(state, default)  # again: a fault was seen once, after hundreds of launches


def main() -> None:
    options = _measure.arguments(__doc__ or "")
    notes = (
        f"HV {_gdn.HV}, HK {_gdn.HK}, d {DIM}, {REQUESTS} requests. Captured graph of calls over "
        "two pools of states, time a call. vLLM's: fused_sigmoid_gating_delta_rule_update at "
        f"{MAX_ROWS} rows, fused_recurrent_gated_delta_rule_packed_decode at 1 "
        f"({'run' if _gdn.HAS_VLLM else 'not installed'})."
    )
    states = {"bf16": (BF16,), "fp32": (FP32,)}.get(options.only, (BF16, FP32))
    if options.tune:
        _measure.compiled(
            [(s, n, config) for s in states for n in (MAX_ROWS, 1) for config in CONFIGS[s]],
            compile_one,
        )
    rows = (
        entry
        for state in states
        for length in (1, MAX_ROWS)
        for entry in measure(state, length, options)
    )
    _measure.report("kernels/gdn_verify_native", rows, options, notes)


if __name__ == "__main__":
    main()
