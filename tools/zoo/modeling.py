"""Plain-torch Qwen3.5 text (GDN + gated attention) and Qwen3 targets for training.

The same weights in transformers' `Qwen3_5ForCausalLM` / `Qwen3ForCausalLM` give the same
logits; parameter names are theirs, so an export only casts. The gated delta rule runs in its
chunked matrix form (Yang et al., "Gated Delta Networks", 2024): per chunk of 64 tokens the
sequential rule becomes one unit-triangular inverse and a handful of batched matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tools.zoo.config import TargetShape

CHUNK = 64
# exp of this is zero in float32, so a document boundary forgets the state completely.
_FORGET = -120.0


@dataclass
class TargetOutput:
    """Result of a forward pass over `B` rows of `T` tokens.

    `logits`: [B, T, vocab]. `hidden`: residual stream, [B, T, hidden] each; entry 0 is the token
    embedding and entry i the stream after layer i, i.e. what vLLM captures for auxiliary layer
    id i. `final`: the stream after the last norm, which `lm_head` reads.
    """

    logits: Tensor
    hidden: list[Tensor]
    final: Tensor


@dataclass
class Packing:
    """Where documents begin in packed rows, so that none sees its neighbour.

    `mask`: [B, 1, T, T] bool, attention allowed. `starts`: [B, T] bool, first tokens.
    `same_document[d - 1]`: [B, T, 1] bool, whether the token `d` earlier is of the same document.
    """

    mask: Tensor
    starts: Tensor
    same_document: list[Tensor]

    @classmethod
    def of(cls, segments: Tensor, conv_width: int) -> Packing:
        """Build from `segments` [B, T], a number per document."""
        positions = torch.arange(segments.shape[1], device=segments.device)
        same = segments.unsqueeze(2) == segments.unsqueeze(1)
        mask = (same & (positions[:, None] >= positions)).unsqueeze(1)
        borders = [
            F.pad(segments[:, back:] == segments[:, :-back], (back, 0)).unsqueeze(-1)
            for back in range(1, conv_width)
        ]
        return cls(mask, ~borders[0].squeeze(-1), borders)


class RMSNorm(nn.Module):
    """RMS norm in float32; with `zero_centred` the scale is `1 + weight` (Qwen3.5)."""

    def __init__(self, size: int, eps: float, zero_centred: bool) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centred = zero_centred
        self.weight = nn.Parameter(torch.zeros(size) if zero_centred else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.float()
        scale = scale + 1.0 if self.zero_centred else scale
        return F.rms_norm(x.float(), (x.shape[-1],), scale, self.eps).to(x.dtype)


class _UnitTriangularInverse(torch.autograd.Function):
    """Inverse of `I + L` for strictly lower triangular `L` of shape [..., 64, 64], float32.

    Diagonal 8x8 blocks use the nilpotent product, then neighbours are merged block-wise. A
    product over the whole chunk would overflow float32 when keys repeat.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, lower: Tensor) -> Tensor:
        n, size = lower.shape[-1], 8
        inverse = _nilpotent_inverse(_diagonal_blocks(lower, size))
        while size < n:
            top, bottom = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            blocks = _diagonal_blocks(lower, 2 * size)
            corner = -(bottom @ blocks[..., size:, :size] @ top)
            upper_row = torch.cat([top, torch.zeros_like(top)], -1)
            inverse = torch.cat([upper_row, torch.cat([corner, bottom], -1)], -2)
            size *= 2
        inverse = inverse.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """[..., n, n] -> the diagonal blocks [..., n / size, size, size]."""
    n = matrix.shape[-1] // size
    view = matrix.unflatten(-1, (n, size)).unflatten(-3, (n, size))
    return view.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).contiguous()


def _nilpotent_inverse(lower: Tensor) -> Tensor:
    eye = torch.eye(lower.shape[-1], device=lower.device, dtype=lower.dtype)
    power = -lower
    result = eye + power
    for _ in range(2):
        power = power @ power
        result = result + result @ power
    return result


