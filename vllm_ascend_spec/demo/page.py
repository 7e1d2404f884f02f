"""The demo's page: one HTML file that needs no network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import plotly.graph_objects as go
from jinja2 import Environment
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from vllm_ascend_spec.demo import plots, table
from vllm_ascend_spec.demo.arms import REFERENCE
from vllm_ascend_spec.demo.records import AnswerRecord, ArmRecord, Report, StepRecord

ADAPTIVE = "-adaptive"
SHOWN_PROMPTS = 5
TURN_MARK = re.compile(r"<\|im_start\|>(?:user|assistant)\n|<\|im_end\|>\n?")


@dataclass(frozen=True)
class StepView:
    """What one step added to an answer: accepted draft tokens, then the target's own token."""

    draft: str
    target: str
    rejected: str
    tip: str


@dataclass(frozen=True)
class AnswerView:
    title: str
    arm: str
    summary: str
    prefill: str
    steps: list[StepView]


@dataclass(frozen=True)
class PromptView:
    id: str
    kind: str
    question: str
    answers: list[AnswerView]


@dataclass(frozen=True)
class Tile:
    """One figure at the head of the page."""

    value: str
    label: str


def render(report: Report) -> str:
    """The page as text, plotly's script inlined."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(asset("page.html"))
    return template.render(
        report=report,
        tiles=tiles(report),
        rows=[(row, [cell.plain for cell in table.cells(row)]) for row in report.rows],
        figures=figures(report),
        prompts=prompt_views(report),
        css=Markup(asset("page.css")),
        script=Markup(asset("page.js")),
        plotly=Markup(get_plotlyjs()),
    )


def asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def tiles(report: Report) -> list[Tile]:
    """The figures a reader looks for first, of this run only."""
    ran = [row for row in report.rows if row.status == "ok"]
    drafting = [row for row in ran if row.drafted and row.acceptance_length]
    found = []
    if drafting:
        best = max(drafting, key=lambda row: row.acceptance_length or 0.0)
        found.append(
            Tile(f"{best.acceptance_length:.2f}", f"tokens a step with {best.title}, the longest")
        )
    for row in drafting:
        if row.arm.endswith(ADAPTIVE):
            trimmed = table.share(row.trimmed, row.drafted)
            found.append(Tile(trimmed, f"of {row.title}'s draft tokens left unverified"))
    compared = [row.agreement for row in ran if row.agreement is not None]
    if compared:
        total = sum(a.equal + a.near_tie + a.real for a in compared)
        real = sum(a.real for a in compared)
        found.append(
            Tile(f"{real} of {total}", "answers really differ from those without speculation")
        )
    answers, valid = sum(row.json_answers for row in ran), sum(row.json_valid for row in ran)
    if answers:
        found.append(Tile(table.share(valid, answers), f"of {answers} JSON answers parse"))
    return found


def figures(report: Report) -> dict[str, Markup]:
    """Plots by name as JSON that is safe inside a script element."""
    adaptive = [arm for arm in report.arms if arm.name.endswith(ADAPTIVE)]
    pair = [arm for arm in report.arms if arm.name.removesuffix(ADAPTIVE) in _bases(adaptive)]
    made: dict[str, go.Figure] = {}
    if any(row.positions for row in report.rows):
        made["acceptance"] = plots.acceptance(report.rows)
    if adaptive:
        made["verified"] = plots.verified_lengths(adaptive[0])
        made["shares"] = plots.length_shares(report.rows, pair)
    if any(row.reliability for row in report.rows):
        made["reliability"] = plots.reliability(report.rows)
        made["auc"] = plots.auc(report.rows)
    return {name: _script_json(figure) for name, figure in made.items()}


def _bases(adaptive: Sequence[ArmRecord]) -> set[str]:
    return {arm.name.removesuffix(ADAPTIVE) for arm in adaptive}


def _script_json(figure: go.Figure) -> Markup:
    return Markup(figure.to_json().replace("<", "\\u003c"))


def prompt_views(report: Report) -> list[PromptView]:
    """The first prompts of the run with every arm's answer."""
    titles = {row.arm: row.title for row in report.rows}
    views = []
    for prompt in report.prompts[:SHOWN_PROMPTS]:
        found = [
            answer_view(arm.name, titles[arm.name], answer)
            for arm in report.arms
            for answer in arm.answers
            if answer.prompt_id == prompt.id
        ]
        views.append(PromptView(prompt.id, prompt.kind, question(prompt.text), found))
    return views


def question(prompt: str) -> str:
    """The user's words of a chat-templated prompt."""
    return TURN_MARK.sub("", prompt).strip()


def answer_view(arm: str, title: str, answer: AnswerRecord) -> AnswerView:
    """Split an answer into its steps."""
    at = answer.prefill_tokens
    steps = []
    for step in answer.steps:
        drafted = min(step.accepted, step.emitted)
        pieces = answer.pieces[at : at + step.emitted]
        at += step.emitted
        steps.append(
            StepView(
                draft="".join(pieces[:drafted]),
                target="".join(pieces[drafted:]),
                rejected=step.rejected_text or "",
                tip=_tip(step),
            )
        )
    tokens = len(answer.token_ids) - answer.prefill_tokens
    plural = "" if len(steps) == 1 else "s"
    summary = f"{tokens} tokens in {len(steps)} step{plural}"
    if steps and arm != REFERENCE:
        summary += f", {tokens / len(steps):.2f} a step"
    return AnswerView(title, arm, summary, "".join(answer.pieces[: answer.prefill_tokens]), steps)


def _tip(step: StepRecord) -> str:
    if not step.drafted:
        return "no draft"
    tip = f"drafted {step.drafted}, verified {step.verified}, accepted {step.accepted}"
    if step.confidence:
        tip += "; confidence " + " ".join(f"{value:.2f}" for value in step.confidence)
    return tip
