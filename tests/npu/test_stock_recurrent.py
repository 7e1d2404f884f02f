"""vllm-ascend's stock recurrent operator on ragged rows, and the guard that keeps them away.

The operator itself cannot run here: what runs is its indexing, emulated (stock_recurrent.py).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from stock_recurrent import Answer, Rows, stock_operator
from vllm_ascend_spec.kernels.gdn_verify.stock import (
    StockOperatorError,
    require_stock_operator,
    stock_operator_obstacle,
)

ROOT = Path(__file__).parents[2]
OPERATOR = "npu_recurrent_gated_delta_rule"
COLUMNS, HK, HV, DIM = 4, 1, 2, 4


def rows_of(lengths: list[int], accepted: list[int], columns: int = COLUMNS) -> Rows:
    """Seeded rows; every request's slots are its own and none is the null slot."""
    random = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    tokens, slots = sum(lengths), len(lengths) * columns + 1
    return Rows(
        normal(tokens, HK, DIM), normal(tokens, HK, DIM), normal(tokens, HV, DIM),
        -normal(tokens, HV).abs(), normal(tokens, HV).sigmoid(), normal(slots, HV, DIM, DIM),
        lengths, torch.arange(1, slots, dtype=torch.int32).view(-1, columns), accepted,
    )  # fmt: skip


def as_routed(rows: Rows, cores: int = 1) -> Answer:
    """The operator as vllm-ascend calls it, with the flattened table."""
    return stock_operator(rows, rows.table.flatten(), cores)


def is_right(rows: Rows, answer: Answer) -> bool:
    out, states = rows.oracle()
    return torch.equal(answer.out, out) and torch.equal(answer.states, states)


@pytest.mark.parametrize("cores", [1, 2, 3, 40])
def test_equal_lengths_are_right(cores: int) -> None:
    rows = rows_of([COLUMNS] * 3, [1, 4, 2])
    assert is_right(rows, as_routed(rows, cores))


def test_a_ragged_step_takes_other_requests_slots() -> None:
    rows = rows_of([3, 2, 4], [2, 1, 4])
    answer = as_routed(rows)
    owners = {request: (slot - 1) // COLUMNS for (request, _), slot in answer.read.items()}
    assert owners == {0: 0, 1: 0, 2: 2} and answer.read[1, 0] == 4
    _, states = rows.oracle()
    wrong = {s for s in range(len(states)) if not torch.equal(states[s], answer.states[s])}
    assert wrong == {4, 5, 6, 7, 8, 9, 10, 11, 12}, "slots of all three requests are hit"
    assert not answer.returned and not answer.out.isnan().any(), "and nothing tells"


@pytest.mark.parametrize(("cores", "lost_requests"), [(1, [1, 2, 3]), (2, [1, 2])])
def test_more_accepted_than_verified_ends_a_core_silently(
    cores: int, lost_requests: list[int]
) -> None:
    """Even with a packed slot list, which mends the indexing."""
    rows = rows_of([2, 1, 4, 4], [1, 3, 1, 1])
    packed = torch.cat([r[:n] for r, n in zip(rows.table, rows.lengths, strict=True)])
    answer = stock_operator(rows, packed, cores)
    unwritten = answer.out.isnan().all(-1).all(-1).split(rows.lengths)
    assert [request for request, lost in enumerate(unwritten) if lost.all()] == lost_requests
    assert answer.returned == [0] and not answer.out[:2].isnan().any()


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    lengths = draw(
        st.lists(st.sampled_from([0, 1, COLUMNS - 1, COLUMNS, COLUMNS]), min_size=1, max_size=5)
        | st.integers(1, 5).map(lambda n: [COLUMNS] * n)
    )
    limits = st.integers(1, COLUMNS) if draw(st.booleans()) else st.integers(0, COLUMNS)
    return lengths, draw(st.lists(limits, min_size=len(lengths), max_size=len(lengths))), draw(
        st.integers(1, 5)
    )  # fmt: skip


@settings(deadline=None)
@given(steps())
def test_the_guard_lets_pass_what_is_right_and_nothing_else(
    step: tuple[list[int], list[int], int],
) -> None:
    lengths, accepted, cores = step
    # The oracle's discarded step (nothing accepted) touches nothing; an operator that returns
    # leaves its output unwritten, so only a request without rows may have accepted nothing.
    rows = rows_of(lengths, accepted)
    obstacle = stock_operator_obstacle(lengths, COLUMNS, accepted)
    assert (obstacle is None) == is_right(rows, as_routed(rows, cores)), obstacle
    if stock_operator_obstacle(lengths, COLUMNS) is None:
        for known in ([1] * len(lengths), [COLUMNS] * len(lengths)):
            assert stock_operator_obstacle(lengths, COLUMNS, known) is None


def test_long_rows_and_lengths_unknown_to_the_host_are_refused() -> None:
    assert stock_operator_obstacle([16, 16], 16) is None
    assert "stops at 16 rows" in str(stock_operator_obstacle([17], 17))
    long = rows_of([17], [1], 17)
    assert not is_right(long, as_routed(long))
    assert "decided on the device" in str(stock_operator_obstacle(None, COLUMNS))
    with pytest.raises(StockOperatorError, match=r"request 1 would read .* Use gdn_verify"):
        require_stock_operator([2, 4], COLUMNS, [1, 1])
    require_stock_operator([4, 4, 0], COLUMNS)


def test_whoever_names_the_operator_asks_the_guard() -> None:
    sources = [p for room in ("vllm_ascend_spec", "kernels") for p in (ROOT / room).rglob("*.py")]
    # The guard's own page, and the texts of the series that guards it upstream.
    excused = {
        ROOT / "kernels/gdn_verify/stock.py",
        ROOT / "vllm_ascend_spec/patches/vllm_ascend.py",
    }
    naming = [p for p in sources if OPERATOR in p.read_text("utf-8") and p not in excused]
    unguarded = [p.name for p in naming if "stock_operator" not in p.read_text("utf-8")]
    assert unguarded == []


def test_the_emulated_lines_are_still_upstreams() -> None:
    source = os.environ.get("VLLM_ASCEND_SRC")
    if not source:
        pytest.skip("VLLM_ASCEND_SRC is not set: it names a source tree of vllm-ascend")
    folder = Path(source, "csrc/attention/recurrent_gated_delta_rule/op_kernel")
    kernel = re.sub(r"\s+", " ", (folder / "recurrent_gated_delta_rule.h").read_text("utf-8"))
    assert re.search(r"accepted\w* > seqLen\) \{ return; \}", kernel), "the silent return is gone"
    assert re.search(r"= seq0 \+ accepted\w* - 1;", kernel), "the start is indexed otherwise"
    layer = Path(source, "vllm_ascend/ops/gdn.py").read_text("utf-8")
    assert "ssm_state_indices=spec_state_indices_tensor.flatten()" in layer