def chunked_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule over whole sequences, starting from a zero state.

    `q`, `k`, `v`: [B, H, T, D] float32, `q` and `k` l2-normalised; `g` (log decay, <= 0) and
    `beta`: [B, H, T] float32. Returns [B, H, T, D] float32.
    """
    tokens, dim = q.shape[2], q.shape[3]
    pad = -tokens % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, CHUNK)) for x in (g, beta))
    decay = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    gap = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    q = q * dim**-0.5
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.transpose(-1, -2) * gap).tril(-1)
    inverse = _UnitTriangularInverse.apply(system)
    new_values = inverse @ (v * beta.unsqueeze(-1))
    read_keys = inverse @ (k_beta * decay.exp().unsqueeze(-1))
    within = q @ k.transpose(-1, -2) * gap
    q_state = q * decay.exp().unsqueeze(-1)
    k_state = (k * (decay[..., -1:] - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    carry = decay[..., -1].exp()[..., None, None]
    state = torch.zeros(*q.shape[:2], dim, dim, device=q.device, dtype=q.dtype)
    outputs = []
    for c in range(q.shape[2]):
        written = new_values[:, :, c] - read_keys[:, :, c] @ state
        outputs.append(q_state[:, :, c] @ state + within[:, :, c] @ written)
        state = state * carry[:, :, c] + k_state[:, :, c] @ written
    return torch.cat(outputs, 2)[:, :, :tokens]


def l2_normalise(x: Tensor) -> Tensor:
    """Scale the last dimension to length one; epsilon as in the FLA kernels that vLLM runs."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """[B, heads, T, D] -> [B, heads * times, T, D], each head `times` times in a row."""
    return x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


class GatedDeltaNet(nn.Module):
    """Qwen3.5's linear-attention layer."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.key_dim = shape.gdn_key_heads * shape.gdn_head_dim
        self.value_dim = shape.gdn_value_heads * shape.gdn_head_dim
        channels = 2 * self.key_dim + self.value_dim
        hidden, heads = shape.hidden_size, shape.gdn_value_heads
        self.conv1d = nn.Conv1d(channels, channels, shape.conv_width, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.5, 8.0).log())
        # softplus(-3) ~ 0.05: a new layer remembers a few dozen tokens instead of one.
        self.dt_bias = nn.Parameter(torch.full((heads,), -3.0))
        self.norm = RMSNorm(shape.gdn_head_dim, shape.rms_eps, zero_centred=False)
        self.out_proj = nn.Linear(self.value_dim, hidden, bias=False)
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)

    def split_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, channels] after the convolution -> q, k, v [B, value heads, T, D] float32."""
        dims = [self.key_dim, self.key_dim, self.value_dim]
        q, k, v = (
            x.unflatten(-1, (-1, self.shape.gdn_head_dim)).transpose(1, 2).float()
            for x in mixed.split(dims, -1)
        )
        repeat = self.shape.gdn_value_heads // self.shape.gdn_key_heads
        q, k = (repeat_heads(l2_normalise(x), repeat) for x in (q, k))
        return q, k, v

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, hidden] -> log decay and beta, each [B, value heads, T] float32."""
        raw = self.in_proj_a(x).float() + self.dt_bias.float()
        decay = -self.A_log.float().exp() * F.softplus(raw)
        return decay.transpose(1, 2), self.in_proj_b(x).float().sigmoid().transpose(1, 2)

    def finish(self, x: Tensor, core: Tensor) -> Tensor:
        """Gated norm and output projection of `core` [B, value heads, T, D]."""
        z = self.in_proj_z(x).unflatten(-1, (-1, self.shape.gdn_head_dim))
        normed = self.norm(core.transpose(1, 2)) * F.silu(z.float())
        return self.out_proj(normed.flatten(-2).to(z.dtype))

    def convolve(self, x: Tensor, packing: Packing | None) -> Tensor:
        """Causal depthwise convolution as shifted products: [B, T, C] -> [B, T, C]."""
        width, tokens = self.shape.conv_width, x.shape[1]
        taps = self.conv1d.weight[:, 0].to(x.dtype)
        padded = F.pad(x, (0, 0, width - 1, 0))
        mixed = x * taps[:, -1]
        for back in range(1, width):
            first = width - 1 - back
            earlier = padded[:, first : first + tokens]
            if packing is not None:
                earlier = earlier * packing.same_document[back - 1].to(x.dtype)
            mixed = mixed + earlier * taps[:, first]
        return F.silu(mixed)

    def forward(self, x: Tensor, packing: Packing | None) -> Tensor:
        mixed = self.convolve(self.in_proj_qkv(x), packing)
        decay, beta = self.gates(x)
        if packing is not None:
            decay = decay.masked_fill(packing.starts.unsqueeze(1), _FORGET)
        with torch.autocast(x.device.type, enabled=False):
            core = chunked_gated_delta_rule(*self.split_heads(mixed), decay, beta)
        return self.finish(x, core)


