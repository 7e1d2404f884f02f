"""References of the operators on a dense model's path: norms, activation, cache, attention.

Written from the operators' documented meaning; arguments and shapes as in their schemas. All
arithmetic in float32, the result rounded once to the operator's type.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .device import computes, stands_for, values_stay, writes

# The double keeps the plain layout, so a cast between layouts changes nothing.
values_stay("npu::get_npu_format", "npu::_npu_fused_infer_attention_score_get_max_workspace")
CAUSAL_RIGHT_DOWN, BAND = 3, 4  # sparse_mode; 0 masks nothing here


@computes("npu::npu_format_cast")
def format_cast(x: Tensor, acl_format: int, **_: Any) -> Tensor:
    return x


@computes("npu::npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale * gamma.float()).to(x.dtype), scale


@computes("npu::npu_add_rms_norm")
def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    total = (x1.float() + x2.float()).to(x1.dtype)
    normalised, scale = rms_norm(total, gamma, epsilon)
    return normalised, scale, total


@computes("npu::npu_gemma_rms_norm")
@stands_for("_C_ascend::npu_gemma_rms_norm")
def gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return rms_norm(x, 1.0 + gamma.float(), epsilon)


@computes("npu::npu_swiglu")
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@computes("npu::npu_rotary_mul")
def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Tensor:
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x.float() * cos.float() + turned * sin.float()).to(x.dtype)


@stands_for("atb::_npu_matmul_add_fp32")
def matmul_add(x: Tensor, weight: Tensor, total: Tensor) -> None:
    """total += x^T weight; the worker's warm-up is its only caller."""
    total.add_(x.float().t() @ weight.float())


@writes("npu::npu_scatter_pa_kv_cache", "npu::_npu_reshape_and_cache")
def write_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    cache_mode: str = "Norm",
    **_: Any,
) -> None:
    """Rows of key and value [T, heads, head size] into slots [T]; a negative slot is padding."""
    assert cache_mode == "Norm", cache_mode
    rows = slot_mapping >= 0
    slots = slot_mapping[rows].long()
    for source, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(-1, *cache.shape[2:])
        flat[slots] = source[: len(slot_mapping)][rows].view(len(slots), *flat.shape[1:])


@computes("npu::npu_fused_infer_attention_score")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2**31 - 1,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Layout TND: query [T, heads, size], row ends cumulative.

    Without a block table keys and values are TND too and their ends cumulative; with one they lie
    in a cache [blocks, block size, heads * size], lengths per request.
    """
    assert input_layout == "TND", input_layout
    assert sparse_mode in (0, CAUSAL_RIGHT_DOWN, BAND), sparse_mode
    ends = [int(end) for end in actual_seq_lengths]
    lengths = [int(length) for length in actual_seq_lengths_kv]
    assert ends[-1] == len(query), (ends, len(query))  # the device refuses it (error 561002)
    assert len(lengths) >= len(ends), (lengths, ends)
    heads = num_key_value_heads or num_heads
    out = torch.zeros_like(query)
    for row, (first, last) in enumerate(pairwise([0, *ends])):
        if first == last:
            continue
        if block_table is None:
            span = slice(lengths[row - 1] if row else 0, lengths[row])
            keys, values = (x[span].view(-1, heads, query.shape[-1]) for x in (key, value))
        else:
            keys, values = (
                _paged(x, block_table[row], lengths[row], block_size, heads, query.shape[-1])
                for x in (key, value)
            )
        window = pre_tokens if sparse_mode == BAND else None
        masked = _mask(last - first, len(keys), window) if sparse_mode else None
        out[first:last] = _attend(query[first:last], keys, values, scale, masked)
    return out, None


def _paged(
    cache: Tensor, blocks: Tensor, length: int, block_size: int, heads: int, size: int
) -> Tensor:
    used = blocks[: -(-length // block_size)].long()
    return cache[used].reshape(-1, heads, size)[:length]


def _mask(queries: int, keys: int, window: int | None) -> Tensor:
    """True where a query may not look; the last query stands at the last key."""
    position = torch.arange(queries)[:, None] + keys - queries
    column = torch.arange(keys)[None]
    hidden = column > position
    return hidden if window is None else hidden | (column < position - window)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, masked: Tensor | None
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (query, key, value))
    scores = q @ k.repeat_interleave(groups, 0).transpose(1, 2) * scale
    if masked is not None:
        scores = scores.masked_fill(masked, float("-inf"))
    out = scores.softmax(-1) @ v.repeat_interleave(groups, 0)
    return out.transpose(0, 1).to(query.dtype)
