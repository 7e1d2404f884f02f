"""Dispatching a launch to a captured graph: the talk's example, and what no batch may break."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_ascend_spec.graphs.dispatcher import (
    SERVED_BY,
    Batch,
    Capture,
    Dispatcher,
    Eager,
    Reason,
    Replay,
    classify,
    dispatch_step,
    drafting,
    padding_lengths,
)
from vllm_ascend_spec.graphs.keys import GraphKey, GraphStore, Kind, Phase, Role

K = 7


def verify_graph(requests: int, ragged: bool = False) -> Capture:
    key = GraphKey(Role.TARGET, Kind.VERIFY, requests * (K + 1), requests)
    return Capture(key, longest=K + 1, ragged=ragged)


def test_target_and_drafter_of_the_talk_get_graphs_of_their_own_size() -> None:
    target = Dispatcher(Role.TARGET, [verify_graph(b) for b in (8, 16, 32)])
    sizes = [(b * K, b) for b in (8, 16, 32)]
    drafter = Dispatcher(
        Role.DRAFTER,
        [Capture(GraphKey(Role.DRAFTER, Kind.DRAFT, r, b), K, ragged=False) for r, b in sizes],
    )
    step = dispatch_step(
        target, drafter, classify(Role.TARGET, [K + 1] * 16, [Phase.VERIFY] * 16), K
    )
    assert step.target == Replay(GraphKey(Role.TARGET, Kind.VERIFY, 128, 16), 0, 0)
    assert step.drafter == Replay(GraphKey(Role.DRAFTER, Kind.DRAFT, 112, 16), 0, 0)
    assert step.context_rows == 128


def test_a_shared_ladder_keeps_the_drafter_out_of_a_full_graph() -> None:
    """What the talk found: at the target's sizes a DSpark block of 112 rows fits nothing."""
    shared = [Capture(GraphKey(Role.DRAFTER, Kind.DRAFT, 128, 16), longest=K + 1, ragged=False)]
    answer = Dispatcher(Role.DRAFTER, shared).dispatch(drafting(16, K))
    assert isinstance(answer, Eager) and answer.reason is Reason.LENGTHS


def test_context_counts_real_rows_only() -> None:
    target = Dispatcher(Role.TARGET, [verify_graph(16, ragged=True)])
    batch = classify(Role.TARGET, [5, 4, 2], [Phase.VERIFY] * 3)
    step = dispatch_step(target, Dispatcher(Role.DRAFTER, []), batch, K)
    assert (step.target.rows, step.context_rows) == (128, 11)
    assert isinstance(step.drafter, Eager) and step.drafter.reason is Reason.NO_GRAPHS


@pytest.mark.parametrize("chunk", [1, 2, K + 1])
def test_a_prompt_chunk_of_a_verify_rows_shape_is_mixed(chunk: int) -> None:
    dispatcher = Dispatcher(Role.TARGET, [verify_graph(16), verify_graph(16 + 1, ragged=True)])
    rows, phases = [K + 1] * 15 + [chunk], [Phase.VERIFY] * 15 + [Phase.PREFILL]
    batch = classify(Role.TARGET, rows, phases)
    assert batch.kind is Kind.MIXED
    answer = dispatcher.dispatch(batch)
    assert isinstance(answer, Eager) and answer.reason is Reason.KIND
    assert "mixed" in answer.message
    as_verify = classify(Role.TARGET, rows, [Phase.VERIFY] * 16)
    assert isinstance(dispatcher.dispatch(as_verify), Replay)


def test_a_request_without_draft_tokens_stays_a_verify_row() -> None:
    """Its recurrent state still lies in the column of the last accepted token."""
    assert classify(Role.TARGET, [1, 1], [Phase.VERIFY, Phase.DECODE]).kind is Kind.VERIFY
    assert classify(Role.TARGET, [1, 1], [Phase.DECODE, Phase.DECODE]).kind is Kind.DECODE


def test_own_kind_before_less_padding() -> None:
    mixed = Capture(GraphKey(Role.TARGET, Kind.MIXED, 16, 16), longest=None, ragged=True)
    dispatcher = Dispatcher(Role.TARGET, [mixed, verify_graph(16, ragged=True)])
    answer = dispatcher.dispatch(classify(Role.TARGET, [8, 8], [Phase.VERIFY] * 2))
    assert isinstance(answer, Replay) and answer.key.kind is Kind.VERIFY