def rotary_tables(positions: Tensor, shape: TargetShape) -> tuple[Tensor, Tensor]:
    """cos and sin of shape [T, rotary_dim], float32, for `positions` [T]."""
    steps = torch.arange(0, shape.rotary_dim, 2, device=positions.device).float()
    frequency = 1.0 / shape.rope_theta ** (steps / shape.rotary_dim)
    angle = positions.float()[:, None] * frequency
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotary_dim` channels of `x` [B, heads, T, D] (half-split pairing)."""
    turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.float().chunk(2, -1)
    turned_out = turned.float() * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned_out.to(x.dtype), kept], -1)


class Attention(nn.Module):
    """Grouped-query attention with per-head norms; Qwen3.5 also gates its output."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, dim = shape.hidden_size, shape.head_dim
        q_out = shape.num_heads * dim * (2 if shape.gated_attention else 1)
        self.q_proj = nn.Linear(hidden, q_out, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * dim, hidden, bias=False)
        self.q_norm = RMSNorm(dim, shape.rms_eps, shape.gated_attention)
        self.k_norm = RMSNorm(dim, shape.rms_eps, shape.gated_attention)

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return rotated q, k and v [B, heads, T, D] and the output gate [B, T, heads * D]."""
        dim, gate = self.shape.head_dim, None
        q = self.q_proj(x).unflatten(-1, (self.shape.num_heads, -1))
        if self.shape.gated_attention:
            q, gate = q.chunk(2, -1)
            gate = gate.flatten(-2)
        k = self.k_proj(x).unflatten(-1, (-1, dim))
        v = self.v_proj(x).unflatten(-1, (-1, dim)).transpose(1, 2)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v, gate

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of q over k and v, causal without a mask; returns [B, T, heads * D]."""
        repeat = self.shape.num_heads // self.shape.num_kv_heads
        k, v = repeat_heads(k, repeat), repeat_heads(v, repeat)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return out.transpose(1, 2).flatten(-2)

    def finish(self, out: Tensor, gate: Tensor | None) -> Tensor:
        return self.o_proj(out if gate is None else out * gate.sigmoid())

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v, gate = self.project(x, cos, sin)
        return self.finish(self.attend(q, k, v, mask), gate)


class SwiGLU(nn.Module):
    """Gated MLP."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm block around a GDN or attention mixer."""

    def __init__(self, shape: TargetShape, layer_type: str) -> None:
        super().__init__()
        self.is_gdn = layer_type == "linear_attention"
        if self.is_gdn:
            self.linear_attn = GatedDeltaNet(shape)
        else:
            self.self_attn = Attention(shape)
        self.mlp = SwiGLU(shape)
        norm = (shape.hidden_size, shape.rms_eps, shape.gated_attention)
        self.input_layernorm = RMSNorm(*norm)
        self.post_attention_layernorm = RMSNorm(*norm)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packing: Packing | None) -> Tensor:
        normed = self.input_layernorm(x)
        mixed = (
            self.linear_attn(normed, packing)
            if self.is_gdn
            else self.self_attn(normed, cos, sin, packing.mask if packing else None)
        )
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and final norm (the `model.` prefix of the checkpoint)."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape, t) for t in shape.layer_types)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_eps, shape.gated_attention)


class Target(nn.Module):
    """A zoo target: `Qwen3_5ForCausalLM` (hybrid) or `Qwen3ForCausalLM` (dense) by `shape`."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> TargetOutput:
        """Run `tokens` [B, T] int64. `segments` [B, T] numbers packed documents; attention,
        GDN state and convolution then stop at their borders."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rotary_tables(positions, self.shape)
        packing = None if segments is None else Packing.of(segments, self.shape.conv_width)
        hidden = [self.model.embed_tokens(tokens)]
        for layer in self.model.layers:
            hidden.append(layer(hidden[-1], cos, sin, packing))
        final = self.model.norm(hidden[-1])
        return TargetOutput(self.lm_head(final), hidden, final)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5 / 2)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)
    elif isinstance(module, GatedDeltaNet):
        nn.init.uniform_(module.conv1d.weight, -0.5, 0.5)
