"""The GDN layer of the CPU engine: the plugin's operators for every kind of row.

Upstream's CPU operators are wrong for verification rows of different lengths. Prompt chunks and
plain decode take the plugin's operators too: one recurrence in one precision for all of them is
what makes answers with and without speculation comparable token by token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_ascend_spec.engine import replay
from vllm_ascend_spec.kernels import ops
from vllm_ascend_spec.kernels.conv_verify import host as conv
from vllm_ascend_spec.kernels.gdn_verify import host as gdn

# mixed_qkv, log_decay, beta and the raw gates a, b of every token of the step
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def layer_class(upstream: type) -> type:
    """The layer to register in place of vLLM's `QwenGatedDeltaNetAttention`."""

    class CpuGatedDeltaNetAttention(upstream):
        """vLLM's layer with the plugin's convolution and recurrence."""

        def forward_cpu(self, hidden_states: Tensor) -> Tensor:
            """[tokens, hidden] -> [tokens, hidden]."""
            mixed_qkv, z, b, a = _project(self, hidden_states)
            return self._output_projection(_core(self, mixed_qkv, b, a), z)

    return CpuGatedDeltaNetAttention


def _project(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qkvz, _ = layer.in_proj_qkvz(hidden_states)
    ba, _ = layer.in_proj_ba(hidden_states)
    if layer.gqa_interleaved_layout:  # Qwen3-Next
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(qkvz, ba)
        return torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1), z, b, a
    conv_dim = layer.conv_dim // layer.tp_size
    mixed_qkv, z = qkvz.split([conv_dim, qkvz.shape[-1] - conv_dim], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return mixed_qkv, z.unflatten(-1, (-1, layer.head_v_dim)), b, a


def _core(layer: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Convolution and recurrence of a step; rows that are padding stay zero.

    Shapes: mixed_qkv [tokens, conv_dim]; b, a [tokens, HV]; returns [tokens, HV, dv].
    """
    from vllm.forward_context import get_forward_context

    heads = layer.num_v_heads // layer.tp_size
    out = mixed_qkv.new_zeros(len(mixed_qkv), heads, layer.head_v_dim)
    all_metadata = get_forward_context().attn_metadata
    if all_metadata is None:  # memory profiling: no state pool yet
        return out
    metadata = all_metadata[layer.prefix]
    if metadata.checkpoint is not None:
        raise NotImplementedError("GDN checkpoints inside a prompt chunk are not kept on a CPU")
    log_decay = -layer.A_log.float().exp() * torch.nn.functional.softplus(
        a.float() + layer.dt_bias.float()
    )
    inputs = (mixed_qkv, log_decay, b.float().sigmoid(), a, b)
    if metadata.spec_sequence_masks is None:
        count = metadata.num_decode_tokens + metadata.num_prefill_tokens
        out[:count] = _prompt_rows(layer, inputs, slice(count), *_unspeculated(metadata))
    elif metadata.num_prefills == 0:
        count = metadata.num_spec_decode_tokens
        out[:count] = _verify_rows(layer, inputs, slice(count), metadata)
    else:
        verify, prompt = metadata.spec_token_indx, metadata.non_spec_token_indx
        out[verify] = _verify_rows(layer, inputs, verify, metadata)
        out[prompt] = _prompt_rows(
            layer,
            inputs,
            prompt,
            metadata.prefill_query_start_loc,
            metadata.prefill_state_indices,
            metadata.prefill_has_initial_state,
        )
    return out


def _unspeculated(metadata: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Boundaries, slots and initial-state flags of a step in which no row verifies."""
    rows = metadata.num_decodes + metadata.num_prefills
    has_initial_state = torch.ones(rows, dtype=torch.bool)
    if metadata.num_prefills:
        decodes = metadata.num_decodes
        has_initial_state[decodes:] = metadata.has_initial_state[decodes:rows]
    return (
        metadata.non_spec_query_start_loc[: rows + 1],
        metadata.non_spec_state_indices_tensor[:rows],
        has_initial_state,
    )


def _verify_rows(layer: Any, inputs: Inputs, rows: Tensor | slice, metadata: Any) -> Tensor:
    mixed_qkv, log_decay, beta, a, b = (x[rows] for x in inputs)
    requests = metadata.num_spec_decodes
    boundaries = metadata.spec_query_start_loc[: requests + 1]
    columns = metadata.spec_state_indices_tensor[:requests]
    accepted = metadata.num_accepted_tokens[:requests]
    convolved = conv.conv_verify(
        mixed_qkv, *_conv_arguments(layer), boundaries, columns[:, 0], accepted, _silu(layer)
    )
    q, k, v = replay.split_heads(layer, convolved)
    if layer.ascend_spec_replay is not None:
        return ops.replay_verify(
            q, k, v, a, b, layer.A_log, layer.dt_bias, boundaries, columns[:, 0],
            metadata.verify_step.narrow(requests), replay.cache_of(layer),
        )  # fmt: skip
    return gdn.gdn_verify(
        q, k, v, log_decay, beta, layer.kv_cache[1], boundaries, columns, accepted
    )


def _prompt_rows(
    layer: Any,
    inputs: Inputs,
    rows: Tensor | slice,
    boundaries: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    mixed_qkv, log_decay, beta, _, _ = (x[rows] for x in inputs)
    place = (boundaries, slots, has_initial_state)
    convolved = conv.conv_prefill(mixed_qkv, *_conv_arguments(layer), *place, _silu(layer))
    return gdn.gdn_prefill(
        *replay.split_heads(layer, convolved), log_decay, beta, layer.kv_cache[1], *place
    )


def _conv_arguments(layer: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    # vLLM packs the weight for its own CPU operator and keeps the plain one beside it.
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", layer.conv1d.weight)
    windows = layer.kv_cache[0]
    if is_conv_state_dim_first():
        windows = windows.transpose(1, 2)
    return weight.flatten(1) if weight.dim() == 3 else weight, layer.conv1d.bias, windows


def _silu(layer: Any) -> bool:
    return bool(layer.activation == "silu")
