"""The replay state layout in vLLM's cache: one committed state a request and a ring of rows.

vLLM's own layout keeps K + 1 states a request, and verification writes one for every row. Here a
GDN layer's page holds, behind convolution window and state, the ring of `kernels/gdn_verify`; a
request takes one page. The layer is registered in place of upstream's (`PluggableLayer`), prompt
chunks run upstream's code on the committed state, and only the model classes' page sizes have to
be replaced. Cursors: `replay_steps.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_ascend_spec.engine.patching import Replacement, in_place_of
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.options import CONFIG_KEY, Options

if TYPE_CHECKING:  # declared before torch is wanted
    import torch
    from torch import Tensor

    from vllm_ascend_spec.kernels.gdn_verify.layout import ReplayCache, ReplayLayout

logger = logging.getLogger("vllm.ascend_spec.replay")

# Text configs whose GDN layers are all of the class that is registered here.
MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
_MODELS = "vllm.model_executor.models"
_PAGE_SIZES = (
    f"{_MODELS}.qwen3_5:Qwen3_5ForCausalLMBase",
    f"{_MODELS}.qwen3_5:Qwen3_5ForConditionalGeneration",
    f"{_MODELS}.qwen3_next:Qwen3NextForCausalLM",
)
# A ring of 32 lets a request with K = 7 be flushed every fifth step or so; each flush writes a
# whole state, each row of the ring costs 1 % of one.
RING_ROWS = 32


# -- whether it is used -------------------------------------------------------------------------


def planned(vllm_config: Any) -> ReplayLayout | None:
    """Shapes of a layer's replay cache on one rank; None where vLLM's native layout is kept.

    Raises:
        UserError: `ascend_spec.gdn_state` is "replay" and the engine cannot have it.
    """
    wanted = Options.from_additional_config(vllm_config.additional_config).gdn_state
    if wanted == "native" or not _has_gdn(vllm_config):
        return None
    why_not = obstacle(vllm_config) or (_not_chosen(vllm_config) if wanted == "auto" else None)
    if why_not is None:
        layout = _layout(vllm_config)
        _say_once(_gain(layout, int(vllm_config.speculative_config.num_speculative_tokens)))
        return layout
    if wanted == "replay":
        raise UserError(
            f'--additional-config: {CONFIG_KEY}.gdn_state is "replay", and {why_not}. Set it to '
            '"native" or leave it out.'
        )
    _say_once(f"GDN states in vLLM's native layout: {why_not}")
    return None


@cache
def _say_once(line: str) -> None:
    logger.info(line)


def _gain(layout: ReplayLayout, draft_tokens: int) -> str:
    sizes = layout.slot_bytes()
    native = sizes["state"] * (draft_tokens + 1)
    return (
        f"GDN states in the replay layout: {sum(sizes.values()) >> 10} KiB a request and layer "
        f"instead of {native >> 10}, {native / sum(sizes.values()):.1f} times the requests"
    )


def _has_gdn(vllm_config: Any) -> bool:
    model = vllm_config.model_config
    return model is not None and model.hf_text_config.model_type in MODEL_TYPES


def obstacle(vllm_config: Any) -> str | None:
    """Why the engine cannot keep its states this way, in words that name the option."""
    import torch

    from vllm_ascend_spec.kernels.gdn_verify.layout import MAX_ROWS

    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if speculative is None:
        return "nothing is drafted (no --speculative-config)"
    rows = int(speculative.num_speculative_tokens) + 1
    text = vllm_config.model_config.hf_text_config
    sizes = (text.linear_key_head_dim, text.linear_value_head_dim)
    if rows > MAX_ROWS:
        return f"num_speculative_tokens is {rows - 1}, more than {MAX_ROWS - 1}"
    mode = vllm_config.cache_config.mamba_cache_mode
    if mode not in ("none", "align"):
        return f"--mamba-cache-mode is {mode}, not align (or --no-enable-prefix-caching)"
    if parallel.pipeline_parallel_size > 1:
        return "accepted counts arrive late with --pipeline-parallel-size above 1"
    if vllm_config.kv_transfer_config is not None:
        return "a transferred page would leave its pending rows' counts behind (--kv-transfer-...)"
    if vllm_config.model_config.dtype != torch.bfloat16:
        return f"the ring holds bfloat16 keys and --dtype is {vllm_config.model_config.dtype}"
    if _dtypes(vllm_config)[1] not in (torch.bfloat16, torch.float32):
        return f"--mamba-ssm-cache-dtype is {_dtypes(vllm_config)[1]}, not bfloat16 or float32"
    if any(size < 16 or size & (size - 1) for size in sizes):
        return f"its head dimensions are {sizes}, not powers of two of at least 16"
    return None


def _not_chosen(vllm_config: Any) -> str | None:
    """Why "auto" does not choose it for this engine, though it could be had."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() and current_platform.is_device_capability(90)):
        return 'replay kernels are timed on compute capability 9.0 alone ("replay" asks for them)'
    return None


