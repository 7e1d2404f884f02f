"""`vllm-ascend-spec profile`: the cost surface of an engine, as a file and as a page.

The engine is built as it would serve, with adaptive verification on; what it measures at start-up
is the surface. Give the file to later starts in `ascend_spec.cost_surface`, and they measure
nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_ascend_spec.budget import surface as surfaces
from vllm_ascend_spec.budget.confidence import cold_start
from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.surface import StepKind, Surface
from vllm_ascend_spec.engine import ascend_profile
from vllm_ascend_spec.engine.generate import Request, model_path, speculative_config
from vllm_ascend_spec.engine.launch import make_llm, model_runner, set_up
from vllm_ascend_spec.errors import UserError

REQUESTS = (1, 4, 16, 64, 128, 256)


def run(request: Request, out: Path, page: Path | None, engine: dict[str, Any]) -> int:
    """Measure, write `out` and perhaps `page`, print a table. Returns the exit status.

    engine: more arguments of `vllm.LLM`, such as `max_num_seqs`.

    Raises:
        UserError: a CPU, where there is nothing to measure, or a method without drafting.
    """
    platform = set_up(request.platform)
    if platform == "cpu":
        raise UserError(
            "profile: a CPU has no graphs whose time would say anything; the CPU engine plans with "
            "ascend_spec.cpu.verify_cost_ms. Run it on the machine that will serve."
        )
    config = speculative_config(request)
    if config is None:
        raise UserError("profile: nothing drafts. Give --method, and --draft where it needs one.")
    llm = make_llm(
        model_path(request.model),
        platform=request.platform,
        speculative_config=config,
        **engine,
    )
    surface = ascend_profile.measure(llm) if platform == "ascend" else measured_surface(llm)
    surfaces.save(surface, out)
    console = Console()
    console.print(table(surface))
    console.print(f"wrote {out}")
    if page is not None:
        from vllm_ascend_spec.engine.profile_page import write_page

        write_page(surface, page)
        console.print(f"wrote {page}")
    return 0


def engine_arguments(text: str) -> dict[str, Any]:
    """`--engine-args` as keyword arguments of `vllm.LLM`.

    Raises:
        UserError: not a JSON object.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"--engine-args is not JSON ({error}): {text!r}") from None
    if not isinstance(found, dict):
        raise UserError(f"--engine-args must be a JSON object, got {text!r}")
    return found


def measured_surface(llm: Any) -> Surface:
    """The surface of an engine in this process.

    Raises:
        UserError: the engine plans without one, or runs in another process.
    """
    if getattr(llm.llm_engine.engine_core, "engine_core", None) is None:
        raise UserError(
            "profile: the engine runs in a process of its own. Set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 for this command."
        )
    runner = model_runner(llm)
    surface: Surface | None = getattr(runner.adaptive_verification, "surface", None)
    if surface is None:
        raise UserError(
            "profile: the engine measured no step costs. Leave ascend_spec.planner at "
            '"plugin" and CUDA graphs on.'
        )
    return surface


def thresholds(surface: Surface, requests: int, context: float) -> list[float]:
    """The survival at which one more position pays, `G dC / C`, for positions 1..K.

    Every request verifies the same number of rows; survivals are the method's published ones. A
    position pays where its survival is above the threshold.
    """
    depth = surface.key.draft_tokens
    rows = requests * (depth + 1)
    cost = CostModel(surface, max(requests, 1), max(rows, 2 * max(p.rows for p in surface.target)))
    method = surface.key.method
    chances = cold_start(method if method != "eagle" else "eagle3", depth)
    device = cost.verify(StepKind.FULL, requests, requests, requests * depth, requests, context)
    drafting = cost.drafter.prices(depth, context).item(requests)
    found = []
    survival, tokens = 1.0, 1.0
    for position in range(depth):
        before = device.item(position * requests) + drafting
        after = device.item((position + 1) * requests) + drafting
        found.append(tokens * (after - before) / before)
        survival *= float(chances[position])
        tokens += survival
    return found


def table(surface: Surface) -> Table:
    """Times of a step by batch size, and the threshold of each position."""
    depth = surface.key.draft_tokens
    context = float(min(p.context for p in surface.target))
    title = f"{surface.key.model}, {surface.key.method}, K = {depth}, {context:.0f} tokens"
    shown = Table(title=title)
    for name in ("requests", "no drafts ms", "all drafts ms", "drafting ms"):
        shown.add_column(name, justify="right")
    for position in range(1, depth + 1):
        shown.add_column(f"p{position}", justify="right")
    largest = max(p.requests for p in surface.target)
    for requests in (r for r in REQUESTS if r <= largest):
        cost = CostModel(surface, largest, 2 * max(p.rows for p in surface.target))
        device = cost.verify(StepKind.FULL, requests, requests, requests * depth, requests, context)
        shown.add_row(
            str(requests),
            f"{device.item(0) / 1e6:.2f}",
            f"{device.item(requests * depth) / 1e6:.2f}",
            f"{cost.drafter.prices(depth, context).item(requests) / 1e6:.2f}",
            *(f"{t:.2f}" for t in thresholds(surface, requests, context)),
        )
    return shown
