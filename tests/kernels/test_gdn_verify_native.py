"""The native layout (a state column for each row) against `naive.gdn_verify` in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gdn_verify import naive, replay_naive
from kernels.gdn_verify import triton as native

REQUESTS, DIM, POISON = 3, 32, 777.0
CONFIG = native.NativeConfig(heads=2, block_v=16)
CONFIGS = [CONFIG, native.RowConfig(block_v=8)]
DTYPES = [torch.bfloat16, torch.float32]
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 2e-5}
Steps = list[tuple[list[int], list[int]]]


class Run:
    """A pool with a null slot and a guard slot, and the oracle's pool in float64 beside it."""

    def __init__(
        self, heads: tuple[int, int], columns: int, dtype: torch.dtype, seed: int,
        device: torch.device, config: native.NativeConfig | native.RowConfig = CONFIG,
    ) -> None:  # fmt: skip
        """Columns of the requests are scattered over the pool."""
        self.random = torch.Generator().manual_seed(seed)
        self.HK, self.HV = heads
        self.columns, self.device, self.config = columns, device, config
        slots = REQUESTS * columns + 2
        self.states = (self.normal(slots, self.HV, DIM, DIM) * 0.3).to(dtype).to(device)
        self.exact = self.states.double()
        self.guards = self.states[[0, slots - 1]].clone()
        columns_of = (torch.randperm(slots - 2, generator=self.random) + 1).view(REQUESTS, -1)
        padding = torch.zeros(2, columns, dtype=torch.long)  # null and, below, negative
        padding[1] = -1
        table = torch.cat([columns_of[:1], padding[:1], columns_of[1:], padding[1:]])
        self.indices = table.to(torch.int32).to(device)
        self.accepted = torch.ones(REQUESTS + 2, dtype=torch.int32, device=device)
        self.A_log = (self.normal(self.HV) - 3).to(device)
        self.dt_bias = self.normal(self.HV).to(device)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal on the CPU."""
        return torch.randn(*shape, generator=self.random)

    def step(self, rows: list[int], accepted: list[int]) -> None:
        """One step of every request; the padding entries have rows, too."""
        lengths = [rows[0], min(2, self.columns), rows[1], rows[2], 1]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        tokens = int(starts[-1]) + 2
        starts = starts.to(torch.int32).to(self.device)
        q, k, v, a, b = (
            self.normal(tokens, *shape).bfloat16().to(self.device)
            for shape in ((self.HK, DIM), (self.HK, DIM), (self.HV, DIM), (self.HV,), (self.HV,))
        )
        log_decay, beta = replay_naive.gates(a, b, self.A_log, self.dt_bias, torch.float64)
        reference = naive.gdn_verify(
            q.double(), k.double(), v.double(), log_decay, beta, self.exact, starts, self.indices,
            self.accepted,
        )  # fmt: skip
        out = torch.full(v.shape, POISON, device=self.device)
        native.gdn_verify(
            q, k, v, a, b, self.A_log, self.dt_bias, self.states, starts, self.indices,
            self.accepted, out, self.columns, config=self.config,
        )  # fmt: skip
        real = torch.zeros(tokens, dtype=torch.bool)
        for entry in (0, 2, 3):
            real[int(starts[entry]) : int(starts[entry + 1])] = True
        limit = LIMITS[self.states.dtype]
        if real.any():
            worst = (out.double() - reference)[real].abs().max()
            assert float(worst) <= limit * float(reference.abs().max())
        assert bool((out.cpu()[~real] == POISON).all()), "a row of no request was written"
        for entry, n, kept in zip((0, 2, 3), rows, accepted, strict=True):
            if n:
                self.accepted[entry] = kept

    def finish(self) -> None:
        """All columns, and the slots of no request."""
        worst = (self.states.double() - self.exact).abs().max() / self.exact.abs().max()
        assert float(worst) < LIMITS[self.states.dtype]
        last = self.states.shape[0] - 1
        assert torch.equal(self.states[[0, last]], self.guards)


@st.composite
def steps(draw: st.DrawFn, max_rows: int) -> Steps:
    """0 rows is a preempted request; accepted counts follow each request's own last step."""
    result = []
    for _ in range(draw(st.integers(2, 6))):
        rows = [draw(st.integers(0, max_rows)) for _ in range(REQUESTS)]
        result.append((rows, [draw(st.integers(1, max(n, 1))) for n in rows]))
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 4), (2, 2), (1, 4)])
@settings(max_examples=4, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_schedules_match_float64(
    data: st.DataObject,
    seed: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    run = Run(heads, 8, dtype, seed, device, data.draw(st.sampled_from(CONFIGS)))
    for rows, accepted in data.draw(steps(8)):
        run.step(rows, accepted)
    run.finish()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sixteen_rows_then_one_after_any_acceptance(
    dtype: torch.dtype, config: native.NativeConfig | native.RowConfig, device: torch.device
) -> None:
    """After 16 rows with 1, 9 and 16 accepted, one row starts from the right column."""
    run = Run((1, 2), 16, dtype, 5, device, config)
    for rows, accepted in (([16] * 3, [1, 9, 16]), ([1] * 3, [1] * 3), ([16, 2, 1], [16, 1, 1])):
        run.step(rows, accepted)
    run.finish()


@pytest.mark.parametrize("config", CONFIGS)
def test_one_column_is_the_start_and_the_end(
    config: native.NativeConfig | native.RowConfig, device: torch.device
) -> None:
    """Plain decoding, where the pool has a state a request."""
    for dtype in DTYPES:
        run = Run((2, 4), 1, dtype, 8, device, config)
        for rows in ([1, 1, 1], [1, 0, 1], [0, 1, 1]):
            run.step(rows, [1, 1, 1])
        run.finish()


@pytest.mark.parametrize("columns", [8, 1])
@pytest.mark.parametrize("config", CONFIGS)
def test_nothing_accepted_touches_nothing(
    config: native.NativeConfig | native.RowConfig, columns: int, device: torch.device
) -> None:
    run = Run((1, 2), columns, torch.bfloat16, 6, device)
    run.accepted.zero_()
    before = run.states.clone()
    one = torch.ones(5, 1, 32, dtype=torch.bfloat16, device=device)
    out = torch.full((5, 2, 32), POISON, device=device)
    gates = torch.zeros(5, 2, dtype=torch.bfloat16, device=device)
    native.gdn_verify(
        one, one, one.expand(5, 2, 32).contiguous(), gates, gates, run.A_log, run.dt_bias,
        run.states, torch.arange(6, dtype=torch.int32, device=device), run.indices, run.accepted,
        out, columns, config=config,
    )  # fmt: skip
    assert bool((out == POISON).all()) and torch.equal(run.states, before)


def test_refuses_more_rows_than_columns(device: torch.device) -> None:
    run = Run((1, 2), 4, torch.bfloat16, 7, device)
    one = torch.ones(1, 1, 32, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="within the 4 columns"):
        native.gdn_verify(
            one, one, one, one[0], one[0], run.A_log, run.dt_bias, run.states, run.accepted,
            run.indices, run.accepted, max_rows=5,
        )  # fmt: skip


def test_fp32_tiles_that_were_wrong_once_are_refused_on_cuda() -> None:
    cuda, wide = torch.device("cuda"), native.NativeConfig(block_v=64)
    with pytest.raises(ValueError, match="at most 32 rows a tile on CUDA"):
        native.check_config(wide, torch.float32, cuda)
    native.check_config(wide, torch.bfloat16, cuda)
    native.check_config(wide, torch.float32, torch.device("cpu"))
    native.check_config(native.NativeConfig(block_v=32), torch.float32, cuda)


def test_cuda_takes_the_rows_in_turn_and_others_their_matrix_unit() -> None:
    assert isinstance(native.default_config(8, torch.device("cuda")), native.RowConfig)
    assert isinstance(native.default_config(8, torch.device("cpu")), native.NativeConfig)