def _dtypes(vllm_config: Any) -> tuple[torch.dtype, ...]:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator

    cache = vllm_config.cache_config
    return tuple(
        MambaStateDtypeCalculator.gated_delta_net_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )
    )


def _layout(vllm_config: Any) -> ReplayLayout:
    from vllm_ascend_spec.kernels.gdn_verify.layout import ReplayLayout

    text = vllm_config.model_config.hf_text_config
    ranks = vllm_config.parallel_config.tensor_parallel_size
    rows = int(vllm_config.speculative_config.num_speculative_tokens) + 1
    return ReplayLayout(
        key_heads=text.linear_num_key_heads // ranks,
        value_heads=text.linear_num_value_heads // ranks,
        key_dim=text.linear_key_head_dim,
        value_dim=text.linear_value_head_dim,
        ring_rows=max(RING_ROWS, 2 * rows),
        state_dtype=_dtypes(vllm_config)[1],
    )


def ring(layout: ReplayLayout) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    """Shapes and dtypes that a page holds behind the convolution window and the state."""
    parts = [part for name, part in layout.shapes().items() if name != "state"]
    return tuple(shape for shape, _ in parts), tuple(dtype for _, dtype in parts)


def ring_views(pages: Tensor, offset: int, layout: ReplayLayout) -> Iterator[Tensor]:
    """The ring's tensors. pages: int8 [slots, bytes]; offset: where the ring begins in each."""
    for shape, dtype in zip(*ring(layout), strict=True):
        size = math.prod(shape) * dtype.itemsize
        yield pages[:, offset : offset + size].view(dtype).view(-1, *shape)
        offset += size


def replacements() -> tuple[Replacement, ...]:
    """Page sizes, which vLLM asks of the model's class before there is a layer."""
    return tuple(
        Replacement(
            target=f"{model}.get_mamba_state_{kind}_from_config",
            reason="a page holds the ring of pending rows, too",
            make=make,
        )
        for model in _PAGE_SIZES
        for kind, make in (("shape", _with_ring(0)), ("dtype", _with_ring(1)))
    )


def _with_ring(part: int) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        @in_place_of(original)
        def of_config(cls: Any, vllm_config: Any) -> Any:
            layout = planned(vllm_config)
            base = tuple(original(cls, vllm_config))
            return base if layout is None else (*base, *ring(layout)[part])

        return of_config

    return make


# -- the layer ----------------------------------------------------------------------------------


def register_layer(module: ModuleType) -> None:
    """Make vLLM build the layer below wherever a model asks for a GDN layer."""
    from vllm.model_executor.custom_op import PluggableLayer

    upstream = module.QwenGatedDeltaNetAttention
    PluggableLayer.register_oot(name=upstream.__name__)(layer_class(upstream))


def layer_class(upstream: type) -> type:
    """The layer to register in place of vLLM's `QwenGatedDeltaNetAttention`."""

    class ReplayGatedDeltaNetAttention(upstream):
        """vLLM's layer, with verification in the replay layout where that is planned."""

        def __init__(self, config: Any, vllm_config: Any, *args: Any, **named: Any) -> None:
            # Asked for by upstream's constructor, before a module takes attributes.
            self.__dict__["ascend_spec_replay"] = planned(vllm_config)
            self.__dict__["ascend_spec_steps"] = None  # set by `replay_steps`
            self.__dict__["ascend_spec_adaptive"] = bool(
                vllm_config.speculative_config
                and vllm_config.speculative_config.enable_adaptive_verification
            )
            super().__init__(config, vllm_config, *args, **named)

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            """One page a request; the native layout takes one for every draft token besides."""
            spec, layout = super().get_kv_cache_spec(vllm_config), self.ascend_spec_replay
            if layout is None:
                return spec
            shapes, dtypes = ring(layout)
            return replace(
                spec,
                shapes=(*spec.shapes, *shapes),
                dtypes=(*spec.dtypes, *dtypes),
                num_speculative_blocks=0,
            )

        def bind_kv_cache(self, kv_cache: Tensor) -> None:
            """Views of the pages: convolution window and state as upstream, then the ring."""
            super().bind_kv_cache(kv_cache)
            if self.ascend_spec_replay is not None:
                bound: tuple[Tensor, ...] = vars(self)["kv_cache"]
                used = sum(part[0].nbytes for part in bound)
                pages = kv_cache.squeeze(dim=(1, 2))
                self.kv_cache = (*bound, *ring_views(pages, used, self.ascend_spec_replay))

        def _can_use_fused_gdn_mtp_decode(self, attn_metadata: Any) -> bool:
            if self.ascend_spec_replay is not None:
                return attn_metadata.spec_sequence_masks is not None
            # Upstream's fused kernel is not known to be right for rows of other lengths.
            if self.ascend_spec_adaptive:
                return False
            return bool(super()._can_use_fused_gdn_mtp_decode(attn_metadata))

        def _forward_core_decode_spec_fused_norm(self, **given: Any) -> None:
            """Steps that only verify, where upstream would fuse: no copies of the gates."""
            if self.ascend_spec_replay is None:
                super()._forward_core_decode_spec_fused_norm(**given)
                return
            metadata = given["attn_metadata"]
            rows = slice(metadata.num_actual_tokens)
            mixed_qkv, a, b = (given[name][rows] for name in ("mixed_qkv", "a", "b"))
            out, gate = given["core_attn_out"][rows], given["output_gate"][rows]
            verify(self, metadata, mixed_qkv, a, b, out)
            _norm(self, out, gate)

        def _forward_core(
            self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor
        ) -> None:
            if not _verify_and_pass(self, super()._forward_core, mixed_qkv, b, a, core_attn_out):
                super()._forward_core(mixed_qkv, b, a, core_attn_out)

    return ReplayGatedDeltaNetAttention


