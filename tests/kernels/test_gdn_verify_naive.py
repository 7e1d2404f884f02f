"""The state contract of verification, on the oracle in float64 and on the host operator in fp32.

Cases are named after public reports of broken recurrent state: C01 vllm#39273, C03 vllm#51508,
C04 vllm#52792, C07 vllm-xpu-kernels#599, C09 vllm#49757, C10 vllm#33937, C13 llama.cpp#28123.
"""

from __future__ import annotations

import pytest
import torch
from gdn_cases import DK, DV, HEADS_K, HEADS_V, WIDTH, Layer, Token, random_token, replay
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_ascend_spec.kernels.conv_verify import host as conv_host
from vllm_ascend_spec.kernels.conv_verify import naive as conv_naive
from vllm_ascend_spec.kernels.gdn_verify import host as gdn_host
from vllm_ascend_spec.kernels.gdn_verify import naive as gdn_naive

K = 3
EXACT = {"rtol": 1e-12, "atol": 1e-12}
SINGLE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(params=["naive float64", "host float32"])
def layer(request: pytest.FixtureRequest) -> Layer:
    if request.param.startswith("naive"):
        return Layer(conv_naive, gdn_naive, K, slots=64)
    # The native operator takes fp32 states; the convolution around it stays exact.
    return Layer(conv_naive, gdn_host, K, slots=64, dtype=torch.float32)


def tolerance(layer: Layer) -> dict[str, float]:
    return EXACT if layer.dtype == torch.float64 else SINGLE


class Request:
    """A request as the engine sees it: kept tokens, its slots, what it emitted last."""

    def __init__(self, layer: Layer, columns: list[int], prompt: list[Token]) -> None:
        self.layer, self.columns, self.kept, self.accepted = layer, columns, list(prompt), 1
        layer.prefill([prompt], columns[:1], [False])

    def step(self, rows: list[Token], accept: int) -> None:
        """Verify `rows` (last token and drafts), then keep the first `accept` of them."""
        (outputs,) = self.layer.verify([rows], torch.tensor([self.columns]), [self.accepted])
        self.check(rows, outputs)
        self.kept += rows[:accept]
        self.accepted = accept

    def check(self, rows: list[Token], outputs: torch.Tensor) -> None:
        expected, _, _ = replay(self.layer.weight, self.kept + rows)
        torch.testing.assert_close(
            outputs.double(), expected[len(self.kept) :], **tolerance(self.layer)
        )

    def check_state(self) -> None:
        _, state, history = replay(self.layer.weight, self.kept)
        column = self.columns[self.accepted - 1]
        torch.testing.assert_close(
            self.layer.states[column].double(), state, **tolerance(self.layer)
        )
        window = self.layer.windows[self.columns[0]]
        start = self.accepted - 1
        torch.testing.assert_close(window[start : start + WIDTH - 1].double(), history, **EXACT)


def tokens(count: int, seed: int = 1) -> list[Token]:
    generator = torch.Generator().manual_seed(seed)
    return [random_token(generator) for _ in range(count)]


def test_c01_step_without_drafts_starts_from_the_accepted_state(layer: Layer):
    t = tokens(16)
    request = Request(layer, [10, 11, 12, 13], t[:5])
    request.step(t[5:9], accept=3)
    request.step(t[9:10], accept=1)
    request.step(t[10:14], accept=2)
    request.check_state()


def test_c03_step_that_emitted_nothing_changes_nothing(layer: Layer):
    t = tokens(8)
    columns = torch.tensor([[20, 21, 22, 23], [30, 31, 32, 33]])
    for accepted in ([2, 0], [0, 2]):
        states, windows = layer.snapshot()
        outputs = layer.verify([t[:4], t[4:]], columns, accepted)
        idle = accepted.index(0)
        assert torch.equal(layer.states[columns[idle]], states[columns[idle]])
        assert torch.equal(layer.windows[columns[idle, 0]], windows[columns[idle, 0]])
        assert not outputs[idle].any()
        alone = Layer(layer.conv, layer.gdn, K, slots=64, dtype=layer.dtype)
        alone.states, alone.windows = states, windows
        busy = 1 - idle
        (expected,) = alone.verify([[t[:4], t[4:]][busy]], columns[busy : busy + 1], [2])
        assert torch.equal(outputs[busy], expected)


