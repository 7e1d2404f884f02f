"""GDN rows of different lengths on vllm-ascend: its metadata, and the operator that answers them.

vllm-ascend's recurrent operator is right while every verification row has K + 1 tokens
(`kernels/gdn_verify/stock.py` says why). Rows get other lengths when a budget trims them, and
without any plugin when the scheduler's token budget cuts a request's drafts. Then the plugin's
kernel takes the verification rows; convolution, prompt chunks and plain steps stay vllm-ascend's.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from contextvars import ContextVar
from typing import Any

import torch

from vllm_ascend_spec.kernels.gdn_verify.stock import stock_operator_obstacle
from vllm_ascend_spec.options import Options

_CONV_DECODE = 1  # run_mode of the convolution operator
_PAD_SLOT = -1
_PADDING = -2  # vllm-ascend's own marks are -1, no verification row, and the number of drafts

_real_requests: ContextVar[int | None] = ContextVar("real_requests", default=None)


def with_real_requests(original: Any) -> Any:
    """`AscendMambaHybridModelState.prepare_attn`, noting how many requests are no padding."""

    @functools.wraps(original)
    def prepare_attn(self: Any, input_batch: Any, *args: Any, **named: Any) -> Any:
        token = _real_requests.set(input_batch.num_reqs)
        try:
            return original(self, input_batch, *args, **named)
        finally:
            _real_requests.reset(token)

    return prepare_attn


def with_row_kinds(metadata: Any, query_start_loc: torch.Tensor) -> Any:
    """Hybrid metadata that tells anchor-only and padding rows from prompt chunks.

    vllm-ascend takes a decoding request without a draft token for a prompt chunk, which starts from
    state column 0; its state lies in the column of the token that was accepted last. And it takes
    the requests that pad a FULL graph for prompt chunks, since they have rows too: the buffers that
    the graph reads then stay as an earlier step left them.

    Args:
        metadata: vLLM's `MambaHybridAttnMetadata` of the step; not changed.
        query_start_loc: int32 [requests + 1] on the host, padding included.
    """
    drafts = metadata.num_decode_draft_tokens_cpu
    if drafts is None:
        return metadata
    anchor_only = (query_start_loc.diff()[: len(drafts)] == 1) & ~metadata.is_prefilling
    drafts = drafts.masked_fill(anchor_only & (drafts < 0), 0)
    real = _real_requests.get()
    if real is not None:
        drafts[real:] = _PADDING
    metadata = copy.copy(metadata)
    metadata.num_decode_draft_tokens_cpu = drafts
    return metadata


def build_for_any_rows(original: Any) -> Any:
    """`AscendGDNAttentionMetadataBuilder.build`: padding has no rows, and `stock_obstacle` says
    why the stock operator would be wrong on this step (None: it is right).
    """

    @functools.wraps(original)
    def build(
        self: Any,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Any = None,
        num_decode_draft_tokens_cpu: Any = None,
        *args: Any,
        **named: Any,
    ) -> Any:
        drafts = num_decode_draft_tokens_cpu
        if drafts is not None:
            common_attn_metadata = _without_padding(common_attn_metadata, drafts)
        metadata = original(
            self, common_prefix_len, common_attn_metadata, num_accepted_tokens, drafts, *args,
            **named,
        )  # fmt: skip
        metadata.stock_obstacle = None
        if metadata.spec_sequence_masks is not None:
            lengths = common_attn_metadata.query_start_loc_cpu.diff()[: len(drafts)][drafts >= 0]
            columns = self.num_spec + 1
            metadata.stock_obstacle = stock_operator_obstacle(lengths.tolist(), columns)
        return metadata

    return build


def captured_for_any_lengths(original: Any) -> Any:
    """`build_for_cudagraph_capture`: with adaptive verification the plugin's kernel is captured."""

    @functools.wraps(original)
    def build_for_cudagraph_capture(self: Any, common_attn_metadata: Any) -> Any:
        metadata = original(self, common_attn_metadata)
        options = Options.from_additional_config(self.vllm_config.additional_config)
        if options.adaptive and metadata.spec_sequence_masks is not None:
            metadata.stock_obstacle = "the graph is replayed with rows of other lengths"
        return metadata

    return build_for_cudagraph_capture


