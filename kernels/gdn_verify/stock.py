"""When vllm-ascend's own recurrent operator answers right, and when it must not be called.

`_C_ascend.npu_recurrent_gated_delta_rule` (main, 2026-08-22) takes one slot per token, in a flat
list. vllm-ascend hands it the flattened [R, K + 1] table, so token t of the launch uses entry t:
right only while every request before it filled its K + 1 columns. And a core that meets a request
which accepted more tokens than it verifies now returns: that request and what the core had left
stay unwritten, without an error.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_ROWS = 16  # longer requests make the operator return


class StockOperatorError(ValueError):
    """Rows that the stock operator would answer wrong, silently."""


def stock_operator_obstacle(
    lengths: Sequence[int] | None, columns: int, accepted: Sequence[int] | None = None
) -> str | None:
    """Why the stock operator would be wrong on these rows; None if it is right.

    Args:
        lengths: rows of each request, 0 for padding; None if only the device knows them.
        columns: K + 1, the columns of the state table.
        accepted: tokens of each request that the previous step emitted; None if the host does not
            know them, then any number from 1 to `columns` is expected.
    """
    if lengths is None:
        return "the lengths are decided on the device, so the host cannot tell that they are equal"
    open_row: int | None = None
    for request, length in enumerate(lengths):
        if length <= 0:
            # It takes no entries of the flat list: whoever follows reads this request's slots.
            open_row = request if open_row is None else open_row
            continue
        if open_row is not None:
            return (
                f"request {open_row} has {max(lengths[open_row], 0)} rows of {columns}, so request "
                f"{request} would read and write its state slots"
            )
        if length > min(columns, MOST_ROWS):
            return (
                f"request {request} has {length} rows: the table has {columns} columns and the "
                f"operator stops at {MOST_ROWS} rows"
            )
        start = columns if accepted is None else accepted[request]
        if not 1 <= start <= length:
            return (
                f"request {request} may have accepted {start} tokens and has {length} rows: the "
                "operator would return without an answer"
            )
        if length < columns:
            open_row = request
    return None


def require_stock_operator(
    lengths: Sequence[int] | None, columns: int, accepted: Sequence[int] | None = None
) -> None:
    """Refuse rows that the stock operator would answer wrong; arguments as above.

    Raises:
        StockOperatorError: with the reason and what to use instead.
    """
    obstacle = stock_operator_obstacle(lengths, columns, accepted)
    if obstacle is not None:
        raise StockOperatorError(
            f"npu_recurrent_gated_delta_rule cannot run this step: {obstacle}. Use gdn_verify."
        )
