"""The series for vLLM."""

from __future__ import annotations

import ast

from .anchors import Module
from .series import Patch, Series

GDN = "vllm/v1/attention/backends/gdn_attn.py"
ADAPTIVE = "self._trims_rows_on_device"


def take_lengths_from_the_device(module: Module) -> None:
    backend = module.scope("GDNAttentionBackend")
    assert isinstance(backend, ast.ClassDef)
    module.add_method(
        backend,
        """
        @classmethod
        def supports_device_cpu_query_lens_mismatch(cls) -> bool:
            # Row classes and totals come from the host and survive trimming; lengths,
            # state columns and accepted counts reach the kernels from device tensors.
            # A subclass plans by rules of its own and has to say so itself.
            return cls is GDNAttentionBackend
        """,
    )
    builder = module.scope("GDNAttentionMetadataBuilder")
    init = module.scope("GDNAttentionMetadataBuilder.__init__")
    module.insert_after(
        module.assignment(init, "self.speculative_config"),
        f"""
        {ADAPTIVE} = bool(
            getattr(self.speculative_config, "enable_adaptive_verification", False)
        )
        """,
    )
    known = module.only(
        [
            node
            for node in ast.walk(builder)
            if isinstance(node, ast.If)
            and "uniform_spec_sequence_length = " in ast.unparse(node)
            and isinstance(node.test, ast.BoolOp)
        ],
        "condition on equal lengths",
    )
    assert isinstance(known, ast.If) and isinstance(known.test, ast.BoolOp)
    first = known.test.values[0]
    # Parentheses that are already there keep the line breaks of the condition legal.
    module.replace(first, f"not {ADAPTIVE} and {module.segment(first)}")


SERIES = Series(
    engine="vllm",
    package="vllm",
    written_for="0.32",
    patches=(
        Patch(
            "[Feature][Spec Decode] Adaptive verification on GDN layers",
            """
            Adaptive verification refuses GDN backends, because state planning would start from
            the host's row boundaries. The metadata takes only row classes and totals from the
            host, and trimming draft tokens on the device changes neither. The one field that
            does come from the host's lengths is uniform_spec_sequence_length: with an evenly
            split budget it looks uniform though the device's rows are not, so it is left empty
            when rows are trimmed.

            Test Plan: tests/v1/attention/test_gdn_ragged_metadata.py.
            """,
            edits={GDN: take_lengths_from_the_device},
            files={
                "tests/v1/attention/test_gdn_ragged_metadata.py":
                "vllm/test_gdn_ragged_metadata.py.in"
            },
        ),
    ),
)  # fmt: skip