def _without_padding(common: Any, drafts: torch.Tensor) -> Any:
    """Row boundaries in which padding requests are empty; the host knows the last real one."""
    padding = int((drafts == _PADDING).sum())
    if padding == 0:
        return common
    end = int(common.query_start_loc_cpu[len(drafts) - padding])
    return dataclasses.replace(
        common,
        query_start_loc=common.query_start_loc.clamp(max=end),
        query_start_loc_cpu=common.query_start_loc_cpu.clamp(max=end),
    )


def core_for_any_lengths(original: Any) -> Any:
    """`AscendGatedDeltaNetAttention._forward_core`, with the plugin's kernel for ragged rows."""

    @functools.wraps(original)
    def _forward_core(self: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
        from vllm.forward_context import get_forward_context

        by_layer = get_forward_context().attn_metadata
        metadata = None if by_layer is None else by_layer[self.prefix]
        if getattr(metadata, "stock_obstacle", None) is None:
            original(self, mixed_qkv, b, a, core_attn_out)
            return
        assert metadata is not None and by_layer is not None
        if metadata.num_prefills == 0 and metadata.num_decodes == 0:
            rows = metadata.num_actual_tokens
            core_attn_out[:rows] = _verify_rows(
                self, mixed_qkv[:rows], b[:rows], a[:rows], metadata
            )
            return
        verify, others = metadata.spec_token_indx, metadata.non_spec_token_indx
        # The others run as in a step in which nothing verifies.
        out = torch.zeros_like(core_attn_out[: len(others)])
        by_layer[self.prefix] = _without_verification(metadata, len(others))
        try:
            original(self, mixed_qkv[others], b[others], a[others], out)
        finally:
            by_layer[self.prefix] = metadata
        core_attn_out[others] = out
        core_attn_out[verify] = _verify_rows(
            self, mixed_qkv[verify], b[verify], a[verify], metadata
        )

    return _forward_core


def _without_verification(metadata: Any, tokens: int) -> Any:
    others = copy.copy(metadata)
    others.spec_sequence_masks = None
    others.num_spec_decodes = others.num_spec_decode_tokens = 0
    others.num_actual_tokens = tokens
    others.stock_obstacle = None
    return others


def _verify_rows(layer: Any, mixed_qkv: Any, b: Any, a: Any, metadata: Any) -> torch.Tensor:
    """mixed_qkv [N, channels], b and a [N, HV] of the verification rows -> [N, HV, dv]."""
    from vllm_ascend_spec.kernels.gdn_verify.triton import gdn_verify

    windows, states = layer.kv_cache
    place = metadata.spec_decode_metadata.spec_causal_conv1d
    weight = layer.conv1d.weight
    convolved = torch.empty_like(mixed_qkv)
    torch.ops._C_ascend.npu_causal_conv1d_custom(
        convolved,
        mixed_qkv,
        weight.view(weight.size(0), weight.size(2)).transpose(0, 1),
        conv_state=windows,
        bias_opt=layer.conv1d.bias,
        query_start_loc_opt=place.query_start_loc,
        cache_indices_opt=place.cache_indices,
        initial_state_mode_opt=None,
        num_accepted_tokens_opt=place.num_accepted_tokens,
        activation_mode=int(bool(layer.activation)),
        pad_slot_id=_PAD_SLOT,
        run_mode=_CONV_DECODE,
    )
    keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    q, k, v = convolved.split([keys, keys, values], dim=-1)
    return gdn_verify(
        q.unflatten(-1, (-1, layer.head_k_dim)),
        k.unflatten(-1, (-1, layer.head_k_dim)),
        v.unflatten(-1, (-1, layer.head_v_dim)),
        a.contiguous(),
        b.contiguous(),
        layer.A_log,
        layer.dt_bias,
        states,
        place.query_start_loc,
        metadata.spec_state_indices_tensor,
        place.num_accepted_tokens.to(torch.int32),
        max_rows=metadata.spec_state_indices_tensor.shape[1],
    )
