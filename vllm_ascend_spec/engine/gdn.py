"""vLLM's GDN attention backend for rows of any length; registered with `register_backend`.

Upstream refuses adaptive verification on GDN because state planning would start from the host's
row boundaries. The metadata needs only totals and row classes from the host, and trimming leaves
both unchanged; lengths reach the operators from the device, in graphs as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)


class RaggedGDNAttentionBackend(GDNAttentionBackend):
    """GDN whose verification rows may be trimmed on the device."""

    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        return RaggedGDNMetadataBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return True


class RaggedGDNMetadataBuilder(GDNAttentionMetadataBuilder):
    """Upstream's metadata, without the one field that is wrong for trimmed rows."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Upstream grants these to its own class alone, for derived ones may keep state per group.
        # This one keeps none.
        self.supports_update_block_table = vllm_config.use_v2_model_runner and device.type == "cuda"
        if self.supports_update_block_table:
            self.mamba_aligned_state_indices: torch.Tensor | None = None

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Rows a request may have in a FULL graph: anchor and every draft token."""
        speculative = vllm_config.speculative_config
        return None if speculative is None else 1 + int(speculative.num_speculative_tokens)

    def build(self, *args: Any, **kwargs: Any) -> GDNAttentionMetadata:
        metadata = super().build(*args, **kwargs)
        # The host splits a trimmed budget evenly, which looks uniform though the device's rows
        # are not.
        return replace(metadata, uniform_spec_sequence_length=None)