def test_c04_state_indices_may_be_a_slice_of_a_wider_table(layer: Layer):
    t = tokens(8)
    table = torch.arange(1, 25, dtype=torch.int32).view(3, 8)
    view = table[:2, :4]
    assert not view.is_contiguous()
    other = Layer(layer.conv, layer.gdn, K, slots=64, dtype=layer.dtype)
    outputs = layer.verify([t[:4], t[4:]], view, [2, 3])
    expected = other.verify([t[:4], t[4:]], view.clone().contiguous(), [2, 3])
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert torch.equal(layer.states, other.states)


def test_c07_ragged_rows_equal_single_runs_and_touch_only_their_columns(layer: Layer):
    t = tokens(9)
    rows = [t[:2], t[2:6], t[6:9]]
    columns = torch.arange(4, 16).view(3, 4)
    alone = Layer(layer.conv, layer.gdn, K, slots=64, dtype=layer.dtype)
    states, _ = layer.snapshot()
    outputs = layer.verify(rows, columns, [1, 4, 2])
    for i, accepted in enumerate([1, 4, 2]):
        (expected,) = alone.verify([rows[i]], columns[i : i + 1], [accepted])
        assert torch.equal(outputs[i], expected)
        unused = columns[i, len(rows[i]) :]
        assert torch.equal(layer.states[unused], states[unused])
    assert torch.equal(layer.states, alone.states)
    assert torch.equal(layer.windows, alone.windows)


def test_c09_padding_rows_with_stale_tables_touch_nothing(layer: Layer):
    t = tokens(4)
    # Requests that are gone are still listed; their rows are empty, or their slots null.
    columns = torch.tensor([[4, 5, 6, 7], [9, 9, 9, 9], [0, 0, 0, 0]])
    states, windows = layer.snapshot()
    layer.verify([t, [], []], columns, [1, 1, 1])
    changed = [s for s in range(64) if not torch.equal(layer.states[s], states[s])]
    assert changed == [4, 5, 6, 7]
    rolled = [s for s in range(64) if not torch.equal(layer.windows[s], windows[s])]
    assert rolled == [4]


def test_c10_null_block_is_neither_read_nor_written(layer: Layer):
    t = tokens(8)
    columns = torch.tensor([[0, 0, 0, 0], [5, 6, 7, 8]])
    states, windows = layer.snapshot()
    layer.states[0], layer.windows[0] = float("nan"), float("nan")
    outputs = layer.verify([t[:4], t[4:]], columns, [1, 1])
    assert not outputs[0].any() and outputs[1].isfinite().all()
    assert layer.states[0].isnan().all() and layer.windows[0].isnan().all()
    layer.prefill([t[:4], t[4:]], [0, 5], [True, False])
    assert layer.states[1:].isfinite().all() and layer.windows[1:].isfinite().all()
    assert torch.equal(layer.states[9:], states[9:]) and torch.equal(layer.windows[9:], windows[9:])


@pytest.mark.parametrize("accept", [1, 2, 3, 4])
def test_c13_roll_back_restores_state_and_window(layer: Layer, accept: int):
    t = tokens(12)
    request = Request(layer, [10, 11, 12, 13], t[:3])
    request.step(t[3:7], accept)
    request.check_state()
    request.step(t[8:12], 4)
    request.check_state()


def test_one_token_chunk_of_a_prompt_goes_on_from_its_state(layer: Layer):
    t = tokens(6)
    request = Request(layer, [10, 11, 12, 13], t[:4])
    (outputs,) = layer.prefill([t[4:5]], [10], [True])
    request.check(t[4:5], outputs)
    request.kept += t[4:5]
    request.check_state()


def test_cold_prompt_ignores_what_the_slot_held(layer: Layer):
    t = tokens(5)
    (first,) = layer.prefill([t], [10], [False])
    (again,) = layer.prefill([t], [10], [False])
    assert torch.equal(first, again)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("package", ["naive", "host"])
def test_any_sequence_of_drafts_and_acceptances_equals_replay(package: str, data: st.DataObject):
    gdn, dtype = (gdn_naive, torch.float64) if package == "naive" else (gdn_host, torch.float32)
    layer = Layer(conv_naive, gdn, K, slots=16, dtype=dtype)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))

    def fresh(count: int) -> list[Token]:
        return [random_token(generator) for _ in range(count)]

    requests = [Request(layer, c, fresh(2)) for c in ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])]
    for _ in range(data.draw(st.integers(1, 5))):
        lengths = [data.draw(st.integers(0, K + 1)) for _ in requests]
        rows = [fresh(length) for length in lengths]
        outputs = layer.verify(
            rows,
            torch.tensor([r.columns for r in requests]),
            [r.accepted for r in requests],
        )
        for request, row, output in zip(requests, rows, outputs, strict=True):
            if row:
                request.check(row, output)
                request.accepted = data.draw(st.integers(1, len(row)))
                request.kept += row[: request.accepted]
    for request in requests:
        request.check_state()


