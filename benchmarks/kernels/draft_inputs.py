"""draft_inputs: time of a block drafter's inputs for the whole batch, against torch operators.

PYTHONPATH=. python -m benchmarks.kernels.draft_inputs [--json PATH] [--repeats N]
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from vllm_ascend_spec.kernels.draft_inputs import BlockShape, DraftBuffers, TargetStep, naive
from vllm_ascend_spec.kernels.draft_inputs import triton as kernel

from benchmarks.kernels import _draft_inputs_torch, _measure

BAR_US = 8.0
BLOCK_SIZE, MAX_MODEL_LEN, COLUMNS = 16, 8192, 512
# requests, K, rows a request beyond K, M-RoPE, long prefill chunk among the requests
CASES = (
    (256, 7, 0, False, False),
    (256, 7, 1, False, False),
    (256, 7, 0, True, False),
    (256, 7, 1, False, True),
    (32, 7, 0, False, False),
    (1024, 7, 0, False, False),
)


def problem(requests: int, draft_tokens: int, mrope: bool, chunk: bool, seed: int) -> TargetStep:
    """A step on the CPU: ragged rows, some rejected, contexts of up to 8000 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape or (requests,), generator=generator)

    lengths = integers(1, draft_tokens + 2)
    if chunk:
        lengths[0] = 4096
    first = integers(0, 3900)
    total = int(lengths.sum())
    start_loc = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    positions = torch.arange(total) - torch.repeat_interleave(start_loc[:-1] - first, lengths)
    return TargetStep(
        query_start_loc=start_loc.int(),
        positions=positions,
        num_sampled=torch.ones(requests, dtype=torch.int32),
        num_rejected=torch.minimum(integers(0, draft_tokens), lengths - 1).int(),
        idx_mapping=torch.randperm(requests, generator=generator).int(),
        last_sampled=integers(0, 150_000),
        next_prefill_tokens=integers(0, 150_000).int(),
        block_table=integers(1, 200_000, requests, COLUMNS).int(),
        mrope_positions=positions.expand(3, -1).contiguous() if mrope else None,
        mrope_delta=integers(-900, 1).int() if mrope else None,
        num_requests=torch.tensor([requests], dtype=torch.int32),
    )


def on_gpu(step: TargetStep) -> TargetStep:
    tensors = {k: v.cuda() for k, v in vars(step).items() if isinstance(v, torch.Tensor)}
    return replace(step, **tensors)


def verify(step: TargetStep, shape: BlockShape, context_rows: int) -> None:
    """Every buffer of the kernel and of the baseline equals the oracle's, on poisoned buffers."""
    requests, mrope = step.idx_mapping.shape[0], step.mrope_positions is not None
    expected = DraftBuffers.allocate(requests, shape, context_rows, "cpu", mrope=mrope)
    names = [field.name for field in fields(expected)]
    naive.draft_inputs(step, shape, expected)
    for run in (kernel.draft_inputs, _draft_inputs_torch.draft_inputs):
        out = DraftBuffers(
            **{n: torch.full_like(getattr(expected, n), -77, device="cuda") for n in names}
        )
        run(on_gpu(step), shape, out)
        for name in names:
            torch.testing.assert_close(getattr(out, name).cpu(), getattr(expected, name), msg=name)


def measure(
    requests: int, k: int, extra: int, mrope: bool, chunk: bool, options: Any
) -> list[dict[str, Any]]:
    """Rows of one case, after its verification."""
    shape = BlockShape(k, k + extra, 151_000, BLOCK_SIZE, MAX_MODEL_LEN)
    steps = [problem(requests, k, mrope, chunk, seed) for seed in range(4)]
    context_rows = max(requests * (k + 1), max(step.positions.shape[0] for step in steps))
    verify(steps[0], shape, context_rows)
    # A call reads a line of each block table row, not the row: count what is spread over memory.
    count = _measure.set_count(requests * 64 * 8 + context_rows * 40)
    inputs = [on_gpu(steps[i % len(steps)]) for i in range(count)]
    outs = [
        DraftBuffers.allocate(requests, shape, context_rows, "cuda", mrope=mrope) for _ in inputs
    ]
    calls = [
        partial(kernel.draft_inputs, step, shape, out)
        for step, out in zip(inputs, outs, strict=True)
    ]
    found = _measure.time_calls(calls, options.repeats)
    in_torch = [
        partial(_draft_inputs_torch.draft_inputs, step, shape, out)
        for step, out in list(zip(inputs, outs, strict=True))[:64]
    ]
    baseline = _measure.time_calls(in_torch, options.repeats)
    case = f"B {requests} K {k} {'DFlash' if extra else 'DSpark'}"
    case += (" M-RoPE" if mrope else "") + (" with a 4096-token chunk" if chunk else "")
    bar = BAR_US if requests == 256 and not chunk else None
    return [
        {"case": case, "metric": "time", "value": found.us, "unit": "us", "spread": found.spread,
         "baseline": baseline.us, "bar": bar, "better": "lower"},
        {"case": case, "metric": "launches", "value": _measure.launches(calls[0]), "unit": "",
         "bar": 1, "better": "lower"},
    ]  # fmt: skip


def main() -> None:
    options = _measure.arguments(__doc__ or "")
    rows = (row for case in CASES for row in measure(*case, options))
    notes = (
        "Device scalar for the number of requests, context rows included. Captured graph of calls "
        "over input sets larger than L2, time a call. Baseline: the same buffers from torch "
        "operators."
    )
    _measure.report("kernels/draft_inputs", rows, options, notes)


if __name__ == "__main__":
    main()
