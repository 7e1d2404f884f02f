"""Measures the cost surface of a loaded engine with dummy steps, right after graph capture.

vLLM measures the forward pass at one context, with recurrent states that nobody reads, with as many
requests as the graph was captured for, and the LM head is free. Here a short and a long context are
timed, every dummy row has its state, the rows of a graph belong to all requests that it holds or to
the few that fill it with whole drafts, and the LM head is timed as well. What is still misjudged
is corrected while serving (`budget.residual`).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_ascend_spec.budget import surface as surfaces
from vllm_ascend_spec.budget.surface import (
    DrafterPoint,
    LogitsPoint,
    StepKind,
    Surface,
    SurfaceKey,
    TargetPoint,
)
from vllm_ascend_spec.errors import UserError

logger = logging.getLogger("vllm.ascend_spec.adaptive")

REPLAYS = 3
WARMUPS = 1
MAX_SIZES = 28  # of a ladder; the rest is interpolated on it
MAX_LENGTH_SIZES = 6  # the same, for draft lengths below K
CONTEXTS = (512, 8192)
PENDING_ROWS = 10  # of the replay layout's ring of 32: the mean between two flushes


@dataclass(frozen=True)
class Probe:
    """One dummy step: `rows` rows of `requests` requests, in a graph captured for `captured`.

    length: tokens drafted after it; None for all K.
    """

    rows: int
    requests: int
    context: int
    warmup: bool
    captured: int
    length: int | None = None

    @property
    def concentrated(self) -> bool:
        """Whether the rows go to fewer requests than vLLM's dummy step has."""
        return self.requests < self.captured

    def arguments(self, draft_tokens: int) -> dict[str, Any]:
        """Arguments of the runner's dummy run."""
        return {
            "num_tokens": self.rows,
            "context_len": self.context,
            "uniform_decode": self.captured * (draft_tokens + 1) == self.rows,
            # Without slots of their own, recurrent layers skip the states that they would read.
            "valid_dummy_state_slots": True,
            "randomize_inputs": True,  # equal tokens go to equal experts
        }


def thin(ladder: list[int], limit: int = MAX_SIZES) -> list[int]:
    """At most `limit` sizes of an ascending ladder, both ends kept, dense where sizes are small."""
    if len(ladder) <= limit:
        return ladder
    places = np.unique(np.rint((len(ladder) - 1) * np.linspace(0, 1, limit) ** 1.5).astype(int))
    return [ladder[i] for i in places]


