"""CUDA: vLLM's own platform and graphs, with rows of any length on GDN layers.

Nothing changes for an engine that does not ask for adaptive verification: the backend then does
what upstream's does, and no manager is replaced.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vllm_ascend_spec.engine import ngram, replay, replay_steps, runner, versions
from vllm_ascend_spec.engine.patching import Replacement, declare, in_place_of, on_import

_BACKENDS = "vllm.v1.attention.backends.registry"
_GDN_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"

_enabled = False


def enable() -> None:
    """Declare what an engine on CUDA needs. Call it before a model is built; may be repeated.

    Raises:
        UserError: the installed vLLM is not supported, or lacks a name that this stands on.
    """
    global _enabled
    if _enabled:
        return
    engine = versions.require_engine(distribution="vllm")
    for adapter in ("gdn", "replay", "adaptive"):
        versions.require_names(adapter, engine)
    declare(
        *replacements(),
        *runner.replacements(),
        *ngram.replacements(),
        *replay.replacements(),
        *replay_steps.replacements(),
    )
    on_import(_BACKENDS, _register_gdn_backend)
    on_import(_GDN_LAYER, replay.register_layer)
    _enabled = True


def replacements() -> tuple[Replacement, ...]:
    """What only CUDA needs."""
    return (
        Replacement(
            target="vllm.config.vllm:VllmConfig._validate_adaptive_verification",
            reason="options of the plugin are checked where vLLM checks its own",
            make=_check_options_first,
        ),
    )


def _register_gdn_backend(registry: ModuleType) -> None:
    registry.register_backend(
        registry.MambaAttentionBackendEnum.GDN_ATTN,
        "vllm_ascend_spec.engine.gdn.RaggedGDNAttentionBackend",
        is_mamba=True,
    )


def _check_options_first(original: Any) -> Any:
    @in_place_of(original)
    def validate(self: Any) -> None:
        from vllm_ascend_spec.engine.checks import check_and_apply
        from vllm_ascend_spec.options import Options

        check_and_apply(self, Options.from_additional_config(self.additional_config))
        original(self)

    return validate
