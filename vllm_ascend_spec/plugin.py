"""vLLM's entry points. Listing or importing them imports neither torch nor vLLM."""

from __future__ import annotations

import os

_setup_error: Exception | None = None


def platform() -> str | None:
    """`vllm.platform_plugins`: the platform class to use, or None to leave vLLM's choice alone.

    vLLM asks in every process, before it decides which kernels it has. The answer is the CPU
    engine's class where that engine was asked for (`vllm_ascend_spec.engine.cpu.enable`).
    """
    global _setup_error
    # Spelt out rather than imported: processes that did not ask pay for one look-up.
    if os.environ.get("VLLM_ASCEND_SPEC_PLATFORM") != "cpu":
        return None
    from vllm_ascend_spec.engine import cpu

    try:
        cpu.enable()
    except Exception as error:
        # vLLM logs what a platform plugin raises at debug level and goes on without it; register(),
        # which runs next, is where an error stops start-up.
        _setup_error = error
        return None
    return cpu.PLATFORM_CLASS


def register() -> None:
    """`vllm.general_plugins`: runs in every process before a model is built; may run repeatedly."""
    if _setup_error is not None:
        raise _setup_error
    from vllm_ascend_spec.engine import patching

    patching.report()