@pytest.mark.parametrize(
    ("rows", "graphs", "reason", "said"),
    [
        ([8] * 17, [verify_graph(16)], Reason.ROWS, "largest graph has 128 rows"),
        ([1] * 17, [verify_graph(16, ragged=True)], Reason.REQUESTS, "16 requests at most"),
        ([8, 7], [verify_graph(16)], Reason.LENGTHS, "requests of 7 to 8 rows"),
        ([9, 2], [verify_graph(16, ragged=True)], Reason.LENGTHS, "requests of 2 to 9 rows"),
    ],
)
def test_eager_says_why(rows: list[int], graphs: list[Capture], reason: Reason, said: str) -> None:
    batch = classify(Role.TARGET, rows, [Phase.VERIFY] * len(rows))
    answer = Dispatcher(Role.TARGET, graphs).dispatch(batch)
    assert isinstance(answer, Eager) and answer.reason is reason
    assert said in answer.message and answer.rows == sum(rows)


def test_padding_rows_without_a_padding_request() -> None:
    key = GraphKey(Role.TARGET, Kind.VERIFY, 16, 3)
    owned = Capture(key, longest=K + 1, ragged=True, padding_needs_request=True)
    dispatcher = Dispatcher(Role.TARGET, [owned])
    full = dispatcher.dispatch(classify(Role.TARGET, [5, 4, 2], [Phase.VERIFY] * 3))
    assert isinstance(full, Eager) and full.reason is Reason.PADDING
    spare = dispatcher.dispatch(classify(Role.TARGET, [6, 4], [Phase.VERIFY] * 2))
    assert spare == Replay(key, 6, 1) and padding_lengths(spare, K + 1) == [6]
    too_long = dispatcher.dispatch(classify(Role.TARGET, [4, 3], [Phase.VERIFY] * 2))
    assert isinstance(too_long, Eager) and too_long.reason is Reason.PADDING


def test_what_is_no_batch_and_no_graph() -> None:
    with pytest.raises(ValueError, match="one each"):
        classify(Role.TARGET, [1, 2], [Phase.DECODE])
    with pytest.raises(ValueError, match="with draft tokens it verifies"):
        classify(Role.TARGET, [2], [Phase.DECODE])
    with pytest.raises(ValueError, match="cannot share a launch"):
        classify(Role.DRAFTER, [7, 8], [Phase.DRAFT, Phase.VERIFY])
    with pytest.raises(ValueError, match="only a drafter"):
        Batch(Role.TARGET, Kind.DRAFT, 7, 1, 7, 7)
    with pytest.raises(ValueError, match="cannot be 2 requests of 3 to 4"):
        Batch(Role.TARGET, Kind.VERIFY, 9, 2, 3, 4)
    with pytest.raises(ValueError, match="cannot fill"):
        Capture(GraphKey(Role.TARGET, Kind.VERIFY, 128, 8), longest=8, ragged=True)
    with pytest.raises(ValueError, match="are 128 rows"):
        Capture(GraphKey(Role.TARGET, Kind.VERIFY, 120, 16), longest=8, ragged=False)
    with pytest.raises(ValueError, match="listed twice"):
        Dispatcher(Role.TARGET, [verify_graph(16), verify_graph(16, ragged=True)])
    with pytest.raises(ValueError, match="dispatcher of the drafter"):
        Dispatcher(Role.DRAFTER, [verify_graph(16)])
    with pytest.raises(ValueError, match="dispatcher of the drafter"):
        Dispatcher(Role.DRAFTER, []).dispatch(classify(Role.TARGET, [1], [Phase.DECODE]))


