"""How verified lengths reach attention on an NPU: three lanes, chosen by what is there.

vllm-ascend's attention takes the rows' lengths as lists on the host and plans its work from them,
so where lengths are decided, and what a graph can do with them, goes together:

L0  no FULL graph. The host reads this step's confidences, decides and launches: it waits for the
    drafter once a step, and in exchange decides with what it knows of these very drafts.
L1  FULL graphs. The host decides with confidences that are one step old, so it waits for nothing,
    and hands the lists to each captured attention by graph task update.
L2  lengths stay on the device: an attention operator takes them as tensors. No release of
    torch_npu has one; open pull requests of vllm-ascend would add it (#15215, #15336). Refused:
    the operators of today take a device tensor too, and wait for the stream once for each of its
    elements, which is L0 with more waits (`tests/npu/test_operator_calls.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_ascend_spec.budget.surface import HostCost, StepKind, Surface

_UPDATE_API = (
    "NPUGraph", "ExternalEvent", "graph_task_group_begin", "graph_task_group_end",
    "graph_task_update_begin", "graph_task_update_end",
)  # fmt: skip
# The planned operator and the one that plans for it, under torch.ops.custom.
_DEVICE_LENGTHS = (
    "npu_fused_infer_attention_score_v2_sink",
    "_npu_fused_infer_attention_score_v2_sink_metadata",
)


class Lane(str, Enum):
    """Where lengths are decided; see the module's docstring."""

    L0 = "L0"
    L1 = "L1"
    L2 = "L2"

    @property
    def age(self) -> int:
        """How many steps old the confidences are that decide a step's lengths."""
        return 1 if self is Lane.L1 else 0

    @property
    def waits_for_drafter(self) -> bool:
        """Whether a launch waits until the drafts before it are on the host."""
        return self is Lane.L0

    @property
    def graph(self) -> bool:
        """Whether a verification step replays a FULL graph."""
        return self is not Lane.L0

    def step_kind(self, in_prompt: bool) -> StepKind:
        """Which cost curve a launch lies on; in_prompt: prompt tokens are among its rows."""
        if in_prompt:
            return StepKind.MIXED
        return StepKind.FULL if self.graph else StepKind.EAGER


@dataclass(frozen=True)
class Features:
    """What this installation can do: missing parts of the update API, of the device operators."""

    missing_update_api: tuple[str, ...]
    missing_device_lengths: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """The lane, and why it is this one and not the next."""

    lane: Lane
    reason: str


def choose(features: Features, graphs: bool | None = None) -> Choice:
    """The highest lane that the installation and the engine's configuration allow.

    graphs: whether the engine captures FULL graphs of decode steps; None asks what it could do.
    """
    if graphs is False:
        return Choice(Lane.L0, "the engine captures no FULL graphs (cudagraph_mode, enforce_eager)")
    if features.missing_update_api:
        missing = ", ".join(features.missing_update_api)
        return Choice(Lane.L0, f"torch_npu cannot update captured tasks: no {missing}")
    if features.missing_device_lengths:
        missing = ", ".join(features.missing_device_lengths)
        return Choice(Lane.L1, f"attention takes lengths from the host: no operator {missing}")
    operators = ", ".join(_DEVICE_LENGTHS)
    return Choice(
        Lane.L1,
        f"lane L2 is refused: torch_npu has {operators}, which no vllm-ascend calls that this "
        "plugin was checked against",
    )


def priced(surface: Surface, lane: Lane) -> Surface:
    """The surface as steps of this lane cost.

    The host's own time is the shortest step that it can sustain, as long as it prepares a step
    while the device works on the one before. L0 prepares nothing before the drafts have arrived,
    and the device waits meanwhile: there the host's time is part of every step.
    """
    if not lane.waits_for_drafter:
        return surface
    host = HostCost(ms=surface.host.ms + surface.host.floor_ms)
    return surface.model_copy(update={"host": host})


def probe() -> Features:
    """Look at the installed torch_npu; imports it."""
    import torch
    import torch_npu

    npu, custom = torch_npu.npu, torch.ops.custom
    return Features(
        missing_update_api=tuple(name for name in _UPDATE_API if not hasattr(npu, name)),
        missing_device_lengths=tuple(n for n in _DEVICE_LENGTHS if not hasattr(custom, n)),
    )


def asks_for_graphs(vllm_config: object) -> bool:
    """Whether vLLM's configuration captures FULL graphs; vllm-ascend must have updated it."""
    mode = vllm_config.compilation_config.cudagraph_mode  # type: ignore[attr-defined]
    return bool(mode.has_full_cudagraphs())
