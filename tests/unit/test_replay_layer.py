"""The replay layer where upstream would fuse: which steps come there, with nothing copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ascend_spec.engine import replay

ROWS, PADDED, HEADS, DIM = 6, 8, 2, 4


class Upstream:
    """What of vLLM's layer these paths touch; it keeps what it is called with."""

    def __init__(self) -> None:
        self.fused: dict[str, Any] | None = None
        self.normed: tuple[torch.Tensor, ...] = ()

    def _can_use_fused_gdn_mtp_decode(self, attn_metadata: Any) -> bool:
        return True

    def _forward_core_decode_spec_fused_norm(self, **given: Any) -> None:
        self.fused = given

    def _rms_norm_gated_cuda(self, x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
        self.normed = x, gate, out


def layer(layout: object | None, adaptive: bool = True) -> Any:
    built = replay.layer_class(Upstream)
    found = built.__new__(built)
    Upstream.__init__(found)
    found.ascend_spec_replay, found.ascend_spec_adaptive = layout, adaptive
    return found


def step() -> dict[str, Any]:
    """Views of the projections, as upstream's packed path splits them."""
    qkvz, ba = torch.randn(PADDED, 40), torch.randn(PADDED, 2 * HEADS)
    b, a = ba.chunk(2, dim=-1)
    return {
        "mixed_qkv": qkvz[:, :32],
        "b": b,
        "a": a,
        "output_gate": qkvz[:, 32:].reshape(PADDED, HEADS, DIM),
        "core_attn_out": torch.zeros(PADDED, HEADS, DIM),
        "attn_metadata": SimpleNamespace(num_actual_tokens=ROWS, spec_sequence_masks=object()),
    }


def test_a_step_that_verifies_reads_the_projections_where_they_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(replay, "verify", lambda *given: seen.append(given))
    found, given = layer(object()), step()
    found._forward_core_decode_spec_fused_norm(**given)
    (_, _, mixed_qkv, a, b, out), (x, gate, normed) = seen[0], found.normed
    for name, view in (("mixed_qkv", mixed_qkv), ("a", a), ("b", b), ("core_attn_out", out)):
        assert view.data_ptr() == given[name].data_ptr() and view.shape[0] == ROWS, name
    assert x is out and normed is out and gate.data_ptr() == given["output_gate"].data_ptr()


def test_steps_without_rows_to_verify_are_upstreams() -> None:
    metadata = SimpleNamespace(spec_sequence_masks=None)
    assert not layer(object())._can_use_fused_gdn_mtp_decode(metadata)
    assert layer(object())._can_use_fused_gdn_mtp_decode(step()["attn_metadata"])


def test_native_states_keep_upstreams_kernel_for_whole_drafts_alone() -> None:
    whole, trimmed = layer(None, adaptive=False), layer(None)
    metadata = step()["attn_metadata"]
    assert whole._can_use_fused_gdn_mtp_decode(metadata)
    assert not trimmed._can_use_fused_gdn_mtp_decode(metadata)
    whole._forward_core_decode_spec_fused_norm(**step())
    assert whole.fused is not None
