"""vLLM's GDN attention backend for rows of any length; registered with `register_backend`.

Upstream refuses adaptive verification on GDN because state planning would start from the host's
row boundaries. The metadata needs only totals and row classes from the host, and trimming leaves
both unchanged; lengths reach the operators from the device, in graphs as well.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)

from vllm_ascend_spec.kernels.gdn_verify.layout import StepCursor


@dataclass
class ReplayMetadata(GDNAttentionMetadata):
    """Upstream's, for pages in the replay layout.

    verify_step: cursors of the requests that verify, in the order of `spec_query_start_loc`.
    """

    verify_step: StepCursor | None = None

    @cached_property
    def prompt_part(self) -> GDNAttentionMetadata:
        """The same step without the rows that verify."""
        changes: dict[str, Any] = {
            "num_spec_decodes": 0,
            "num_spec_decode_tokens": 0,
            "num_actual_tokens": self.num_prefill_tokens,
            "spec_sequence_masks": None,
            "spec_sequence_masks_cpu": None,
            "spec_token_indx": None,
            "non_spec_token_indx": None,
            "spec_query_start_loc": None,
            "spec_state_indices_tensor": None,
            "num_accepted_tokens": None,
        }
        return replace(self, **changes)


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
        layers = vllm_config.compilation_config.static_forward_context
        self._replay: Any = getattr(layers.get(layer_names[0]), "ascend_spec_steps", None)
        # Without prefix caching a request's page is its first; with it, the one that upstream picks
        # by the request's length.
        self._first_page = kv_cache_spec.mamba_cache_mode == "none"
        if self._replay is not None:  # one page a request, not one a row
            self.spec_state_indices_tensor = torch.empty(
                (self.decode_cudagraph_max_bs, 1), dtype=torch.int32, device=device
            )

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Rows a request may have in a FULL graph: anchor and every draft token."""
        speculative = vllm_config.speculative_config
        return None if speculative is None else 1 + int(speculative.num_speculative_tokens)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> GDNAttentionMetadata:
        if self._replay is not None and self._first_page:
            table = common_attn_metadata.block_table_tensor[:, :1]
            common_attn_metadata = common_attn_metadata.replace(block_table_tensor=table)
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        # The host splits a trimmed budget evenly, which looks uniform though the device's rows
        # are not.
        metadata = replace(metadata, uniform_spec_sequence_length=None)
        if self._replay is None or metadata.spec_sequence_masks is None:
            return metadata
        return self._with_cursors(metadata, common_attn_metadata.query_start_loc)

    def update_block_table(
        self,
        metadata: GDNAttentionMetadata,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> GDNAttentionMetadata:
        if self._replay is not None and self._first_page:
            blk_table = blk_table[:, :1]
        return super().update_block_table(metadata, blk_table, slot_mapping)

    def _with_cursors(
        self, metadata: GDNAttentionMetadata, query_start_loc: torch.Tensor
    ) -> ReplayMetadata:
        mixed = metadata.num_prefills > 0
        step = self._replay.stage(query_start_loc, metadata.spec_sequence_masks if mixed else None)
        if mixed:
            verifying = metadata.spec_sequence_masks_cpu.nonzero().flatten()
            step = step.pick(async_tensor_h2d(verifying, device=query_start_loc.device))
        known = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
        return ReplayMetadata(**known, verify_step=step)
