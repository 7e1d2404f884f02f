"""ACL graphs whose rows may have any lengths: what is captured, and how a launch fills one.

Pure Python. Capture, replay and graph task updates are vllm-ascend's (`engine/ascend_graphs.py`
extends its managers); what is decided about them is decided here.

Captured attention takes the rows' lengths as arguments, and a graph task update gives it those of
the step before it goes on. So one graph of a row count serves every way to divide the rows. Its
attention is in TND layout: the last cumulative length has to equal the row count, so rows of
padding need requests of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from .dispatcher import Capture, Replay, padding_lengths
from .keys import GraphKey, Kind, Role

LONGEST_ROW = 16  # vllm-ascend's limit on a decoding request of captured attention


def captures(rows: Iterable[int], max_requests: int) -> tuple[Capture, ...]:
    """One graph of the target for each row count, with as many requests as may run.

    Raises:
        ValueError: a row count that so many requests of LONGEST_ROW rows cannot fill.
    """
    return tuple(
        Capture(
            GraphKey(Role.TARGET, Kind.VERIFY, count, min(count, max_requests)),
            longest=LONGEST_ROW,
            ragged=True,
            padding_needs_request=True,
        )
        for count in sorted(set(rows))
    )


def rows_with_a_graph(rows: int, requests: int, ladder: Sequence[int], max_requests: int) -> int:
    """The most rows, `rows` at most, with which that many requests find one of `captures`.

    ladder: row counts of the captured graphs, ascending. A launch of all the requests that may run
    has none to spare for padding, so its rows have to be those of a graph. Where none can be found
    it is `rows`: the launch runs without a graph.
    """
    next_graph = bisect_left(ladder, rows)
    if next_graph < len(ladder):
        spare = min(ladder[next_graph], max_requests) - requests
        if ladder[next_graph] - rows <= spare * LONGEST_ROW:
            return rows
    below = ladder[next_graph - 1] if next_graph else 0
    # A graph of fewer rows than requests may run has room for as many requests as rows.
    return below if below >= requests else rows


def padded_starts(starts: Sequence[int], graph: GraphKey) -> list[int]:
    """Query start locations [graph.requests + 1] of a launch that fills `graph`.

    starts: those of its own requests, [R + 1], from 0. Padding requests share the rows that are
    left, LONGEST_ROW at most.

    Raises:
        ValueError: the launch does not fit the graph.
    """
    requests, rows = len(starts) - 1, int(starts[-1])
    if requests > graph.requests or rows > graph.rows:
        raise ValueError(f"{rows} rows of {requests} requests do not fit the {graph}")
    padding = Replay(graph, graph.rows - rows, graph.requests - requests)
    filled = [int(start) for start in starts]
    for length in padding_lengths(padding, LONGEST_ROW):
        filled.append(filled[-1] + length)
    return filled
