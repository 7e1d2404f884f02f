"""Registry of operators: one name for each, the implementation picked by device.

    from vllm_ascend_spec.kernels import ops
    ops.pack_rows(scores, budget, batch, out)
    ops.picked()      # {"pack_rows": Pick(implementation="triton", device="cuda", reason=...)}

`cuda` is compiled from csrc/cuda, `triton` serves CUDA and Ascend, `ascend` stands where a kernel
must differ there, `host` is C++ for CPU tensors, `naive` is the oracle in plain torch. Off the CPU
no implementation but `naive` waits for the host, and `naive` is picked there only where Triton is
missing, with a warning.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .draft_inputs import BlockShape, DraftBuffers, TargetStep
from .pack_rows import Batch, PackedRows

if TYPE_CHECKING:  # their modules import Triton
    from .gdn_verify.pages import FoldPlan
    from .gdn_verify.replay_cursor import Cursor

logger = logging.getLogger(__name__)


def _modules(package: str, function: str, *kinds: str, **others: str) -> dict[str, str]:
    """implementation -> "module:function"; `kinds` are modules of that name."""
    return {
        kind: f"{package}.{module}:{function}"
        for kind, module in {**{kind: kind for kind in kinds}, **others}.items()
    }


_DEVICE = ("naive", "triton", "ascend")
# operator -> implementation -> where it is. Those of one operator take the same arguments.
OPERATORS: dict[str, dict[str, str]] = {
    "pack_rows": _modules("pack_rows", "pack_rows", *_DEVICE, "cuda"),
    "max_softmax": _modules("max_softmax", "max_softmax", *_DEVICE),
    "max_softmax_partial": _modules("max_softmax", "max_softmax_partial", *_DEVICE),
    "combine_partials": _modules("max_softmax", "combine_partials", *_DEVICE),
    "draft_inputs": _modules("draft_inputs", "draft_inputs", *_DEVICE),
    "record_round": _modules("record_round", "record_round", "naive", "triton"),
    "conv_verify": _modules("conv_verify", "conv_verify", *_DEVICE, "host"),
    "gdn_verify": {
        "naive": "gdn_verify.raw_gates:naive_verify",
        "host": "gdn_verify.raw_gates:host_verify",
        "triton": "gdn_verify.triton:gdn_verify",
    },
    "replay_verify": _modules(
        "gdn_verify", "replay_verify", "cuda", naive="replay_naive", triton="replay"
    ),
    "replay_flush": _modules("gdn_verify", "replay_flush", naive="replay_naive", triton="replay"),
    "gated_norm": _modules(
        "gdn_verify", "gated_norm", naive="gated_norm_naive", triton="gated_norm"
    ),
    **{
        name: _modules("gdn_verify", name, naive="pages_naive", triton="pages")
        for name in ("plan_moves", "plan_settles", "fold_pages")
    },
}
PREFERENCE: dict[str, tuple[str, ...]] = {
    "cuda": ("cuda", "triton", "naive"),
    "npu": ("ascend", "triton", "naive"),
    "cpu": ("host", "naive"),
}


@dataclass(frozen=True)
class Pick:
    """What serves an operator on a device, and why nothing preferred to it does."""

    implementation: str
    device: str
    reason: str


_picks: dict[tuple[str, str], Pick] = {}
_overrides: dict[str, str] = {}


def picked() -> dict[str, Pick]:
    """What serves each operator that has been called, by name; the last device if several."""
    found = {operator: pick for (operator, _), pick in _picks.items()}
    forced = {name: Pick(kind, "any", "override") for name, kind in _overrides.items()}
    return found | forced


@contextmanager
def override(operator: str, implementation: str) -> Iterator[None]:
    """Run `operator` as `implementation` inside the block, on every device. For tests.

    ValueError if the operator is unknown or has no such implementation.
    """
    _load(operator, implementation)
    before = dict(_overrides)
    _overrides[operator] = implementation
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


def resolve(operator: str, device_type: str) -> Callable[..., Any]:
    """The function that serves `operator` on `cpu`, `cuda` or `npu`; ValueError if unknown."""
    if operator in _overrides:
        return _load(operator, _overrides[operator])
    return _preferred(operator, device_type)


@functools.cache
def _preferred(operator: str, device_type: str) -> Callable[..., Any]:
    passed_over: list[str] = []
    for implementation in PREFERENCE.get(device_type, ("naive",)):
        why_not = _unavailable(operator, implementation)
        if why_not is None:
            function = _load(operator, implementation)
            reason = "; ".join(passed_over) or "preferred"
            _picks[operator, device_type] = Pick(implementation, device_type, reason)
            slow = implementation == "naive" and device_type != "cpu"
            logger.log(
                logging.WARNING if slow else logging.INFO,
                "%s on %s runs as %s (%s)", operator, device_type, implementation, reason,
            )  # fmt: skip
            return function
        passed_over.append(why_not)
    raise ValueError(f"{operator} has no implementation for {device_type}: {passed_over}")


def _unavailable(operator: str, implementation: str) -> str | None:
    """Why the implementation cannot serve here, or None."""
    if operator not in OPERATORS:
        raise ValueError(f"unknown operator {operator!r}, known: {', '.join(OPERATORS)}")
    place = OPERATORS[operator].get(implementation)
    module = place and f"{__package__}.{place.partition(':')[0]}"
    if not module or importlib.util.find_spec(module) is None:
        return f"no {implementation} implementation"
    needs_triton = implementation in ("cuda", "triton", "ascend")
    if needs_triton and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if implementation == "cuda":
        return importlib.import_module(module).unavailable()
    return None


def _load(operator: str, implementation: str) -> Callable[..., Any]:
    why_not = _unavailable(operator, implementation)
    if why_not is not None:
        raise ValueError(f"{operator}: {implementation!r} cannot be used, {why_not}")
    module, _, function = OPERATORS[operator][implementation].partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), function)


def pack_rows(
    scores: torch.Tensor,
    budget: int | torch.Tensor,
    batch: Batch,
    out: PackedRows,
    **options: Any,
) -> PackedRows:
    """Best draft rows of the batch, packed into offsets; see `kernels.pack_rows`."""
    return resolve("pack_rows", scores.device.type)(scores, budget, batch, out, **options)


def max_softmax(logits: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(confidence, token) of each row of logits; see `kernels.max_softmax`."""
    return resolve("max_softmax", logits.device.type)(logits, **options)


