"""vLLM's entry points. Listing or importing them imports neither torch nor vLLM."""

from __future__ import annotations

import importlib.util
import os
import sys

_setup_error: Exception | None = None


def platform() -> str | None:
    """`vllm.platform_plugins`: the platform class to use, or None to leave vLLM's choice alone.

    vLLM asks in every process, before it decides which kernels it has. The answer is the CPU
    engine's class where that engine was asked for (`vllm_ascend_spec.engine.cpu.enable`). Beside
    vllm-ascend the answer is None: vLLM takes one platform plugin, and vllm-ascend's is extended
    (`vllm_ascend_spec.engine.ascend.enable`) rather than replaced.
    """
    global _setup_error
    try:
        # Spelt out rather than imported: processes that did not ask pay for two look-ups.
        if os.environ.get("VLLM_ASCEND_SPEC_PLATFORM") == "cpu":
            from vllm_ascend_spec.engine import cpu

            cpu.enable()
            return cpu.PLATFORM_CLASS
        if importlib.util.find_spec("vllm_ascend") is not None:
            from vllm_ascend_spec.engine import ascend

            if ascend.installed():
                ascend.enable()
    except Exception as error:
        # vLLM swallows what a platform plugin raises and goes on without it; register(), which
        # runs next, is where an error stops start-up.
        _setup_error = error
    return None


def register() -> None:
    """`vllm.general_plugins`: runs in every process before a model is built; may run repeatedly."""
    if _setup_error is not None:
        raise _setup_error
    from vllm_ascend_spec.engine import patching

    if _on_cuda():
        from vllm_ascend_spec.engine import cuda

        cuda.enable()
    patching.report()


def _on_cuda() -> bool:
    """Whether this vLLM chose CUDA. Asked late: vLLM is loaded and has chosen by now."""
    platforms = sys.modules.get("vllm.platforms")
    if platforms is None:
        return False
    return bool(platforms.current_platform.is_cuda())
