"""Registry of operators: one name for each, the implementation picked by device.

    from vllm_ascend_spec.kernels import ops
    ops.pack_rows(scores, budget, batch, out)
    ops.picked()      # {"pack_rows": Pick(implementation="triton", device="cuda", reason=...)}

`triton` serves CUDA and Ascend, `ascend` stands where a kernel must differ there, `host` is C++ for
CPU tensors, `naive` is the oracle in plain torch. Off the CPU no implementation but `naive` waits
for the host, and `naive` is picked there only where Triton is missing, with a warning.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .draft_inputs import BlockShape, DraftBuffers, TargetStep
from .pack_rows import Batch, PackedRows

logger = logging.getLogger(__name__)

# operator -> (package, function); an implementation is the package's module of that name
OPERATORS: dict[str, tuple[str, str]] = {
    "pack_rows": ("pack_rows", "pack_rows"),
    "max_softmax": ("max_softmax", "max_softmax"),
    "max_softmax_partial": ("max_softmax", "max_softmax_partial"),
    "combine_partials": ("max_softmax", "combine_partials"),
    "draft_inputs": ("draft_inputs", "draft_inputs"),
    "gdn_verify": ("gdn_verify", "gdn_verify"),
    "conv_verify": ("conv_verify", "conv_verify"),
}
PREFERENCE: dict[str, tuple[str, ...]] = {
    "cuda": ("triton", "naive"),
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


def resolve(operator: str, device: torch.device) -> Callable[..., Any]:
    """The function that serves `operator` on `device`; ValueError for an unknown operator."""
    if operator in _overrides:
        return _load(operator, _overrides[operator])
    return _preferred(operator, device.type)


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
    package, function = _entry(operator)
    if importlib.util.find_spec(f"{__package__}.{package}.{implementation}") is None:
        return f"no {implementation} implementation"
    if implementation in ("triton", "ascend") and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not hasattr(_module(package, implementation), function):
        return f"no {implementation} implementation"
    return None


def _entry(operator: str) -> tuple[str, str]:
    if operator not in OPERATORS:
        raise ValueError(f"unknown operator {operator!r}, known: {', '.join(OPERATORS)}")
    return OPERATORS[operator]


def _module(package: str, implementation: str) -> Any:
    return importlib.import_module(f"{__package__}.{package}.{implementation}")


def _load(operator: str, implementation: str) -> Callable[..., Any]:
    why_not = _unavailable(operator, implementation)
    if why_not is not None:
        raise ValueError(f"{operator}: {implementation!r} cannot be used, {why_not}")
    package, function = _entry(operator)
    return getattr(_module(package, implementation), function)


def pack_rows(
    scores: torch.Tensor,
    budget: int | torch.Tensor,
    batch: Batch,
    out: PackedRows,
    **options: Any,
) -> PackedRows:
    """Best draft rows of the batch, packed into offsets; see `kernels.pack_rows`."""
    return resolve("pack_rows", scores.device)(scores, budget, batch, out, **options)


def max_softmax(logits: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(confidence, token) of each row of logits; see `kernels.max_softmax`."""
    return resolve("max_softmax", logits.device)(logits, **options)


def max_softmax_partial(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """What one vocabulary shard contributes, [3, N]; see `kernels.max_softmax`."""
    return resolve("max_softmax_partial", logits.device)(logits, **options)


def combine_partials(partials: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(confidence, token) from all shards' partials; see `kernels.max_softmax`."""
    return resolve("combine_partials", partials.device)(partials, **options)


def draft_inputs(step: TargetStep, shape: BlockShape, out: DraftBuffers) -> DraftBuffers:
    """Anchor, masks, positions and slots of a block drafter; see `kernels.draft_inputs`."""
    return resolve("draft_inputs", out.slots.device)(step, shape, out)


def gdn_verify(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Gated-delta-rule verification over ragged rows; see `kernels.gdn_verify`."""
    return resolve("gdn_verify", q.device)(q, *args, **options)


def conv_verify(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Causal convolution over ragged rows; see `kernels.conv_verify`."""
    return resolve("conv_verify", x.device)(x, *args, **options)
