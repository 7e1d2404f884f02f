"""The plugin's operators on a device: each checked against its oracle, then timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm_ascend_spec.kernels import draft_inputs, pack_rows
from vllm_ascend_spec.kernels.conv_verify import naive as conv_naive
from vllm_ascend_spec.kernels.draft_inputs import naive as draft_naive
from vllm_ascend_spec.kernels.gdn_verify import naive as gdn_naive
from vllm_ascend_spec.kernels.gdn_verify import replay_naive
from vllm_ascend_spec.kernels.gdn_verify.layout import ReplayCache, ReplayLayout, StepCursor
from vllm_ascend_spec.kernels.max_softmax import naive as max_softmax_naive
from vllm_ascend_spec.kernels.pack_rows import naive as pack_naive

WARM_UP, CALLS = 10, 50


@dataclass(frozen=True)
class Sizes:
    """Shapes of one run. requests: batch; dims: GDN key and value size; heads: key, value."""

    requests: int
    draft_tokens: int
    vocabulary: int
    heads: tuple[int, int]
    dim: int

    @property
    def columns(self) -> int:
        return self.draft_tokens + 1


TIMED = Sizes(requests=256, draft_tokens=9, vocabulary=151936, heads=(16, 32), dim=128)
CHECKED = Sizes(requests=16, draft_tokens=9, vocabulary=151936, heads=(16, 32), dim=128)
DRY = Sizes(requests=3, draft_tokens=3, vocabulary=3000, heads=(1, 2), dim=64)


@dataclass(frozen=True)
class Case:
    """run: computes on the device and returns what to compare. reference: the oracle's answer on
    the CPU (an NPU has no float64), on inputs of its own. launch: the bare call, to be timed.
    exact: integers and slots, to be equal; otherwise relative error <= limit."""

    name: str
    run: Callable[[], list[Tensor]]
    reference: Callable[[], list[Tensor]]
    launch: Callable[[], object]
    exact: bool = False
    limit: float = 1e-2


class NpuClock:
    """Events on the current NPU stream around each call."""

    def microseconds(self, call: Callable[[], object]) -> tuple[float, float]:
        npu: Any = torch.npu  # type: ignore[attr-defined]
        for _ in range(WARM_UP):
            call()
        times = []
        for _ in range(CALLS):
            start, end = npu.Event(enable_timing=True), npu.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        tenths = statistics.quantiles(times, n=10)
        median = statistics.median(times)
        return median, (tenths[-1] - tenths[0]) / (2 * median)


def wrong(case: Case) -> str | None:
    """What differs from the oracle, or None."""
    for index, (found, expected) in enumerate(zip(case.run(), case.reference(), strict=True)):
        found, expected = found.cpu(), expected.cpu()
        if case.exact:
            if not torch.equal(found.long(), expected.long()):
                return f"result {index} differs in {int((found != expected).sum())} places"
            continue
        scale = expected.double().norm().clamp(min=1e-30)
        error = float((found.double() - expected.double()).norm() / scale)
        if not error <= case.limit:
            return f"result {index}: relative error {error:.2e}, limit {case.limit:.0e}"
    return None


def cases(device: str, sizes: Sizes) -> Iterator[Case]:
    """Every operator at `sizes`, one after the other: their inputs need not fit together."""
    yield _max_softmax(device, sizes)
    yield _pack_rows(device, sizes)
    for name, beyond in (("DSpark", 0), ("DFlash", 1)):
        yield _draft_inputs(device, sizes, name, beyond)
    yield _conv_verify(device, sizes)
    yield _gdn_native(device, sizes)
    yield _gdn_replay(device, sizes)


def _normal(device: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random).to(device, dtype)


def _integers(values: list[int] | Tensor, device: str) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(device)


def _lengths(sizes: Sizes) -> Tensor:
    """Ragged: 0 to K + 1 rows."""
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, sizes.columns + 1, (sizes.requests,), generator=random)


def _starts(lengths: Tensor, device: str) -> Tensor:
    return _integers(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), device)


def _max_softmax(device: str, sizes: Sizes) -> Case:
    from vllm_ascend_spec.kernels.max_softmax import triton as kernel

    rows = sizes.requests * sizes.draft_tokens
    logits = _normal("cpu", rows, sizes.vocabulary, dtype=torch.bfloat16) * 3
    own = logits.to(device)
    call = partial(kernel.max_softmax, own)
    return Case(
        f"max_softmax {rows} x {sizes.vocabulary}",
        lambda: list(call()),
        lambda: list(max_softmax_naive.max_softmax(logits)),
        call,
        limit=1e-5,
    )


def _pack_rows(device: str, sizes: Sizes) -> Case:
    from vllm_ascend_spec.kernels.pack_rows import triton as kernel

    def packed(module: Any, where: str) -> Callable[[], list[Tensor]]:
        scores = _normal(where, sizes.requests, sizes.draft_tokens).sigmoid()
        ones = _integers([1] * sizes.requests, where)
        batch = pack_rows.Batch(ones, ones * sizes.draft_tokens)
        out = pack_rows.PackedRows.allocate(sizes.requests, where)
        budget = sizes.requests * sizes.draft_tokens // 2

        def call() -> list[Tensor]:
            module.pack_rows(scores, budget, batch, out)
            return [out.draft_lengths, out.query_start_loc, out.cu_num_logits]

        return call

    call = packed(kernel, device)
    name = f"pack_rows {sizes.requests} x {sizes.draft_tokens}"
    return Case(name, call, packed(pack_naive, "cpu"), call, exact=True)


def _target_step(where: str, sizes: Sizes) -> draft_inputs.TargetStep:
    requests, columns = sizes.requests, sizes.columns
    random = torch.Generator().manual_seed(1)
    sampled = torch.randint(1, columns + 1, (requests,), generator=random)
    base = torch.randint(0, 1000, (requests, 1), generator=random)
    return draft_inputs.TargetStep(
        query_start_loc=_integers(torch.arange(requests + 1) * columns, where),
        positions=(base + torch.arange(columns)).flatten().to(where),
        num_sampled=_integers(sampled, where),
        num_rejected=_integers(columns - sampled, where),
        idx_mapping=_integers(torch.arange(requests), where),
        last_sampled=torch.arange(requests).to(where),
        next_prefill_tokens=_integers([0] * requests, where),
        block_table=_integers(torch.arange(1, requests * 32 + 1).view(requests, 32), where),
    )


def _draft_inputs(device: str, sizes: Sizes, name: str, beyond: int) -> Case:
    from vllm_ascend_spec.kernels.draft_inputs import triton as kernel

    shape = draft_inputs.BlockShape(sizes.draft_tokens, sizes.draft_tokens + beyond, 1, 128, 4096)

    def prepared(module: Any, where: str) -> Callable[[], list[Tensor]]:
        step = _target_step(where, sizes)
        rows = sizes.requests * sizes.columns
        out = draft_inputs.DraftBuffers.allocate(sizes.requests, shape, rows, where)

        def call() -> list[Tensor]:
            module.draft_inputs(step, shape, out)
            return [out.input_ids, out.positions, out.slots, out.seq_lens, out.context_slots]

        return call

    call = prepared(kernel, device)
    name = f"draft_inputs {name} {sizes.requests} x {shape.rows}"
    return Case(name, call, prepared(draft_naive, "cpu"), call, exact=True)


def _conv_verify(device: str, sizes: Sizes) -> Case:
    from vllm_ascend_spec.kernels.conv_verify import triton as kernel

    lengths = _lengths(sizes)
    channels = sizes.dim * (2 * sizes.heads[0] + sizes.heads[1])
    bf16 = torch.bfloat16

    def convolved(module: Any, where: str) -> tuple[Tensor, Callable[[], Tensor]]:
        windows = _normal(
            where, sizes.requests + 1, 2 + sizes.columns, channels, dtype=bf16, seed=2
        )
        return windows, partial(
            module.conv_verify,
            _normal(where, int(lengths.sum()), channels, dtype=bf16),
            _normal(where, channels, 4, dtype=bf16, seed=1),
            None,
            windows,
            _starts(lengths, where),
            _integers(torch.arange(1, sizes.requests + 1), where),
            _integers(torch.arange(sizes.requests) % sizes.columns + 1, where),
        )

    def answer(module: Any, where: str) -> list[Tensor]:
        windows, call = convolved(module, where)
        return [call(), windows]

    name = f"conv_verify ragged {sizes.requests} x 0..{sizes.columns}"
    launch = convolved(kernel, device)[1]
    return Case(name, partial(answer, kernel, device), partial(answer, conv_naive, "cpu"), launch)


def _gdn_rows(where: str, sizes: Sizes, tokens: int) -> tuple[Tensor, ...]:
    (hk, hv), dim, bf16 = sizes.heads, sizes.dim, torch.bfloat16
    return (
        _normal(where, tokens, hk, dim, dtype=bf16, seed=1),
        _normal(where, tokens, hk, dim, dtype=bf16, seed=2),
        _normal(where, tokens, hv, dim, dtype=bf16, seed=3),
        _normal(where, tokens, hv, dtype=bf16, seed=4),
        _normal(where, tokens, hv, dtype=bf16, seed=5),
        _normal(where, hv, seed=6).abs().add(0.05).log(),
        torch.full((hv,), -2.0, device=where),
    )


def _gdn_native(device: str, sizes: Sizes) -> Case:
    from vllm_ascend_spec.kernels.gdn_verify import triton as kernel

    lengths, columns = _lengths(sizes), sizes.columns
    slots = sizes.requests * columns + 1

    def states(where: str) -> Tensor:
        return _normal(where, slots, sizes.heads[1], sizes.dim, sizes.dim, seed=7) * 0.3

    def places(where: str) -> tuple[Tensor, Tensor, Tensor]:
        table = _integers(torch.arange(1, slots).view(sizes.requests, columns), where)
        accepted = _integers(torch.arange(sizes.requests) % columns + 1, where)
        return _starts(lengths, where), table, accepted

    rows, where = _gdn_rows(device, sizes, int(lengths.sum())), places(device)

    def run() -> list[Tensor]:
        own = states(device)
        return [kernel.gdn_verify(*rows, own, *where, max_rows=columns), own]

    def reference() -> list[Tensor]:
        own = states("cpu").double()
        q, k, v, *gate_inputs = _gdn_rows("cpu", sizes, int(lengths.sum()))
        gates = replay_naive.gates(*gate_inputs, torch.float64)
        wide = q.double(), k.double(), v.double()
        return [gdn_naive.gdn_verify(*wide, *gates, own, *places("cpu")), own]

    launch = partial(kernel.gdn_verify, *rows, states(device), *where, max_rows=columns)
    return Case(f"gdn_verify native {sizes.requests} x 0..{columns}", run, reference, launch)


def _gdn_replay(device: str, sizes: Sizes) -> Case:
    from vllm_ascend_spec.kernels.gdn_verify import replay as kernel

    (hk, hv), dim, ring = sizes.heads, sizes.dim, 32
    lengths = _lengths(sizes)
    layout = ReplayLayout(hk, hv, dim, dim, ring, torch.float32)

    def bound(function: Any, where: str, wide: bool, **options: Any) -> Callable[[], Tensor]:
        rows = _gdn_rows(where, sizes, int(lengths.sum()))
        cache = layout.allocate(sizes.requests + 1, where)
        cache.state.copy_(_normal(where, *cache.state.shape, seed=8) * 0.3)
        if wide:
            cache = ReplayCache(*(x.double() for x in cache.tensors()))
        slots = _integers(torch.arange(1, sizes.requests + 1), where)
        none = _integers([0] * sizes.requests, where)
        out = torch.zeros_like(rows[2], dtype=torch.float64 if wide else None)
        step = StepCursor(none, none, none)
        starts = _starts(lengths, where)
        return partial(function, *rows, starts, slots, step, cache, out, **options)

    # Without pending rows and folding, a step leaves the states: it can be launched again.
    launch = bound(kernel.replay_verify, device, False, max_rows=sizes.columns)
    exact = bound(replay_naive.replay_verify, "cpu", True)
    name = f"gdn_verify replay {sizes.requests} x 0..{sizes.columns}"
    return Case(name, lambda: [launch()], lambda: [exact()], launch)
