"""References of the AscendC operators on a GDN model's path.

Schemas are read from vllm-ascend's own binding file, so names and argument types are those of the
source under test. What the kernels index was read from their source (csrc/moe/causal_conv1d,
csrc/attention/recurrent_gated_delta_rule); the arithmetic is the gated delta rule in float32.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from .device import computes, stands_for

LONGEST_ROW = 16  # MAX_MTP of the recurrent kernel
_DEFINITION = re.compile(r'ops\.def\(\s*((?:"[^"\n]*"\s*)+)[,)]')


def define_schemas(vllm_ascend: Path) -> torch.library.Library:
    """Define `torch.ops._C_ascend` from csrc/torch_binding.cpp; keep the result alive."""
    text = (vllm_ascend / "csrc" / "torch_binding.cpp").read_text(encoding="utf-8")
    library = torch.library.Library("_C_ascend", "FRAGMENT")
    for definition in _DEFINITION.finditer(text):
        schema = "".join(re.findall(r'"([^"\n]*)"', definition.group(1))).strip()
        if not hasattr(torch.ops._C_ascend, schema.partition("(")[0].strip()):
            library.define(schema)
    return library


@stands_for("_C_ascend::npu_causal_conv1d_custom")
def causal_conv1d(
    output: Tensor,
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    bias_opt: Tensor | None,
    query_start_loc_opt: Tensor,
    cache_indices_opt: Tensor,
    initial_state_mode_opt: Tensor | None,
    num_accepted_tokens_opt: Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> Tensor:
    """x [T, D], weight [W, D], state [slots, window, D]; run_mode 0 prompt, 1 decode.

    A row that verifies starts from the window's tokens at `accepted - 1` (clamped to the window)
    and leaves the two tokens after that place and all its own behind.
    """
    width = len(weight)
    bounds = query_start_loc_opt.tolist()
    slots = cache_indices_opt.reshape(len(cache_indices_opt), -1)[:, 0].tolist()
    verifies = num_accepted_tokens_opt is not None
    for row, ((first, last), slot) in enumerate(zip(pairwise(bounds), slots, strict=False)):
        if slot == pad_slot_id or last <= first:
            continue
        offset = 0
        if num_accepted_tokens_opt is not None:
            offset = int(num_accepted_tokens_opt[row]) - 1
            offset = min(max(offset, 0), conv_state.shape[1] - (width - 1))
        history = conv_state[slot, offset : offset + width - 1].clone()
        fresh = initial_state_mode_opt is not None and not bool(initial_state_mode_opt[row])
        if run_mode == 0 and fresh:
            history.zero_()
        window = torch.cat([history, x[first:last]])
        taps = (window[i : i + last - first].float() * weight[i].float() for i in range(width))
        total = sum(taps, torch.zeros(()) if bias_opt is None else bias_opt.float())
        if activation_mode:
            total = torch.nn.functional.silu(total)
        output[first:last] = total.to(output.dtype)
        kept = window[1:] if verifies else window[-(width - 1) :]
        assert len(kept) <= conv_state.shape[1], (len(kept), conv_state.shape)
        conv_state[slot, : len(kept)] = kept
    return output


@stands_for("_C_ascend::npu_recurrent_gated_delta_rule")
def recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    beta: Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
) -> Tensor:
    """q, k [T, HK, dk], v [T, HV, dv], state [slots, HV, dv, dk]; indices packed per token.

    `actual_seq_lengths` is [first row, length, length, ...]. As the kernel does, it stops without
    a word at the first row longer than 16, past the end, or shorter than what was accepted before:
    that row and all after it keep whatever the output memory held, here NaN.
    """
    assert gk is None
    out = torch.full(value.shape, float("nan"))
    first, *lengths = actual_seq_lengths.tolist()
    indices = ssm_state_indices.tolist()
    for row, length in enumerate(lengths):
        if length <= 0:
            continue
        if length > LONGEST_ROW or first + length > len(value):
            break
        start = first
        if num_accepted_tokens is not None:
            accepted = int(num_accepted_tokens[row])
            if not 0 < accepted <= length:
                break
            start += accepted - 1
        tokens = slice(first, first + length)
        inputs = _row(query, key, value, g, beta, scale, tokens)
        states, out[tokens] = delta_rule(*inputs, state[indices[start]].float())
        for token, after in enumerate(states):
            state[indices[first + token]] = after.to(state.dtype)
        first += length
    return out.to(value.dtype)


@computes("npu::npu_chunk_gated_delta_rule")
def chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor | None = None,
    initial_state: Tensor,
    actual_seq_lengths: Tensor,
    scale: float | None = None,
    g: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Prompt chunks: shapes as above, one initial and one final state a row [N, HV, dv, dk]."""
    out = torch.zeros(value.shape)
    final = initial_state.clone()
    first = 0
    for row, length in enumerate(actual_seq_lengths.tolist()):
        if length == 0:
            continue
        tokens = slice(first, first + length)
        inputs = _row(query, key, value, g, beta, scale, tokens)
        states, out[tokens] = delta_rule(*inputs, initial_state[row].float())
        final[row] = states[-1].to(final.dtype)
        first += length
    return out.to(value.dtype), final


def _row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    tokens: slice,
) -> tuple[Tensor, ...]:
    """One row's q (scaled), k, v, decay and beta in float32, a head each for every value head."""
    groups = value.shape[1] // query.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    q = query[tokens].float().repeat_interleave(groups, 1) * factor
    k = key[tokens].float().repeat_interleave(groups, 1)
    v = value[tokens].float()
    ones = torch.ones(v.shape[:2])
    decay = ones if g is None else g[tokens].float().exp()
    return q, k, v, decay, ones if beta is None else beta[tokens].float()


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[list[Tensor], Tensor]:
    """States after each token and outputs of one row; q, k [n, HV, dk], v [n, HV, dv]."""
    states, outputs = [], []
    for token in range(len(q)):
        state = state * decay[token][:, None, None]
        change = (v[token] - torch.einsum("hvk,hk->hv", state, k[token])) * beta[token][:, None]
        state = state + change[..., None] * k[token][:, None]
        states.append(state)
        outputs.append(torch.einsum("hvk,hk->hv", state, q[token]))
    return states, torch.stack(outputs)
