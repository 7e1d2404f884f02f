"""The replay layer where upstream would fuse: which steps come there, with nothing copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_ascend_spec.kernels.gdn_verify.gated_norm_naive import gated_norm

from vllm_ascend_spec.engine import replay

ROWS, PADDED, HEADS, DIM = 6, 8, 2, 4


class Upstream:
    """What of vLLM's layer these paths touch; it keeps what it is called with."""

    def __init__(self) -> None:
        self.fused: dict[str, Any] | None = None
        self.normed: tuple[torch.Tensor, ...] = ()
        self.norm = SimpleNamespace(
            weight=torch.linspace(0.5, 1.5, DIM), bias=None, eps=1e-6, group_size=None,
            norm_before_gate=True, activation="silu",
        )  # fmt: skip

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


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_a_step_that_verifies_reads_the_projections_where_they_lie(
    norm_before_gate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def verify(*given: Any) -> None:
        seen.append(given)
        given[-1].copy_(torch.arange(given[-1].numel()).view_as(given[-1]))

    monkeypatch.setattr(replay, "verify", verify)
    found, given = layer(object()), step()
    found.norm.norm_before_gate = norm_before_gate
    found._forward_core_decode_spec_fused_norm(**given)
    _, _, mixed_qkv, a, b, out = seen[0]
    for name, view in (("mixed_qkv", mixed_qkv), ("a", a), ("b", b), ("core_attn_out", out)):
        assert view.data_ptr() == given[name].data_ptr() and view.shape[0] == ROWS, name
    if norm_before_gate:
        raw = torch.arange(out.numel(), dtype=torch.float32).view_as(out)
        wanted = gated_norm(raw, given["output_gate"][:ROWS], found.norm.weight, 1e-6)
        torch.testing.assert_close(out, wanted)
        assert not found.normed
    else:  # another norm than ours knows: the layer's own
        x, gate, normed = found.normed
        assert x is out and normed is out
        assert gate.data_ptr() == given["output_gate"].data_ptr()
    assert not given["core_attn_out"][ROWS:].any()  # rows of padding


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
