"""vLLM's GDN attention backend for rows of any length; registered with `register_backend`.

Upstream refuses adaptive verification on GDN because state planning would start from the host's
row boundaries. The metadata needs only totals and row classes from the host, and trimming leaves
both unchanged; lengths reach the operators from the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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

    def build(self, *args: Any, **kwargs: Any) -> GDNAttentionMetadata:
        metadata = super().build(*args, **kwargs)
        # The host splits a trimmed budget evenly, which looks uniform though the device's rows
        # are not.
        return replace(metadata, uniform_spec_sequence_length=None)