def probes(
    ladder: list[int], draft_tokens: int, max_requests: int, max_rows: int, max_context: int,
    lengths: Sequence[int] = (),
) -> Iterator[Probe]:  # fmt: skip
    """Every dummy step to time, graphs first, then sizes that no graph covers.

    lengths: draft lengths below K to time as well, at a few sizes.
    """
    largest = ladder[-1] if ladder else 0
    beyond = sorted({min(largest * 3 // 2, max_rows), min(largest * 2, max_rows)} - {0, largest})
    contexts = sorted({min(c, max_context - draft_tokens - 1) for c in CONTEXTS})
    for context in contexts:
        for rows in thin(ladder):
            captured = min(rows, max_requests)
            for requests in _sharings(rows, draft_tokens + 1, max_requests):
                # One graph for all of them: it is warm after the first.
                warmups = WARMUPS if requests == captured else 0
                yield from _turns(rows, requests, context, captured, warmups=warmups)
        for rows in thin(ladder, MAX_LENGTH_SIZES) if lengths else ():
            requests = min(rows, max_requests)
            for length in lengths:
                yield from _turns(rows, requests, context, requests, length)
        for rows in beyond:
            for requests in sorted(_request_counts(rows, draft_tokens + 1, max_requests)):
                yield from _turns(rows, requests, context, requests)


def _turns(
    rows: int,
    requests: int,
    context: int,
    captured: int,
    length: int | None = None,
    warmups: int = WARMUPS,
) -> Iterator[Probe]:
    """One step, `warmups` times for nothing and then `REPLAYS` times to be timed."""
    for turn in range(warmups + REPLAYS):
        yield Probe(rows, requests, context, turn < warmups, captured, length)


def _sharings(rows: int, width: int, max_requests: int) -> list[int]:
    """Requests that a graph's rows are shared among, most first: one row each up to `width` each.

    Small graphs cost the same whoever has the rows.
    """
    shares = (1, 2, 4, width) if rows >= 2 * width else (1,)
    counts = {-(-rows // share) for share in shares}
    fitting = {min(n, max_requests) for n in counts if min(n, max_requests) * width >= rows}
    return sorted(fitting, reverse=True)


def _request_counts(rows: int, width: int, max_requests: int) -> set[int]:
    counts = {min(rows, max_requests)}
    if rows % width == 0 and rows // width <= max_requests:
        counts.add(rows // width)
    return counts


def concentrate(query_start_loc: torch.Tensor, rows: int, requests: int) -> None:
    """Give all rows of a dummy step to its first `requests` requests, evenly, in place.

    query_start_loc: int32 [R + 1]. The host's own copy stays, as in a step that is trimmed.
    """
    shares = torch.arange(1, query_start_loc.shape[0], device=query_start_loc.device)
    query_start_loc[1:] = shares.clamp(max=requests) * rows // requests


def measured_surface(
    runner: Any, ladder: list[int], planned: list[Probe], samples: list[Any]
) -> Surface:
    """The surface of a runner whose dummy runs `planned` gave `samples`, one each.

    Raises:
        UserError: a dummy run left no sample, so times and probes cannot be told apart.
    """
    if len(samples) != len(planned) or not samples:
        raise UserError(
            f"Adaptive verification measured {len(samples)} of {len(planned)} step costs. Give a "
            'measured file in ascend_spec.cost_surface, or set ascend_spec.planner to "vllm".'
        )
    began = time.monotonic()
    sizes = [rows for rows in thin(ladder) or [1] if rows <= runner.max_num_tokens]
    surface = build_surface(
        surface_key(runner, ladder, torch.cuda.get_device_name(runner.device)),
        list(zip(planned, samples, strict=True)),
        time_logits(runner, sizes),
        {"steps": len(samples), "replays": REPLAYS},
    )
    logger.info(
        "Cost surface: %d target, %d drafter, %d LM head points, graphs up to %d rows (LM head "
        "%.1f s)",
        len(surface.target),
        len(surface.drafter),
        len(surface.logits),
        ladder[-1] if ladder else 0,
        time.monotonic() - began,
    )
    return surface


def load_surface(runner: Any, ladder: list[int], path: Path) -> Surface:
    """A surface measured before; UserError where it was measured on another engine."""
    return surfaces.load(
        path, surface_key(runner, ladder, torch.cuda.get_device_name(runner.device))
    )


def build_surface(
    key: SurfaceKey,
    timed: list[tuple[Probe, Any]],
    logits: list[LogitsPoint],
    measured: dict[str, str | int | float],
) -> Surface:
    """Medians of the timed steps. timed: probes with vLLM's samples (forward_ms, drafter_ms, ...).

    Raises ValueError where nothing was timed.
    """
    target: dict[tuple[StepKind, int, int, int], list[float]] = defaultdict(list)
    drafter: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for probe, sample in timed:
        if probe.warmup:
            continue
        kind = StepKind.FULL if sample.full_cudagraph else StepKind.EAGER
        rows = sample.num_target_tokens
        requests = probe.requests if probe.concentrated else sample.num_reqs
        if probe.length is None:
            target[kind, rows, requests, probe.context].append(sample.forward_ms)
        if sample.full_cudagraph and not probe.concentrated:
            length = probe.length or key.draft_tokens
            drafter[length, requests, probe.context].append(sample.drafter_ms)
    return Surface(
        key=key,
        measured=measured,
        target=tuple(
            TargetPoint(kind=kind, rows=rows, requests=requests, context=context, ms=_median(times))
            for (kind, rows, requests, context), times in sorted(target.items())
        ),
        logits=tuple(logits),
        drafter=tuple(
            DrafterPoint(requests=requests, depth=length, context=context, ms=_median(times))
            for (length, requests, context), times in sorted(drafter.items())
        ),
    )


def _median(times: list[float]) -> float:
    return max(float(np.median(times)), 1e-4)


def spread_states(block_tables: Sequence[torch.Tensor], columns: int, blocks: int) -> None:
    """Give every row of a dummy request a block of its own, as far as the cache has them.

    block_tables: int32 [requests, columns or more] of each cache group, changed in place. The
    native GDN layout writes one state a row, into the block of that column.
    """
    for table in block_tables:
        width = min(columns, table.shape[1])
        rows = torch.arange(table.shape[0], dtype=torch.int32, device=table.device)
        places = rows[:, None] * width + torch.arange(width, dtype=torch.int32, device=table.device)
        table[:, :width] = 1 + places % max(blocks - 1, 1)


def time_logits(runner: Any, sizes: list[int]) -> list[LogitsPoint]:
    """LM head and one reading of the logits, as rejection sampling needs it, for each size."""
    config = runner.vllm_config.model_config
    width = config.get_hidden_size()
    points = []
    for rows in sizes:
        hidden = torch.zeros(rows, width, dtype=config.dtype, device=runner.device)
        times = []
        for _ in range(WARMUPS + REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            runner.model.compute_logits(hidden).float().max(dim=-1)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        points.append(LogitsPoint(rows=rows, ms=float(np.median(times[WARMUPS:]))))
    return points


def surface_key(runner: Any, ladder: list[int], device_name: str) -> SurfaceKey:
    """What the surface is valid for."""
    from vllm import __version__

    config = runner.vllm_config
    return SurfaceKey(
        model=str(config.model_config.model).rstrip("/").rpartition("/")[2],
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        device=device_name,
        engine=f"vllm {__version__}",
        method=str(config.speculative_config.method),
        draft_tokens=int(config.speculative_config.num_speculative_tokens),
        ranks=int(config.parallel_config.tensor_parallel_size),
        full_ladder=tuple(ladder),
        mixed_ladder=(),
        drafter_ladder=(),
    )