def test_a_row_count_names_no_graph() -> None:
    store: GraphStore[str] = GraphStore()
    same_rows = [
        GraphKey(Role.TARGET, Kind.VERIFY, 128, 16), GraphKey(Role.TARGET, Kind.DECODE, 128, 128),
        GraphKey(Role.TARGET, Kind.MIXED, 128, 16), GraphKey(Role.DRAFTER, Kind.DRAFT, 128, 16),
    ]  # fmt: skip
    for key in same_rows:
        store.put(key, str(key))
    assert [store[key] for key in same_rows] == [str(key) for key in same_rows]
    with pytest.raises(TypeError, match="does not name a graph"):
        store.put(128, "handles")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="does not name a graph"):
        store[128]  # type: ignore[index]
    with pytest.raises(ValueError, match="captured twice"):
        store.put(same_rows[0], "again")
    assert store.pop(same_rows[0]) and same_rows[0] not in store and len(store) == 3
    with pytest.raises(KeyError, match="nothing was captured"):
        store[same_rows[0]]


PHASES = [Phase.PREFILL, Phase.DECODE, Phase.VERIFY]


@st.composite
def captures(draw: st.DrawFn) -> list[Capture]:
    found = {}
    for kind, requests, longest, ragged, owned in draw(
        st.lists(
            st.tuples(
                st.sampled_from([Kind.DECODE, Kind.VERIFY, Kind.MIXED]), st.integers(1, 12),
                st.integers(1, 9), st.booleans(), st.booleans(),
            ),
            max_size=12,
        )
    ):  # fmt: skip
        length = 1 if kind is Kind.DECODE else longest
        rows = requests * length
        if ragged:
            rows = draw(st.integers(requests, rows))
        key = GraphKey(Role.TARGET, kind, rows, requests)
        unlimited = ragged and kind is Kind.MIXED
        found[key] = Capture(key, None if unlimited else length, ragged, owned)
    return list(found.values())


@st.composite
def requests_of_a_step(draw: st.DrawFn) -> tuple[list[int], list[Phase]]:
    phases = draw(st.lists(st.sampled_from(PHASES), min_size=1, max_size=14))
    rows = [1 if phase is Phase.DECODE else draw(st.integers(1, 10)) for phase in phases]
    return rows, phases


def holds(capture: Capture, rows: list[int]) -> bool:
    """Whether the graph can be filled with these requests: by construction, not by formula."""
    key, lengths = capture.key, list(rows)
    room = capture.longest or key.rows
    if max(lengths) > room or (not capture.ragged and set(lengths) != {room}):
        return False
    spare = key.requests - len(lengths)
    padding = key.rows - sum(lengths)
    while capture.padding_needs_request and padding > 0 and spare > 0:
        padding, spare = padding - min(padding, room), spare - 1
    return spare >= 0 and (padding == 0 if capture.padding_needs_request else padding >= 0)


@given(captures(), requests_of_a_step())
def test_dispatch(captured: list[Capture], step: tuple[list[int], list[Phase]]) -> None:
    rows, phases = step
    batch = classify(Role.TARGET, rows, phases)
    answer = Dispatcher(Role.TARGET, captured).dispatch(batch)
    usable = [c for c in captured if c.key.kind in SERVED_BY[batch.kind] and holds(c, rows)]
    if isinstance(answer, Eager):
        assert not usable and answer.message
        return
    assert not (Phase.PREFILL in phases and answer.key.kind is not Kind.MIXED)
    assert not (Phase.VERIFY in phases and answer.key.kind is Kind.DECODE)
    chosen = next(c for c in captured if c.key == answer.key)
    assert chosen in usable
    assert answer.padding_rows == answer.key.rows - sum(rows) >= 0
    assert answer.padding_requests == answer.key.requests - len(rows) >= 0
    same_kind = [c for c in usable if c.key.kind is answer.key.kind]
    assert answer.key.rows == min(c.key.rows for c in same_kind)
    order = SERVED_BY[batch.kind]
    assert order.index(answer.key.kind) == min(order.index(c.key.kind) for c in usable)
    if chosen.padding_needs_request:
        lengths = padding_lengths(answer, chosen.longest or answer.key.rows)
        assert (sum(lengths), len(lengths)) == (answer.padding_rows, answer.padding_requests)


def test_every_kind_is_served_by_graphs_that_hold_its_rows() -> None:
    """A prompt's rows run in mixed graphs only, draft rows in draft graphs only."""
    for batch_kind, graph_kind in product(Kind, Kind):
        served = graph_kind in SERVED_BY[batch_kind]
        if batch_kind is Kind.MIXED or graph_kind in (Kind.DECODE, Kind.DRAFT):
            assert served == (batch_kind is graph_kind)
