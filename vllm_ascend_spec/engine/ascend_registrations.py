"""What the plugin extends in vllm-ascend, and what it repairs there.

Repairs are of defects found by running vllm-ascend's main of August 2026 (commit 182b75e); each is
declared only where the code in question is there, and each is harmless where it has been mended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_ascend_spec.engine import ascend_confidence, versions
from vllm_ascend_spec.engine.patching import Replacement, declare

_ATTN_UTILS = "vllm_ascend.worker.v2.attn_utils"
_QWEN3_5 = "vllm_ascend.patch.worker.patch_qwen3_5"
_GDN_BUILDER = "vllm_ascend.ops.gdn_attn_builder:AscendGDNAttentionMetadataBuilder"
_SPECULATOR = "vllm_ascend.worker.v2.spec_decode.autoregressive.speculator"


def _of_vllm_ascend(
    target: str, reason: str, make: Callable[[Any], Any], defined_in: str | None = None
) -> Replacement:
    # Any version: its number says little, and what is needed was looked up in its source.
    return Replacement(target, reason, make, "", ("vllm-ascend",), defined_in)


def extensions() -> tuple[Replacement, ...]:
    """Classes of vllm-ascend that the plugin derives its own from."""
    return (
        _of_vllm_ascend(
            "vllm_ascend.platform:NPUPlatform",
            "the platform reads the plugin's options and knows its limits",
            _extended_platform,
        ),
        _of_vllm_ascend(
            "vllm_ascend.worker.v2.model_runner:NPUModelRunner",
            "adaptive verification trims what the runner is handed",
            _extended_runner,
        ),
        _of_vllm_ascend(
            "vllm_ascend.worker.v2.aclgraph_utils:ModelAclGraphManager",
            "its graphs hold equal requests only; adaptive verification needs rows of any length",
            _extended_graphs,
        ),
        _of_vllm_ascend(
            f"{_GDN_BUILDER}.build_for_cudagraph_capture",
            "a captured GDN layer must be right for rows of any length",
            _captured_for_any_lengths,
            defined_in="vllm.v1.attention.backends.gdn_attn:"
            "GDNAttentionMetadataBuilder.build_for_cudagraph_capture",
        ),
        *(
            Replacement(
                f"vllm.v1.worker.gpu.spec_decode.{target}",
                "no confidence of draft tokens is kept; read it while their logits are there",
                make,
                versions="",
                distributions=("vllm",),
            )
            for target, make in (
                (
                    "speculator:DraftModelSpeculator.sample_draft",
                    ascend_confidence.observed_sample_draft,
                ),
                (
                    "dspark.speculator:DSparkSpeculator._sample_sequential",
                    ascend_confidence.observed_sample_sequential,
                ),
            )
        ),
    )


def repairs() -> tuple[Replacement, ...]:
    """Defects that stop hybrid models and text-only checkpoints on Model Runner V2."""
    return (
        _of_vllm_ascend(
            f"{_ATTN_UTILS}:build_attn_metadata",
            "hybrid models: is_prefilling is passed twice; rows without a draft lose their state",
            _is_prefilling_once,
        ),
        _of_vllm_ascend(
            f"{_SPECULATOR}:AscendAutoRegressiveSpeculator._ascend_update_seq_lens",
            "hybrid models with MTP or EAGLE-3: metadata of GDN layers have no seq_lens",
            _only_where_lengths_are,
        ),
        _of_vllm_ascend(
            # The module that puts vllm-ascend's function into vLLM's class, and ours after it.
            f"{_QWEN3_5}:Qwen3NextAttention.forward",
            "text-only Qwen3.5 checkpoints have no M-RoPE sections, which are taken for granted",
            _rope_of_text_only_models,
            defined_in=f"{_QWEN3_5}:AscendQwen3NextAttention.forward",
        ),
        _of_vllm_ascend(
            "vllm_ascend.worker.v2.model_states.mamba_hybrid:"
            "AscendMambaHybridModelState.prepare_attn",
            "GDN metadata cannot tell requests that pad a FULL graph from prompts",
            _with_real_requests,
        ),
        _of_vllm_ascend(
            f"{_GDN_BUILDER}.build",
            "padding of FULL graphs counts as prompts; note steps the stock operator cannot run",
            _build_for_any_rows,
        ),
        _of_vllm_ascend(
            "vllm_ascend.ops.gdn:AscendGatedDeltaNetAttention._forward_core",
            "rows of fewer than K + 1 tokens: the stock operator reads foreign states, or returns",
            _core_for_any_lengths,
        ),
        Replacement(
            "vllm.config.speculative:SpeculativeConfig.hf_config_override",
            "MTP of text-only Qwen3.5 checkpoints is not recognised",
            _mtp_of_text_only_models,
            versions="",
            distributions=("vllm",),
        ),
    )


def declare_all() -> None:
    """Declare the extensions, and the repairs whose targets this vllm-ascend has."""
    engine = versions.require_engine("vllm-ascend")
    declare(*extensions())
    declare(*(repair for repair in repairs() if versions.has(repair.origin, engine)))


def _extended_runner(original: type) -> type:
    from vllm_ascend_spec.engine.ascend_runner import extend

    return extend(original)


def _extended_graphs(original: type) -> type:
    from vllm_ascend_spec.engine.ascend_graphs import extend

    return extend(original)


def _captured_for_any_lengths(original: Any) -> Any:
    from vllm_ascend_spec.engine.ascend_gdn import captured_for_any_lengths

    return captured_for_any_lengths(original)


def _with_real_requests(original: Any) -> Any:
    from vllm_ascend_spec.engine.ascend_gdn import with_real_requests

    return with_real_requests(original)


def _build_for_any_rows(original: Any) -> Any:
    from vllm_ascend_spec.engine.ascend_gdn import build_for_any_rows

    return build_for_any_rows(original)


def _core_for_any_lengths(original: Any) -> Any:
    from vllm_ascend_spec.engine.ascend_gdn import core_for_any_lengths

    return core_for_any_lengths(original)


def _extended_platform(original: type) -> type:
    from vllm_ascend_spec.engine.ascend_platform import extend

    return extend(original)


def _is_prefilling_once(original: Any) -> Any:
    from vllm_ascend_spec.engine.ascend_gdn import with_row_kinds

    @functools.wraps(original)
    def build_attn_metadata(
        *, model_specific_attn_metadata: Any = None, is_prefilling: Any = None, **named: Any
    ) -> Any:
        if is_prefilling is None:
            is_prefilling = getattr(model_specific_attn_metadata, "is_prefilling", None)
        if model_specific_attn_metadata is not None:
            if hasattr(model_specific_attn_metadata, "num_decode_draft_tokens_cpu"):
                model_specific_attn_metadata = with_row_kinds(
                    model_specific_attn_metadata, named["query_start_loc_cpu"]
                )
            model_specific_attn_metadata = _WithoutIsPrefilling(model_specific_attn_metadata)
        if is_prefilling is not None:
            is_prefilling = is_prefilling[: named["num_reqs"]]
        return original(
            model_specific_attn_metadata=model_specific_attn_metadata,
            is_prefilling=is_prefilling,
            **named,
        )

    return build_attn_metadata


class _WithoutIsPrefilling:
    """A model's own metadata, less the field that is passed by name."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata

    def get_extra_common_attn_kwargs(self, *args: Any, **named: Any) -> dict[str, Any]:
        extra = self._metadata.get_extra_common_attn_kwargs(*args, **named)
        return {name: value for name, value in extra.items() if name != "is_prefilling"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metadata, name)


