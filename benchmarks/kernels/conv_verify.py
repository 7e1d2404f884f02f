"""conv_verify: time, share of the copy bandwidth, and time against vLLM's causal_conv1d_update.

PYTHONPATH=. python -m benchmarks.kernels.conv_verify [--json PATH] [--repeats N] [--tune]
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm_ascend_spec.kernels.conv_verify import naive
from vllm_ascend_spec.kernels.conv_verify.triton import ConvConfig, conv_verify

from benchmarks.kernels import _measure

CHANNELS, WIDTH, MAX_ROWS = 8192, 4, 8
ENTRIES = WIDTH - 2 + MAX_ROWS
HAS_VLLM = importlib.util.find_spec("vllm") is not None
CASES: tuple[tuple[int, int | None], ...] = ((256, 8), (256, 1), (256, None), (32, 8))
BARRED = (256, 8)
TUNINGS = tuple(
    ConvConfig(*values) for values in ((128, 1), (256, 1), (256, 2), (256, 4), (512, 2), (512, 4))
)


class Problem:
    """Input sets of one shape; rows None: 0..8 of each request."""

    def __init__(self, requests: int, rows: int | None, sets: int | None = None) -> None:
        random = torch.Generator().manual_seed(requests)
        lengths = torch.full((requests,), rows or 0)
        if rows is None:
            lengths = torch.randint(0, MAX_ROWS + 1, (requests,), generator=random)
        tokens, active = int(lengths.sum()), int((lengths > 0).sum())
        # x and the output once; a window's history is read, its kept entries and rows are written
        entries = 2 * tokens + active * (WIDTH - 1) + active * (WIDTH - 2) + tokens
        self.bytes = 2 * CHANNELS * entries
        sets = sets or max(2, _measure.set_count(self.bytes))
        integers = partial(torch.as_tensor, dtype=torch.int32)
        self.starts = integers(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])).cuda()
        self.accepted = integers(torch.arange(requests) % MAX_ROWS + 1).cuda()
        self.windows = torch.randn(sets * requests + 1, ENTRIES, CHANNELS, device="cuda").bfloat16()
        order = torch.randperm(sets * requests, generator=random) + 1
        self.slots = [integers(part).cuda() for part in order.split(requests)]
        self.x = [torch.randn(tokens, CHANNELS, device="cuda").bfloat16() for _ in range(sets)]
        self.out = [torch.zeros_like(x) for x in self.x]
        self.weight = torch.randn(CHANNELS, WIDTH, device="cuda").bfloat16()

    def arguments(self, index: int) -> tuple[Any, ...]:
        return (
            self.x[index], self.weight, None, self.windows, self.starts, self.slots[index],
            self.accepted,
        )  # fmt: skip

    def calls(self, config: ConvConfig | None = None) -> list[partial[Tensor]]:
        return [
            partial(conv_verify, *self.arguments(i), out=self.out[i], config=config)
            for i in range(len(self.x))
        ]

    def vllm_calls(self) -> list[partial[Tensor]]:
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        return [
            partial(
                causal_conv1d_update, self.x[i], self.windows.transpose(1, 2), self.weight, None,
                "silu", conv_state_indices=self.slots[i], num_accepted_tokens=self.accepted,
                query_start_loc=self.starts, max_query_len=MAX_ROWS, out=self.out[i],
            )
            for i in range(len(self.x))
        ]  # fmt: skip


def verify(requests: int, rows: int | None, config: ConvConfig | None) -> None:
    """Outputs within bf16 rounding of float64, windows bit for bit."""
    problem = Problem(min(requests, 16), rows, sets=1)
    x, weight, bias, windows, *rest = problem.arguments(0)
    exact = windows.double()
    reference = naive.conv_verify(x.double(), weight.double(), bias, exact, *rest)
    problem.out[0].fill_(777.0)
    problem.calls(config)[0]()
    torch.testing.assert_close(problem.out[0].double(), reference, rtol=1e-2, atol=1e-2)
    assert torch.equal(windows.double(), exact), "windows differ"


def measure(requests: int, rows: int | None, options: Any) -> list[dict[str, Any]]:
    """Rows of the result for one shape, after its verification."""
    case = f"bf16 B{requests} T{'0..8' if rows is None else rows} C{CHANNELS} W{WIDTH}"
    verify(requests, rows, None)
    problem = Problem(requests, rows)
    found = _measure.time_calls(problem.calls(), options.repeats)
    entries: list[dict[str, Any]] = [
        {"case": case, "metric": "time", "value": found.us, "unit": "us", "better": "lower",
         "spread": found.spread},
        {"case": case, "metric": "bandwidth", "value": problem.bytes / found.us / 1e6,
         "unit": "TB/s"},
    ]  # fmt: skip
    if HAS_VLLM:
        theirs = _measure.time_calls(problem.vllm_calls(), options.repeats).us
        entries.append(
            {"case": case, "metric": "speedup over vllm", "value": theirs / found.us, "unit": "x",
             "baseline": theirs, "bar": 1.0 if (requests, rows) == BARRED else None}
        )  # fmt: skip
    for config in TUNINGS if options.tune else ():
        verify(requests, rows, config)
        us = _measure.time_calls(problem.calls(config), 10).us
        entries.append({"case": f"{case} {config}", "metric": "time", "value": us, "unit": "us",
                        "better": "lower"})  # fmt: skip
    return entries


def main() -> None:
    options = _measure.arguments(__doc__ or "")
    entries = (entry for case in CASES for entry in measure(*case, options))
    notes = (
        "Captured graph of calls over input sets larger than L2, time a call. Baseline: vLLM's "
        f"causal_conv1d_update on the same tensors ({'run' if HAS_VLLM else 'not installed'})."
    )
    _measure.report("kernels/conv_verify", entries, options, notes)


if __name__ == "__main__":
    main()
