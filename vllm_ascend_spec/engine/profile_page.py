"""The cost surface as one self-contained HTML page: measured points, what the planner makes of
them, and the thresholds by position."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.surface import StepKind, Surface
from vllm_ascend_spec.engine.profile import REQUESTS, thresholds

TITLES = (
    "Target pass by rows",
    "Drafting and LM head",
    "Survival above which a position pays",
)


def write_page(surface: Surface, page: Path) -> None:
    """Write `page`; plotly is inlined, nothing is fetched."""
    figure = make_subplots(rows=1, cols=3, subplot_titles=TITLES)
    _target(surface, figure)
    _drafter(surface, figure)
    _thresholds(surface, figure)
    figure.update_layout(
        title=f"Step costs of {surface.key.model} on {surface.key.device}, "
        f"{surface.key.method} with K = {surface.key.draft_tokens}",
        height=520,
        template="plotly_white",
    )
    page.write_text(figure.to_html(include_plotlyjs=True), encoding="utf-8")


def _target(surface: Surface, figure: go.Figure) -> None:
    for context in sorted({p.context for p in surface.target}):
        for kind, symbol in ((StepKind.FULL, "circle"), (StepKind.EAGER, "x")):
            points = [p for p in surface.target if p.context == context and p.kind is kind]
            if points:
                figure.add_scatter(
                    x=[p.rows for p in points],
                    y=[p.ms for p in points],
                    mode="markers",
                    marker_symbol=symbol,
                    name=f"{kind.value}, {context} tokens",
                    row=1,
                    col=1,
                )
        _priced(surface, context, figure)
    figure.update_xaxes(title="rows", row=1, col=1)
    figure.update_yaxes(title="ms", rangemode="tozero", row=1, col=1)


def _priced(surface: Surface, context: int, figure: go.Figure) -> None:
    largest = max(p.rows for p in surface.target)
    requests = min(16, max(p.requests for p in surface.target))
    cost = CostModel(surface, requests, largest)
    rows = list(range(requests, largest + 1))
    device = cost.verify(StepKind.FULL, requests, 0, largest - requests, requests, float(context))
    figure.add_scatter(
        x=rows,
        y=[price / 1e6 for price in device.tolist()],
        mode="lines",
        line_shape="hv",
        name=f"priced, {requests} requests, {context} tokens",
        row=1,
        col=1,
    )


def _drafter(surface: Surface, figure: go.Figure) -> None:
    for context in sorted({p.context for p in surface.drafter}):
        points = [p for p in surface.drafter if p.context == context]
        figure.add_scatter(
            x=[p.requests for p in points],
            y=[p.ms for p in points],
            mode="lines+markers",
            name=f"drafting, {context} tokens, by requests",
            row=1,
            col=2,
        )
    figure.add_scatter(
        x=[p.rows for p in surface.logits],
        y=[p.ms for p in surface.logits],
        mode="lines+markers",
        name="LM head, by rows",
        row=1,
        col=2,
    )
    figure.update_xaxes(title="requests or rows", row=1, col=2)


def _thresholds(surface: Surface, figure: go.Figure) -> None:
    largest = max(p.requests for p in surface.target)
    context = float(min(p.context for p in surface.target))
    positions = list(range(1, surface.key.draft_tokens + 1))
    for requests in (r for r in REQUESTS if r <= largest):
        figure.add_scatter(
            x=positions,
            y=thresholds(surface, requests, context),
            mode="lines+markers",
            name=f"{requests} requests",
            row=1,
            col=3,
        )
    figure.update_xaxes(title="position", row=1, col=3)
    figure.update_yaxes(title="G dC / C", rangemode="tozero", row=1, col=3)
