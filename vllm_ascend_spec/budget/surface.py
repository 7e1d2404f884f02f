"""The cost surface: measured step times as a file that a person can read, plot, diff and carry.

JSON, one measured point a line, sorted, times in milliseconds with four decimals. Its key says
what it was measured on; a surface with another key is refused, since a plan made with it would be
confidently wrong.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from vllm_ascend_spec.errors import UserError


class StepKind(str, Enum):
    """How the target's forward pass is launched: each has a cost curve of its own."""

    FULL = "full"  # decode and verify rows only, replayed from a FULL graph
    MIXED = "mixed"  # prefill beside decode rows: piecewise graphs
    EAGER = "eager"  # no graph of that size


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _sorted_sizes(sizes: object) -> object:
    return tuple(sorted(set(sizes))) if isinstance(sizes, (list, tuple, set)) else sizes


Ladder = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_sorted_sizes), Field(default=())
]


class SurfaceKey(_Frozen):
    """What a surface is valid for. Ladders are captured graph sizes in rows, ascending."""

    model: str
    dtype: str
    device: str
    engine: str
    method: str
    draft_tokens: int = Field(ge=1)
    ranks: int = Field(default=1, ge=1)
    full_ladder: Ladder
    mixed_ladder: Ladder
    drafter_ladder: Ladder


class TargetPoint(_Frozen):
    """One target forward: rows in the launch (padding included), requests, mean context tokens."""

    kind: StepKind
    rows: int = Field(ge=1)
    requests: int = Field(ge=1)
    context: int = Field(ge=0)
    ms: float = Field(gt=0, allow_inf_nan=False)


class DrafterPoint(_Frozen):
    """Drafting `depth` tokens for `requests` requests, its LM head included."""

    kind: Literal[StepKind.FULL, StepKind.EAGER] = StepKind.FULL
    requests: int = Field(ge=1)
    depth: int = Field(ge=1)
    context: int = Field(ge=0)
    ms: float = Field(gt=0, allow_inf_nan=False)


class LogitsPoint(_Frozen):
    """LM head, sampling and rejection over `rows` logits rows."""

    rows: int = Field(ge=1)
    ms: float = Field(ge=0, allow_inf_nan=False)


class HostCost(_Frozen):
    """What the host adds to every step, and the shortest step it can sustain."""

    ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    floor_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class Surface(_Frozen):
    """A measured cost surface. `drafter_rows` = rows of one drafting pass a request (K or K+1)."""

    format: Literal[1] = 1
    key: SurfaceKey
    measured: dict[str, str | int | float] = Field(default_factory=dict)
    drafter_rows: int = Field(default=1, ge=0)
    host: HostCost = HostCost()
    target: tuple[TargetPoint, ...] = Field(min_length=1)
    logits: tuple[LogitsPoint, ...] = ()
    drafter: tuple[DrafterPoint, ...] = ()

    @model_validator(mode="after")
    def _points_lie_on_the_ladders(self) -> Surface:
        ladders = {StepKind.FULL: self.key.full_ladder, StepKind.MIXED: self.key.mixed_ladder}
        for point in self.target:
            ladder = ladders.get(point.kind, ())
            if ladder and point.rows not in ladder and point.rows <= ladder[-1]:
                # Its time would be that of the next larger graph, filed under the wrong size.
                raise ValueError(
                    f"{point.kind.value} point at {point.rows} rows, no graph has them"
                )
        return self

    def warnings(self, max_requests: int) -> list[str]:
        """What the engine should say at start-up about sizes that no graph covers."""
        notes = []
        widest = max_requests * (self.key.draft_tokens + 1)
        if widest not in self.key.full_ladder:
            larger = [size for size in self.key.full_ladder if size > widest]
            priced = f"padded to {larger[0]}" if larger else "run and priced as eager"
            notes.append(
                f"no FULL graph of {widest} rows ({max_requests} requests x "
                f"{self.key.draft_tokens + 1}): the widest verify step is {priced}; "
                f"add {widest} to cudagraph_capture_sizes"
            )
        if not any(point.kind is StepKind.EAGER for point in self.target):
            notes.append("no eager point measured: sizes without a graph are never chosen")
        return notes


def save(surface: Surface, path: Path) -> None:
    """Write `path`: rounded, sorted, one point a line, so that two surfaces diff line by line."""
    path.write_text(dumps(surface), encoding="utf-8")


def dumps(surface: Surface) -> str:
    data = surface.model_dump(mode="json")
    points = {name: data.pop(name) for name in ("target", "logits", "drafter")}
    # Ladders stay on one line each: a changed size is one changed line.
    head = [f'  "{name}": {json.dumps(value)}' for name, value in data.items() if name != "key"]
    key = ",\n".join(f'    "{name}": {json.dumps(value)}' for name, value in data["key"].items())
    blocks = [*head[:1], f'  "key": {{\n{key}\n  }}', *head[1:]]
    blocks += [f'  "{name}": {_lines(rows)}' for name, rows in points.items()]
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _lines(points: list[dict[str, Any]]) -> str:
    rounded = [{**point, "ms": round(point["ms"], 4)} for point in points]
    rounded.sort(key=lambda point: tuple(v for k, v in point.items() if k != "ms"))
    if not rounded:
        return "[]"
    return "[\n" + ",\n".join(f"    {json.dumps(point)}" for point in rounded) + "\n  ]"


def load(path: Path, expected: SurfaceKey | None = None) -> Surface:
    """Read a surface; UserError when it cannot be read, is malformed or was measured elsewhere."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cost surface {path}: {error}. {_MEND}") from None
    try:
        surface = Surface.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "file"
        raise UserError(f"cost surface {path}: {place}: {first['msg']}. {_MEND}") from None
    if expected is not None:
        require_key(surface, expected, str(path))
    return surface


def require_key(surface: Surface, expected: SurfaceKey, source: str) -> None:
    """UserError that names every part of the key that differs."""
    differing = [
        f"{name} is {_brief(here)} here and {_brief(there)} in the surface"
        for name in SurfaceKey.model_fields
        if (here := getattr(expected, name)) != (there := getattr(surface.key, name))
    ]
    if differing:
        raise UserError(
            f"cost surface {source} was measured elsewhere: {'; '.join(differing)}. {_MEND}"
        )


def _brief(value: object) -> str:
    if isinstance(value, tuple) and len(value) > 12:
        return f"{len(value)} sizes {list(value[:4])}..{list(value[-2:])}"
    return repr(list(value) if isinstance(value, tuple) else value)


_MEND = "Measure one with `vllm-ascend-spec profile`, or drop the option `cost_surface`"