def _only_where_lengths_are(original: Any) -> Any:
    @functools.wraps(original)
    def _ascend_update_seq_lens(self: Any, attn_metadata: dict[str, Any] | None) -> None:
        if attn_metadata is not None:
            attn_metadata = {
                layer: metadata
                for layer, metadata in attn_metadata.items()
                if hasattr(metadata, "seq_lens")
            }
        original(self, attn_metadata)

    return _ascend_update_seq_lens


def _rope_of_text_only_models(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, positions: Any, hidden_states: Any, output: Any = None) -> Any:
        if getattr(self.rotary_emb, "mrope_section", None):
            return original(self, positions, hidden_states, output)
        # vllm-ascend's other branch is right for them; it chooses by the model type's name.
        config = self.config
        self.config = _RenamedConfig(config)
        try:
            return original(self, positions, hidden_states, output)
        finally:
            self.config = config

    return forward


class _RenamedConfig:
    model_type = "text"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _mtp_of_text_only_models(original: Any) -> Any:
    # Named like the original: vLLM pickles it by name for its engine process.
    @functools.wraps(original)
    def hf_config_override(hf_config: Any) -> Any:
        text_only = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
        if getattr(hf_config, "mtp_num_hidden_layers", None):
            hf_config.model_type = text_only.get(hf_config.model_type, hf_config.model_type)
        return original(hf_config)

    return hf_config_override