def max_softmax_partial(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """What one vocabulary shard contributes, [3, N]; see `kernels.max_softmax`."""
    return resolve("max_softmax_partial", logits.device.type)(logits, **options)


def combine_partials(partials: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(confidence, token) from all shards' partials; see `kernels.max_softmax`."""
    return resolve("combine_partials", partials.device.type)(partials, **options)


def draft_inputs(step: TargetStep, shape: BlockShape, out: DraftBuffers) -> DraftBuffers:
    """Anchor, masks, positions and slots of a block drafter; see `kernels.draft_inputs`."""
    return resolve("draft_inputs", out.slots.device.type)(step, shape, out)


def record_round(confidence: torch.Tensor, *args: Any, **options: Any) -> None:
    """What ranking and host need of a drafting round; see `kernels.record_round`."""
    resolve("record_round", confidence.device.type)(confidence, *args, **options)


def conv_verify(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Causal convolution over ragged rows; see `kernels.conv_verify`."""
    return resolve("conv_verify", x.device.type)(x, *args, **options)


def gdn_verify(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Gated-delta-rule verification, a state column per row; see `kernels.gdn_verify.triton`.

    Gates are raw (a, b, A_log, dt_bias) on every device.
    """
    return resolve("gdn_verify", q.device.type)(q, *args, **options)


def replay_verify(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Gated-delta-rule verification, replay layout; see `kernels.gdn_verify.replay`."""
    return resolve("replay_verify", q.device.type)(q, *args, **options)


def replay_flush(slots: torch.Tensor, *args: Any, **options: Any) -> None:
    """Fold pending rows into the states; see `kernels.gdn_verify.replay`."""
    resolve("replay_flush", slots.device.type)(slots, *args, **options)


def gated_norm(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """The norm after the recurrence, with its gate; see `kernels.gdn_verify.gated_norm`."""
    return resolve("gated_norm", x.device.type)(x, *args, **options)


def plan_moves(cursor: Cursor, *args: Any) -> None:
    """Which states change their page before a step; see `kernels.gdn_verify.pages`."""
    resolve("plan_moves", cursor.pending.device.type)(cursor, *args)


def plan_settles(cursor: Cursor, *args: Any) -> None:
    """Which blocks a step filled; see `kernels.gdn_verify.pages`."""
    resolve("plan_settles", cursor.pending.device.type)(cursor, *args)


def fold_pages(plan: FoldPlan, *args: Any, **options: Any) -> None:
    """Carry such a plan out in all layers; see `kernels.gdn_verify.pages`."""
    resolve("fold_pages", plan.total.device.type)(plan, *args, **options)
