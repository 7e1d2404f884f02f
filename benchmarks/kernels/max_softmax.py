"""max_softmax: share of the read bandwidth, and time against torch.softmax(...).max(-1).

PYTHONPATH=. python -m benchmarks.kernels.max_softmax [--json PATH] [--repeats N] [--tune]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm_ascend_spec.kernels.max_softmax import naive
from vllm_ascend_spec.kernels.max_softmax import triton as kernel

from benchmarks.kernels import _measure

SHARE_BAR, SPEEDUP_BAR = 85.0, 3.0
BARRED = ((1024, 131072, torch.float32), (2048, 151936, torch.bfloat16))
CASES = (
    *BARRED,
    (256, 151936, torch.bfloat16),
    (32, 151936, torch.bfloat16),
    (1024, 32000, torch.float32),
)
# Around the default for bf16: lane_bytes, num_warps, programs_per_core, stages. The other settings
# that the default won against are in results/kernels/max_softmax.json.
TUNINGS = tuple(
    kernel.Tiling(*values)
    for values in ((1024, 4, 72, 3), (1024, 2, 72, 3), (1024, 2, 30, 4), (1024, 4, 15, 5))
)


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    out = torch.empty(rows, vocabulary, dtype=dtype, device="cuda")
    return out.normal_(0, 3, generator=generator)


def with_torch(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    confidence, tokens = torch.softmax(logits.float(), -1).max(-1)
    return confidence, tokens


def verify(logits: torch.Tensor, tiling: kernel.Tiling | None) -> None:
    """64 rows against float64 on the CPU, all rows against float64 on the GPU in slices."""
    confidence, tokens = kernel.max_softmax(logits, tiling=tiling)
    expected = naive.max_softmax(logits[:64])
    torch.testing.assert_close(confidence[:64], expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(tokens[:64], expected[1], rtol=0, atol=0)
    for first in range(0, logits.shape[0], 256):
        part = logits[first : first + 256].double()
        top = part.max(-1, keepdim=True).values
        exact = (1 / torch.exp(part - top).sum(-1)).float()
        torch.testing.assert_close(confidence[first : first + 256], exact, rtol=1e-5, atol=0)
        lowest = (part == top).int().argmax(-1)  # the first of equal maxima
        torch.testing.assert_close(tokens[first : first + 256], lowest, rtol=0, atol=0)


def measure(rows: int, vocabulary: int, dtype: torch.dtype, options: Any) -> list[dict[str, Any]]:
    """Rows of the result for one shape, after its verification."""
    case = f"{str(dtype).removeprefix('torch.')} {rows}x{vocabulary}"
    barred = (rows, vocabulary, dtype) in BARRED
    count = _measure.set_count(rows * vocabulary * dtype.itemsize) + 1
    sets = [logits_of(rows, vocabulary, dtype, seed) for seed in range(count)]
    verify(sets[0], None)
    roof = _measure.read_time(sets, options.repeats)
    found = _measure.time_calls([partial(kernel.max_softmax, x) for x in sets], options.repeats)
    baseline = _measure.time_calls([partial(with_torch, x) for x in sets[:2]], options.repeats)
    entries = [
        {"case": case, "metric": "share of read bandwidth", "value": 100 * roof.us / found.us,
         "unit": "%", "spread": found.spread, "bar": SHARE_BAR if barred else None},
        {"case": case, "metric": "speedup over softmax().max()", "value": baseline.us / found.us,
         "unit": "x", "baseline": baseline.us, "bar": SPEEDUP_BAR if barred else None},
        {"case": case, "metric": "time", "value": found.us, "unit": "us", "better": "lower",
         "spread": found.spread, "baseline": roof.us},
        {"case": case, "metric": "bandwidth", "unit": "TB/s",
         "value": sets[0].nbytes / found.us / 1e6, "baseline": sets[0].nbytes / roof.us / 1e6},
    ]  # fmt: skip
    tuned = options.tune and barred and dtype == torch.bfloat16  # bound by arithmetic, not bytes
    for tiling in TUNINGS if tuned else ():
        name = (
            f"{tiling.lane_bytes} B x {tiling.num_warps} warps x {tiling.programs_per_core} x "
            f"{tiling.stages} stages"
        )
        verify(sets[0], tiling)
        calls = [partial(kernel.max_softmax, x, tiling=tiling) for x in sets]
        time = _measure.time_calls(calls, options.repeats)
        roof = _measure.read_time(sets, options.repeats)  # clocks drift by more than tilings differ
        entries.append({"case": f"{case} {name}", "metric": "share of read bandwidth",
                        "value": 100 * roof.us / time.us, "unit": "%"})  # fmt: skip
    return entries


def main() -> None:
    options = _measure.arguments(__doc__ or "")
    only = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(options.only)
    cases = (case for case in CASES if only in (None, case[2]))
    rows = (row for case in cases for row in measure(*case, options))
    notes = (
        "Captured graph of calls over input sets larger than L2, time a call; two launches a call. "
        "Roof: reading the same logits and adding them up, in the same run. Baseline of the "
        "speedup: torch.softmax(logits.float(), -1).max(-1)."
    )
    _measure.report("kernels/max_softmax", rows, options, notes)


if __name__ == "__main__":
    main()