def test_too_many_rows_are_refused(layer: Layer):
    t = tokens(5)
    with pytest.raises(ValueError, match="columns"):
        layer.gdn.gdn_verify(
            *random_inputs(5), layer.states, torch.tensor([0, 5]), torch.tensor([[1, 2]]),
            torch.tensor([1]),
        )  # fmt: skip
    with pytest.raises(ValueError, match="rows"):
        layer.verify([t], torch.tensor([[1, 2, 3, 4]]), [1])


def test_native_operator_is_what_the_host_takes():
    pytest.importorskip("vllm_ascend_spec._host", reason="installed without a compiler")
    assert gdn_host._native(torch.zeros(2, HEADS_V, DV, DK))
    assert not gdn_host._native(torch.zeros(2, HEADS_V, DV, DK, dtype=torch.float64))


def test_native_operator_works_in_a_paged_pool():
    """vLLM pads pages, so that a slot's stride exceeds its size."""
    pages = torch.randn(16, HEADS_V * DV * DK + 7)
    pool = pages[:, : HEADS_V * DV * DK].view(16, HEADS_V, DV, DK)
    packed = pool.clone()
    padding = pages[:, HEADS_V * DV * DK :].clone()
    rows = (torch.tensor([0, 3, 4]), torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([2, 1]))
    inputs = random_inputs(4)
    out = gdn_host.gdn_verify(*inputs, pool, *rows)
    expected = gdn_naive.gdn_verify(*inputs, packed, *rows)
    torch.testing.assert_close(out, expected, **SINGLE)
    torch.testing.assert_close(pool, packed, **SINGLE)
    assert torch.equal(pages[:, HEADS_V * DV * DK :], padding)


def test_oracle_equals_the_closed_form():
    """(I + L) U = diag(b) (V - diag(c) K S0^T): another derivation, no recurrence."""
    count = 6
    q, k, v, log_decay, beta = (x.double() for x in random_inputs(count))
    states = torch.randn(8, HEADS_V, DV, DK, dtype=torch.float64)
    start = states[1].clone()
    out = gdn_naive.gdn_verify(
        q, k, v, log_decay, beta, states, torch.tensor([0, count]),
        torch.arange(1, count + 1)[None], torch.tensor([1]),
    )  # fmt: skip
    k = gdn_naive.normalised(k)[:, 0]
    q = gdn_naive.normalised(q)[:, 0] * DK**-0.5
    for head in range(HEADS_V):
        c = log_decay[:, head].cumsum(0).exp()
        ratio = (c[:, None] / c[None, :]).tril()
        lower = beta[:, head, None] * (ratio * (k @ k.t())).tril(-1)
        right = beta[:, head, None] * (v[:, head] - c[:, None] * (k @ start[head].t()))
        u = torch.linalg.solve(torch.eye(count, dtype=torch.float64) + lower, right)
        expected = c[:, None] * (q @ start[head].t()) + (ratio * (q @ k.t())) @ u
        torch.testing.assert_close(out[:, head], expected, **EXACT)
        final = c[-1] * start[head] + u.t() @ (ratio[-1][:, None] * k)
        torch.testing.assert_close(states[count, head], final, **EXACT)


def random_inputs(count: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return (
        normal(count, HEADS_K, DK),
        normal(count, HEADS_K, DK),
        normal(count, HEADS_V, DV),
        -normal(count, HEADS_V).abs(),
        normal(count, HEADS_V).sigmoid(),
    )


def test_host_convolution_equals_the_oracle_in_bfloat16():
    bfloat16 = {"slots": 16, "conv_dtype": torch.bfloat16, "dtype": torch.float32}
    host = Layer(conv_host, gdn_host, K, **bfloat16)
    oracle = Layer(conv_naive, gdn_naive, K, **bfloat16)
    t = tokens(12)
    columns = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    for layers_step in (
        lambda layer: layer.prefill([t[:5], t[5:6]], [1, 5], [False, True]),
        lambda layer: layer.verify([t[6:8], t[8:12]], columns, [1, 1]),
        lambda layer: layer.verify([t[2:6], t[1:2]], columns, [2, 4]),
    ):
        for got, expected in zip(layers_step(host), layers_step(oracle), strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
        assert torch.equal(host.windows, oracle.windows)
