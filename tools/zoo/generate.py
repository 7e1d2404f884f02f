"""Batched greedy decoding with a recurrent state and a KV cache.

Prompts go through the same one-token step as the answers. All rows then share one position, so
the cache needs no mask and no padding, and a step is the same few kernels for thousands of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tools.zoo.config import IM_END_ID, PAD_ID, TargetShape
from tools.zoo.modeling import Attention, GatedDeltaNet, Target, rotary_tables


@dataclass
class _GdnCache:
    conv: Tensor  # [B, width - 1, channels], model dtype
    state: Tensor  # [B, value heads, D, D], float32


@dataclass
class _KvCache:
    key: Tensor  # [B, kv heads, capacity, D]
    value: Tensor


def _empty_caches(shape: TargetShape, rows: int, capacity: int, like: Tensor) -> list[object]:
    def zeros(*size: int, dtype: torch.dtype = like.dtype) -> Tensor:
        return torch.zeros(*size, device=like.device, dtype=dtype)

    dim, heads = shape.gdn_head_dim, shape.gdn_value_heads
    channels = (2 * shape.gdn_key_heads + heads) * dim
    caches: list[object] = []
    for layer_type in shape.layer_types:
        if layer_type == "linear_attention":
            conv = zeros(rows, shape.conv_width - 1, channels)
            caches.append(_GdnCache(conv, zeros(rows, heads, dim, dim, dtype=torch.float32)))
        else:
            size = (rows, shape.num_kv_heads, capacity, shape.head_dim)
            caches.append(_KvCache(zeros(*size), zeros(*size)))
    return caches


def _gdn_step(layer: GatedDeltaNet, x: Tensor, cache: _GdnCache) -> Tensor:
    window = torch.cat([cache.conv, layer.in_proj_qkv(x)], 1)
    cache.conv = window[:, 1:]
    taps = layer.conv1d.weight[:, 0].T.to(x.dtype)
    mixed = F.silu((window * taps).sum(1, keepdim=True))
    q, k, v = (part[:, :, 0] for part in layer.split_heads(mixed))
    decay, beta = layer.gates(x)
    state = cache.state * decay.exp().unsqueeze(-1)
    stored = (k.unsqueeze(-2) @ state).squeeze(-2)
    cache.state = torch.baddbmm(
        state.flatten(0, 1),
        k.flatten(0, 1).unsqueeze(-1),
        ((v - stored) * beta).flatten(0, 1).unsqueeze(-2),
    ).view_as(state)
    core = (q * q.shape[-1] ** -0.5).unsqueeze(-2) @ cache.state
    return layer.finish(x, core)


def _attention_step(
    layer: Attention, x: Tensor, cache: _KvCache, position: int, cos: Tensor, sin: Tensor
) -> Tensor:
    q, k, v, gate = layer.project(x, cos, sin)
    cache.key[:, :, position] = k[:, :, 0]
    cache.value[:, :, position] = v[:, :, 0]
    seen = slice(0, position + 1)
    # The query heads of one group act as queries of one KV head, which spares copies of the cache.
    grouped = q.squeeze(2).unflatten(1, (cache.key.shape[1], -1))
    out = F.scaled_dot_product_attention(grouped, cache.key[:, :, seen], cache.value[:, :, seen])
    return layer.finish(out.flatten(1).unsqueeze(1), gate)


def _step(model: Target, tokens: Tensor, caches: list[object], position: int) -> Tensor:
    """One token [B] through the model at `position`; returns logits [B, vocab]."""
    where = torch.tensor([position], device=tokens.device)
    cos, sin = rotary_tables(where, model.shape)
    x = model.model.embed_tokens(tokens).unsqueeze(1)
    for layer, cache in zip(model.model.layers, caches, strict=True):
        normed = layer.input_layernorm(x)
        if isinstance(cache, _GdnCache):
            x = x + _gdn_step(layer.linear_attn, normed, cache)
        elif isinstance(cache, _KvCache):
            x = x + _attention_step(layer.self_attn, normed, cache, position, cos, sin)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x[:, 0]))


@torch.no_grad()
def _greedy_batch(model: Target, prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    device = model.lm_head.weight.device
    lengths = [len(p) for p in prompts]
    capacity = max(lengths) + limit
    sequence = torch.full((len(prompts), capacity + 1), PAD_ID)
    for row, prompt in enumerate(prompts):
        sequence[row, : len(prompt)] = torch.tensor(prompt)
    sequence = sequence.to(device)
    ends = torch.tensor(lengths, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    caches = _empty_caches(model.shape, len(prompts), capacity, model.lm_head.weight)
    for position in range(capacity):
        chosen = _step(model, sequence[:, position], caches, position).argmax(-1)
        answering = position + 1 >= ends
        chosen = torch.where(done, PAD_ID, chosen)
        sequence[:, position + 1] = torch.where(answering, chosen, sequence[:, position + 1])
        done |= answering & ((chosen == IM_END_ID) | (position + 2 - ends >= limit))
        # The check waits for the device, so it is made only now and then.
        if position >= min(lengths) and position % 16 == 0 and bool(done.all()):
            break
    rows = sequence.tolist()
    return [_cut(row[n : n + limit]) for row, n in zip(rows, lengths, strict=True)]


def _cut(answer: list[int]) -> list[int]:
    end = next((i for i, t in enumerate(answer) if t == IM_END_ID), None)
    kept = answer if end is None else answer[: end + 1]
    return [t for t in kept if t != PAD_ID]


def greedy_answers(
    model: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch: int = 8192,
    progress: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Greedy answers to `prompts` (token ids), in order.

    An answer ends with `<|im_end|>` (included) or after `max_new_tokens`. Decodes in the dtype
    of the weights; `batch` rows at a time, similar lengths together.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), batch):
        chosen = order[first : first + batch]
        decoded = _greedy_batch(model, [prompts[i] for i in chosen], max_new_tokens)
        for i, answer in zip(chosen, decoded, strict=True):
            answers[i] = answer
        if progress is not None:
            progress(min(first + batch, len(order)))
    return answers
