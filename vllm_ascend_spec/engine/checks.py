"""Checks of a configuration before any weight is loaded."""

from __future__ import annotations

from typing import Any

from vllm_ascend_spec.options import Options


def check_and_apply(vllm_config: Any, options: Options) -> None:
    """Apply the options to vLLM's configuration."""
    speculative = vllm_config.speculative_config
    if options.adaptive is not None and speculative is not None:
        speculative.enable_adaptive_verification = options.adaptive