def cache_of(layer: Any) -> ReplayCache:
    """The layer's state and ring, as views of its pages."""
    from vllm_ascend_spec.kernels.gdn_verify.layout import ReplayCache

    return ReplayCache(*layer.kv_cache[1:])


def _verify_and_pass(
    layer: Any, upstream: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor
) -> bool:
    """Run rows that verify, let `upstream` run what else the step holds; False if none verifies."""
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    metadata = (
        context.attn_metadata.get(layer.prefix)
        if layer.ascend_spec_replay is not None and isinstance(context.attn_metadata, dict)
        else None
    )
    if metadata is None or metadata.spec_sequence_masks is None:
        return False
    if metadata.num_prefills == 0:
        rows = metadata.num_actual_tokens
        verify(layer, metadata, mixed_qkv[:rows], a[:rows], b[:rows], out[:rows])
        return True
    spec, prompt = metadata.spec_token_indx, metadata.non_spec_token_indx
    verified = out.new_empty(len(spec), *out.shape[1:])
    verify(layer, metadata, mixed_qkv[spec], a[spec], b[spec], verified)
    prompted = out.new_empty(len(prompt), *out.shape[1:])
    every_layer = context.attn_metadata
    context.attn_metadata = {layer.prefix: metadata.prompt_part}
    try:
        upstream(mixed_qkv[prompt], b[prompt], a[prompt], prompted)
    finally:
        context.attn_metadata = every_layer
    out.index_copy_(0, spec, verified)
    out.index_copy_(0, prompt, prompted)
    return True


def verify(layer: Any, metadata: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Convolution and recurrence of rows that verify.

    Shapes: mixed_qkv [rows, conv_dim]; a, b [rows, HV]; out [rows, HV, dv], written.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    from vllm_ascend_spec.kernels import ops

    requests = metadata.num_spec_decodes
    slots = metadata.spec_state_indices_tensor[:requests, 0].contiguous()  # no copy in graphs
    boundaries = metadata.spec_query_start_loc[: requests + 1]
    longest = layer.num_spec + 1
    windows = layer.kv_cache[0]
    convolved = causal_conv1d_update(
        mixed_qkv,
        windows if is_conv_state_dim_first() else windows.transpose(-1, -2),
        layer.conv1d.weight.flatten(1),
        layer.conv1d.bias,
        layer.activation,
        conv_state_indices=slots,
        num_accepted_tokens=metadata.num_accepted_tokens[:requests],
        query_start_loc=boundaries,
        max_query_len=longest,
        validate_data=False,
    )
    ops.replay_verify(
        *split_heads(layer, convolved), a, b, layer.A_log, layer.dt_bias, boundaries, slots,
        metadata.verify_step.narrow(requests), cache_of(layer), out, max_rows=longest,
    )  # fmt: skip


def _norm(layer: Any, out: Tensor, gate: Tensor) -> None:
    """The layer's norm, in place. Shapes: [rows, HV, dv]; gate is a view of the projection."""
    from vllm_ascend_spec.kernels import ops

    norm = layer.norm
    if norm.bias is None and norm.group_size is None and norm.norm_before_gate:
        ops.gated_norm(out, gate, norm.weight, norm.eps, norm.activation)
    else:
        layer._rms_norm_gated_cuda(out, gate, out)


def split_heads(layer: Any, mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, conv_dim] -> q, k [rows, HK, dk] and v [rows, HV, dv], all views."""
    keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    q, k, v = mixed_qkv.split([keys, keys, values], dim=-1)
    return (
        q.unflatten(-1, (-1, layer.head_k_dim)),
        k.unflatten(-1, (-1, layer.head_k_dim)),
        v.unflatten(-1, (-1, layer.head_v_dim)),
    )
