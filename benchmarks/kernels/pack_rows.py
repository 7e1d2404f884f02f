"""pack_rows: time of one packing, CUDA and Triton, against the same steps as torch operators.

PYTHONPATH=. python -m benchmarks.kernels.pack_rows [--json PATH] [--repeats N] [--tune]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from vllm_ascend_spec.kernels import _cuda_library
from vllm_ascend_spec.kernels.pack_rows import Batch, PackedRows, cuda, naive
from vllm_ascend_spec.kernels.pack_rows import triton as kernel

from benchmarks.kernels import _measure

BARS_US = {(256, 15): 12.0, (1024, 7): 12.0}
CASES = ((256, 15), (1024, 7), (64, 7), (256, 7), (1024, 16))
# Inputs of a step are a few KB that have just been written: like those of an engine they lie in L2,
# and more sets than these only make the round long (a set of 1024 requests is 90 KB).
SETS = 128
FIELDS = ("draft_lengths", "query_start_loc", "cu_num_logits")


def problem(requests: int, positions: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """(scores, budget, batch) on the device; half of all draft rows are admitted."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(requests, positions, generator=generator) ** 0.3
    ones = torch.ones(requests, dtype=torch.int32)
    budget = torch.tensor([requests * positions // 2], dtype=torch.int32, device="cuda")
    batch = Batch(ones.cuda(), (ones * positions).cuda())
    return scores.cuda(), budget, batch


def with_torch(scores: torch.Tensor, budget: int, batch: Batch, out: PackedRows) -> None:
    """The same layout from torch operators, as an engine would write it without a kernel."""
    requests, positions = scores.shape
    survival = scores.cumprod(dim=1)
    eligible = torch.arange(positions, device="cuda") < batch.draft_counts[:, None]
    flat = torch.where(eligible, survival, -1.0).flatten()
    owner = flat.topk(budget, sorted=False).indices // positions
    lengths = torch.zeros(requests, dtype=torch.int32, device="cuda")
    lengths.scatter_add_(0, owner, torch.ones_like(owner, dtype=torch.int32))
    out.draft_lengths.copy_(lengths)
    torch.cumsum(lengths + batch.base_rows, 0, out=out.query_start_loc[1:])
    torch.cumsum(lengths + 1, 0, out=out.cu_num_logits[1:])


def kernels() -> dict[str, Callable[..., PackedRows]]:
    opened = cuda.Library(_cuda_library.library("pack_rows"))
    return {"CUDA": partial(cuda.pack_rows, opened=opened), "Triton": kernel.pack_rows}


def verify(requests: int, positions: int, run: Callable[..., PackedRows]) -> None:
    """The kernel's buffers equal the oracle's, on poisoned buffers, for two batches."""
    for seed in range(2):
        scores, budget, batch = problem(requests, positions, seed)
        expected = PackedRows.allocate(requests, "cpu")
        out = PackedRows.allocate(requests, "cuda")
        for name in FIELDS:
            getattr(out, name).fill_(-77)
        naive.pack_rows(scores, budget, batch, expected)
        run(scores, budget, batch, out)
        for name in FIELDS:
            torch.testing.assert_close(getattr(out, name).cpu(), getattr(expected, name))


def measure(requests: int, positions: int, options: Any) -> Iterator[dict[str, Any]]:
    """Rows of one shape, each as soon as it is known."""
    problems = [problem(requests, positions, seed) for seed in range(8)]
    inputs = [
        (scores.clone(), budget.clone(), Batch(batch.base_rows.clone(), batch.draft_counts.clone()))
        for scores, budget, batch in (problems[i % len(problems)] for i in range(SETS))
    ]
    outs = [PackedRows.allocate(requests, "cuda") for _ in inputs]
    for name, run in kernels().items():
        bar = BARS_US.get((requests, positions)) if name == "CUDA" else None  # what ops picks
        verify(requests, positions, run)
        calls = [partial(run, *call, out) for call, out in zip(inputs, outs, strict=True)]
        found = _measure.time_calls(calls, options.repeats)
        case = f"{requests}x{positions} {name}"
        yield {"case": case, "metric": "time", "value": found.us, "unit": "us",
               "spread": found.spread, "bar": bar, "better": "lower"}  # fmt: skip
        if bar:  # the profiler takes seconds
            yield {"case": case, "metric": "launches", "value": _measure.launches(calls[0]),
                   "unit": "", "bar": 1, "better": "lower"}  # fmt: skip
    host_budget = requests * positions // 2
    torch_calls = [
        partial(with_torch, scores, host_budget, batch, out)
        for (scores, _, batch), out in list(zip(inputs, outs, strict=True))[:16]
    ]
    baseline = _measure.time_calls(torch_calls, options.repeats)
    yield {"case": f"{requests}x{positions} torch operators", "metric": "time",
           "value": baseline.us, "unit": "us", "spread": baseline.spread,
           "better": "lower"}  # fmt: skip
    for warps in (2, 4, 8, 16) if options.tune else ():
        tuned = [partial(call, num_warps=warps) for call in calls]  # Triton's, timed last
        time = _measure.time_calls(tuned, options.repeats)
        yield {"case": f"{case} num_warps {warps}", "metric": "time", "value": time.us,
               "unit": "us", "spread": time.spread, "better": "lower"}  # fmt: skip


def main() -> None:
    options = _measure.arguments(__doc__ or "")
    notes = (
        "Device scalar budget, half of all draft rows admitted. Captured graph of calls over "
        f"{SETS} input sets, which fit L2 as an engine's do, time a call. Baseline: the same "
        "layout from torch operators, without the tie-break and the integer grid."
    )
    rows = (row for case in CASES for row in measure(*case, options))
    _measure.report("kernels/pack_rows", rows, options, notes)


if __name__ == "__main__":
    main()
