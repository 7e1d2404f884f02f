"""How a launch with rows of any length fills an ACL graph."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_ascend_spec.graphs import acl
from vllm_ascend_spec.graphs.dispatcher import Dispatcher, Eager, Replay, classify
from vllm_ascend_spec.graphs.keys import GraphKey, Kind, Phase, Role

MAX_REQUESTS = 8
LADDERS = st.sets(st.integers(1, MAX_REQUESTS * acl.LONGEST_ROW), max_size=6).map(sorted)
LENGTHS = st.lists(st.integers(1, acl.LONGEST_ROW), min_size=1, max_size=MAX_REQUESTS)


def dispatch(lengths: list[int], ladder: list[int]) -> Replay | Eager:
    dispatcher = Dispatcher(Role.TARGET, acl.captures(ladder, MAX_REQUESTS))
    return dispatcher.dispatch(classify(Role.TARGET, lengths, [Phase.VERIFY] * len(lengths)))


@settings(deadline=None)
@given(LENGTHS, LADDERS)
def test_a_launch_fills_its_graph_to_the_last_row(lengths: list[int], ladder: list[int]):
    launch = dispatch(lengths, ladder)
    if isinstance(launch, Eager):
        return
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    filled = acl.padded_starts(starts, launch.key)
    assert filled[: len(starts)] == starts
    assert filled[-1] == launch.key.rows and len(filled) == launch.key.requests + 1
    padding = [b - a for a, b in pairwise(filled)][len(lengths) :]
    assert all(0 <= length <= acl.LONGEST_ROW for length in padding)


@settings(deadline=None)
@given(LENGTHS, LADDERS)
def test_rows_are_given_up_only_for_a_graph_and_no_more_than_needed(
    lengths: list[int], ladder: list[int]
):
    requests, rows = len(lengths), sum(lengths)
    found = acl.rows_with_a_graph(rows, requests, ladder, MAX_REQUESTS)

    def has_graph(count: int) -> bool:
        # Any division of the rows will do: one request's length decides nothing below the limit.
        even = [count // requests + (i < count % requests) for i in range(requests)]
        return isinstance(dispatch(even, ladder), Replay)

    wanted = next((n for n in range(rows, requests - 1, -1) if has_graph(n)), rows)
    assert found == wanted


def test_all_requests_running_take_a_whole_graph():
    assert acl.rows_with_a_graph(20, MAX_REQUESTS, [8, 16, 32], MAX_REQUESTS) == 16
    assert acl.rows_with_a_graph(20, MAX_REQUESTS - 1, [8, 16, 32], MAX_REQUESTS) == 20
    assert acl.rows_with_a_graph(20, MAX_REQUESTS, [32], MAX_REQUESTS) == 20
    assert acl.rows_with_a_graph(20, MAX_REQUESTS, [], MAX_REQUESTS) == 20
    assert acl.rows_with_a_graph(40, MAX_REQUESTS, [8, 16, 32], MAX_REQUESTS) == 32


@pytest.mark.parametrize("starts", [[0, 8, 17], [0, 1, 2, 3]])
def test_a_launch_that_does_not_fit_is_refused(starts: list[int]):
    with pytest.raises(ValueError, match="do not fit the target verify graph of 16 rows, 2"):
        acl.padded_starts(starts, GraphKey(Role.TARGET, Kind.VERIFY, 16, 2))


def test_graphs_that_cannot_be_filled_are_refused():
    with pytest.raises(ValueError, match="cannot fill 33 rows"):
        acl.captures([33], 2)
