"""The page's plots as plotly figures. Colours that depend on the theme are set by the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from vllm_ascend_spec.demo.records import ArmRecord, ArmRow

# Told apart in both themes and with the common colour blindnesses; symbols differ as well.
COLOURS = {
    "ngram": "#8b93a1",
    "mtp": "#d9820b",
    "eagle3": "#0f9d8a",
    "dflash": "#3b82f6",
    "dspark": "#8b5cf6",
    "dspark-adaptive": "#c026d3",
    "dflash2": "#e0417f",
}
SYMBOLS = {
    "ngram": "x",
    "mtp": "triangle-up",
    "eagle3": "square",
    "dflash": "diamond",
    "dspark": "circle",
    "dspark-adaptive": "circle-open",
    "dflash2": "star",
}
VERIFIED_SCALE = [
    [0.0, "#e2e4ea"],
    [0.15, "#c9d5f7"],
    [0.5, "#7d9bf0"],
    [1.0, "#4527a0"],
]


def acceptance(rows: Sequence[ArmRow]) -> go.Figure:
    """Acceptance by draft position: given that the position was reached, and of all drafts."""
    figure = make_subplots(
        cols=2,
        subplot_titles=("accepted, given all before it were", "accepted up to here (survival)"),
        horizontal_spacing=0.09,
    )
    for row in _with_positions(rows):
        for column, values in ((1, "rate"), (2, "survival")):
            figure.add_trace(_position_line(row, values, show_legend=column == 1), 1, column)
    _position_axes(figure, rows, (1, 2))
    figure.update_yaxes(range=[0, 1.03], tickformat=".0%")
    return figure


def _position_line(row: ArmRow, values: str, show_legend: bool) -> go.Scatter:
    return go.Scatter(
        x=[position.position for position in row.positions],
        y=[getattr(position, values) for position in row.positions],
        customdata=[[position.accepted, position.reached] for position in row.positions],
        name=row.title,
        legendgroup=row.arm,
        showlegend=show_legend,
        mode="lines+markers",
        line={"color": COLOURS[row.arm], "width": 2.5, "dash": _dash(row.arm)},
        marker={"size": 8, "symbol": SYMBOLS[row.arm]},
        hovertemplate=(
            f"<b>{row.title}</b><br>position %{{x}}: %{{y:.1%}}"
            "<br>%{customdata[0]} accepted of %{customdata[1]} reached<extra></extra>"
        ),
    )


def verified_lengths(record: ArmRecord) -> go.Figure:
    """One row a request, one column an engine step: how many draft tokens were verified."""
    steps = sorted({s.engine_step for answer in record.answers for s in answer.steps})
    column = {step: number for number, step in enumerate(steps)}
    lengths: list[list[int | None]] = [[None] * len(steps) for _ in record.answers]
    details: list[list[str]] = [[""] * len(steps) for _ in record.answers]
    for line, answer in enumerate(record.answers):
        for step in answer.steps:
            at = column[step.engine_step]
            lengths[line][at] = step.verified
            details[line][at] = f"drafted {step.drafted}, accepted {step.accepted}"
    figure = make_subplots(
        rows=2,
        row_heights=[0.72, 0.28],
        shared_xaxes=True,
        vertical_spacing=0.06,
    )
    figure.add_trace(_length_heatmap(record, lengths, details), 1, 1)
    rows_in_step = [sum(x or 0 for x in column_) for column_ in zip(*lengths, strict=True)]
    figure.add_trace(
        go.Bar(
            y=rows_in_step,
            marker={"color": COLOURS["dspark-adaptive"]},
            hovertemplate="step %{x}: %{y} draft tokens verified<extra></extra>",
        ),
        2,
        1,
    )
    figure.update_yaxes(autorange="reversed", showticklabels=False, title="requests", row=1, col=1)
    figure.update_yaxes(title="draft tokens", row=2, col=1)
    figure.update_xaxes(title="engine step", row=2, col=1)
    figure.update_layout(height=460, showlegend=False, bargap=0.1)
    return figure


def _length_heatmap(
    record: ArmRecord, lengths: list[list[int | None]], details: list[list[str]]
) -> go.Heatmap:
    return go.Heatmap(
        z=lengths,
        y=[answer.prompt_id for answer in record.answers],
        customdata=details,
        colorscale=VERIFIED_SCALE,
        zmin=0,
        xgap=1,
        ygap=1,
        hoverongaps=False,
        colorbar={"title": "verified", "thickness": 12, "len": 0.72, "y": 0.64},
        hovertemplate="%{y}, step %{x}<br>verified %{z}, %{customdata}<extra></extra>",
    )


def length_shares(rows: Sequence[ArmRow], records: Sequence[ArmRecord]) -> go.Figure:
    """How often each number of draft tokens was verified, and how often accepted."""
    figure = make_subplots(
        cols=2,
        subplot_titles=("verified a step", "accepted a step"),
        horizontal_spacing=0.09,
    )
    titles = {row.arm: row.title for row in rows}
    for record in records:
        steps = [step for answer in record.answers for step in answer.steps]
        for column, values in ((1, "verified"), (2, "accepted")):
            figure.add_trace(
                go.Histogram(
                    x=[getattr(step, values) for step in steps],
                    histnorm="probability",
                    name=titles[record.name],
                    legendgroup=record.name,
                    showlegend=column == 1,
                    xbins={"start": -0.5, "size": 1},
                    marker={"color": COLOURS[record.name]},
                    hovertemplate="%{x} draft tokens: %{y:.1%} of steps<extra></extra>",
                ),
                1,
                column,
            )
    figure.update_xaxes(title="draft tokens", dtick=1)
    figure.update_yaxes(tickformat=".0%", row=1, col=1)
    figure.update_yaxes(tickformat=".0%", row=1, col=2)
    return figure


def reliability(rows: Sequence[ArmRow]) -> go.Figure:
    """Confidence against what came true; below, how many draft tokens each bin holds."""
    figure = make_subplots(rows=2, row_heights=[0.72, 0.28], shared_xaxes=True)
    figure.add_trace(
        go.Scatter(
            x=[0, 1],
            y=[0, 1],
            mode="lines",
            name="perfect",
            line={"dash": "dot", "color": "#8b93a1", "width": 1.5},
            hoverinfo="skip",
        ),
        1,
        1,
    )
    for row in rows:
        filled = [row_bin for row_bin in row.reliability if row_bin.count]
        if not filled:
            continue
        figure.add_trace(_reliability_line(row, filled), 1, 1)
        figure.add_trace(
            go.Bar(
                x=[(row_bin.low + row_bin.high) / 2 for row_bin in row.reliability],
                y=[row_bin.count for row_bin in row.reliability],
                name=row.title,
                legendgroup=row.arm,
                showlegend=False,
                marker={"color": COLOURS[row.arm]},
                hovertemplate=f"{row.title}: %{{y}} draft tokens<extra></extra>",
            ),
            2,
            1,
        )
    figure.update_yaxes(title="accepted", range=[0, 1.03], tickformat=".0%", row=1, col=1)
    figure.update_yaxes(title="count", row=2, col=1)
    figure.update_xaxes(title="confidence", range=[0, 1], tickformat=".1f", row=2, col=1)
    figure.update_layout(height=470)
    return figure


def _reliability_line(row: ArmRow, filled: Sequence[Any]) -> go.Scatter:
    largest = max(row_bin.count for row_bin in filled)
    return go.Scatter(
        x=[row_bin.confidence for row_bin in filled],
        y=[row_bin.accepted for row_bin in filled],
        customdata=[row_bin.count for row_bin in filled],
        name=f"{row.title} ({row.confidence_source})",
        legendgroup=row.arm,
        mode="lines+markers",
        line={"color": COLOURS[row.arm], "width": 2, "dash": _dash(row.arm)},
        marker={
            "size": [6 + 14 * (row_bin.count / largest) ** 0.5 for row_bin in filled],
            "symbol": SYMBOLS[row.arm],
            "opacity": 0.9,
        },
        hovertemplate=(
            f"<b>{row.title}</b><br>confidence %{{x:.2f}}: %{{y:.1%}} accepted"
            "<br>%{customdata} draft tokens<extra></extra>"
        ),
    )


def auc(rows: Sequence[ArmRow]) -> go.Figure:
    """AUC of the confidence at each draft position."""
    figure = make_subplots()
    for row in _with_positions(rows):
        if any(position.auc is not None for position in row.positions):
            figure.add_trace(
                go.Scatter(
                    x=[position.position for position in row.positions],
                    y=[position.auc for position in row.positions],
                    customdata=[
                        [position.accepted, position.reached] for position in row.positions
                    ],
                    name=f"{row.title} ({row.confidence_source})",
                    mode="lines+markers",
                    line={"color": COLOURS[row.arm], "width": 2.5, "dash": _dash(row.arm)},
                    marker={"size": 8, "symbol": SYMBOLS[row.arm]},
                    hovertemplate=(
                        f"<b>{row.title}</b><br>position %{{x}}: AUC %{{y:.3f}}"
                        "<br>%{customdata[0]} accepted of %{customdata[1]}<extra></extra>"
                    ),
                )
            )
    figure.add_hline(y=0.5, line={"dash": "dot", "color": "#8b93a1"})
    _position_axes(figure, rows, (1,))
    known = [p.auc for row in rows for p in row.positions if p.auc is not None]
    figure.update_yaxes(title="AUC", range=[min([0.45, *known]) - 0.05, 1.03])
    figure.update_layout(height=470)
    return figure


def _with_positions(rows: Sequence[ArmRow]) -> list[ArmRow]:
    return [row for row in rows if row.positions]


def _position_axes(figure: go.Figure, rows: Sequence[ArmRow], columns: Sequence[int]) -> None:
    last = max((len(row.positions) for row in rows), default=1)
    for column in columns:
        figure.update_xaxes(
            title="draft position", dtick=1, range=[0.7, last + 0.3], row=1, col=column
        )


def _dash(arm: str) -> str:
    return "dash" if arm.endswith("-adaptive") else "solid"
