"""What a user may set: `--additional-config '{"ascend_spec": {...}}'`. Imports no vLLM."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vllm_ascend_spec.errors import UserError

CONFIG_KEY = "ascend_spec"

CostPoint = tuple[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]]


class CpuOptions(BaseModel):
    """Options of the CPU engine, `ascend_spec.cpu`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    verify_cost_ms: list[CostPoint] = Field(
        default=[(1, 1.0), (8, 1.1), (16, 1.3), (24, 1.8), (40, 3.0), (64, 5.0)],
        min_length=2,
        description="Assumed cost in ms of a target step by its number of rows, as (rows, ms) "
        "points in rising order; a step costs what the next point costs. Nothing on a CPU can "
        "measure it.",
    )
    draft_cost_ms: list[CostPoint] = Field(
        default=[(1, 0.2), (8, 0.2)],
        min_length=2,
        description="Assumed cost in ms of one drafting pass by its number of requests.",
    )

    @field_validator("verify_cost_ms", "draft_cost_ms")
    @classmethod
    def _rising(cls, curve: list[CostPoint]) -> list[CostPoint]:
        sizes = [size for size, _ in curve]
        if sizes != sorted(set(sizes)):
            raise ValueError("sizes must rise from point to point")
        return curve


class Options(BaseModel):
    """The plugin's options, `ascend_spec`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    adaptive: bool | Literal["auto"] | None = Field(
        default=None,
        description="Let the verified length vary per request. auto: where method, device and "
        "configuration can do it, otherwise a fixed length, and the log says why. None leaves the "
        "choice to `enable_adaptive_verification` of the speculative config.",
    )
    confidence: Literal["auto", "head"] = Field(
        default="auto",
        description="Where adaptive verification takes its confidence from. auto: the drafter's "
        "confidence head where it has one, otherwise an estimate from the draft's softmax. head: "
        "the head, and a drafter without one is refused.",
    )
    cost_surface: str | None = Field(
        default=None,
        description="File of step costs measured on this engine, which adaptive verification "
        "plans with; without one, every draft token is verified.",
    )
    calibration: str | None = Field(
        default=None,
        description="File of a calibration that was learnt before, by the same method on the same "
        "model: confidences are right from the first step.",
    )
    save_calibration: str | None = Field(
        default=None,
        description="File that what is learnt while serving is written to, once a minute and at "
        "the end.",
    )
    planner: Literal["plugin", "vllm"] = Field(
        default="plugin",
        description="Who fixes how many draft tokens adaptive verification verifies: the plugin, "
        "or vLLM's own manager, for comparison.",
    )
    max_draft_rows: int | None = Field(
        default=None,
        ge=0,
        description="Most draft tokens that a step may verify over the whole batch.",
    )
    draft_lengths: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        description="Shorter draft lengths at which MTP and EAGLE-3 may be run, besides "
        "num_speculative_tokens: every token is a pass of theirs, and adaptive verification picks "
        "the length that pays.",
    )
    gdn_state: Literal["auto", "native", "replay"] = Field(
        default="auto",
        description="How speculation keeps the recurrent states of GDN layers. native: vLLM's "
        "K + 1 states a request. replay: one state and a ring of pending rows. auto: replay where "
        "it is timed to be faster and nothing stands against it, otherwise native; the log says "
        "which and why.",
    )
    cpu: CpuOptions = Field(default_factory=CpuOptions)

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> Options:
        """The options in vLLM's `additional_config`; the defaults where it has none of ours.

        Raises:
            UserError: an unknown key (the message names the nearest known one) or a bad value.
        """
        if not isinstance(additional_config, dict):
            return cls()
        _refuse_misspelt_section(additional_config)
        given = additional_config.get(CONFIG_KEY, {})
        if not isinstance(given, dict):
            raise UserError(
                f"--additional-config: {CONFIG_KEY} must be an object, for instance "
                f'{{"{CONFIG_KEY}": {{"adaptive": true}}}}.'
            )
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise UserError(_explain(error)) from None


def _refuse_misspelt_section(additional_config: dict[str, Any]) -> None:
    # Other platforms own other keys here, so only near misses are refused.
    if CONFIG_KEY in additional_config:
        return
    near = difflib.get_close_matches(CONFIG_KEY, map(str, additional_config), n=1, cutoff=0.8)
    if near:
        raise UserError(
            f"--additional-config: unknown key {near[0]!r}, did you mean {CONFIG_KEY!r}?"
        )


def _explain(error: ValidationError) -> str:
    # A value that fits no member of a union is reported once for each of them.
    first = {
        tuple(p["loc"][:1]) if p["loc"][:1] == ("adaptive",) else tuple(p["loc"]): p
        for p in reversed(error.errors())
    }
    return " ".join(_explain_one(problem) for problem in reversed(first.values()))


def _explain_one(problem: Any) -> str:
    path = [str(part) for part in problem["loc"]]
    if path[:1] == ["adaptive"]:
        return f'--additional-config: {CONFIG_KEY}.adaptive: must be true, false or "auto".'
    name = ".".join((CONFIG_KEY, *path))
    if problem["type"] != "extra_forbidden":
        return f"--additional-config: {name}: {problem['msg']}."
    model: type[BaseModel] = CpuOptions if path[:-1] == ["cpu"] else Options
    known = list(model.model_fields)
    near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
    hint = f", did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}."
    return f"--additional-config: unknown key {name!r}{hint}"
