"""What each drafter of the zoo looks like, and how its trainable module is built.

DFlash, DSpark, DFlash 2 and EAGLE-3 are the `speculators` library's own model classes, so their
layers, losses and anchor sampling are the library's. MTP is the layer of that library in our own
multi-step loop (`drafters_mtp`); `DRAFTERS.md` says why.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tools.zoo.config import (
    HEAD_DIM,
    HIDDEN_SIZE,
    IM_END_ID,
    INTERMEDIATE_SIZE,
    MASK_ID,
    MAX_POSITIONS,
    NUM_HEADS,
    NUM_KV_HEADS,
    PAD_ID,
    RMS_EPS,
    ROPE_THETA,
    TARGET_KINDS,
    VOCAB_SIZE,
    TargetKind,
    target_shape,
)
from tools.zoo.modeling import Target

Method = Literal["mtp", "eagle3", "dflash", "dspark", "dflash2"]
METHODS: tuple[Method, ...] = ("mtp", "eagle3", "dflash", "dspark", "dflash2")
#: Methods that draft a block in one pass from an anchor; the others draft token by token.
BLOCK_METHODS: tuple[Method, ...] = ("dflash", "dspark", "dflash2")


@dataclass(frozen=True)
class DrafterSpec:
    """Sizes of one drafter.

    `aux_layer_ids` follow vLLM's convention: id `i` is the residual stream after `i` layers, so
    the last id reads the stream before the final norm. `num_draft_tokens` is K.
    """

    method: Method
    num_draft_tokens: int = 7
    aux_layer_ids: tuple[int, ...] = (1, 3, 4)
    draft_vocab_size: int = VOCAB_SIZE
    markov_rank: int = 32
    selector_rank: int = 32
    selector_top_k: int = 8
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    num_layers: int = 1
    intermediate_size: int = INTERMEDIATE_SIZE

    @property
    def samples_anchor(self) -> bool:
        """DSpark reads its first draft at the anchor row; DFlash rows sit at their own token."""
        return self.method == "dspark"

    @property
    def block_size(self) -> int:
        """Query rows per request: K, plus the anchor row where it predicts nothing."""
        return self.num_draft_tokens + (0 if self.samples_anchor else 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def drafter_spec(method: Method, num_draft_tokens: int = 7) -> DrafterSpec:
    """Return the zoo's sizes for `method`; EAGLE-3 drafts from half the vocabulary."""
    if method not in METHODS:
        raise ValueError(f"--method {method!r}: choose one of {', '.join(METHODS)}")
    vocab = VOCAB_SIZE // 2 if method == "eagle3" else VOCAB_SIZE
    spec = DrafterSpec(method, num_draft_tokens, draft_vocab_size=vocab)
    if method == "dflash":
        # Nothing after its layers corrects a slot, and a single layer cannot both find where the
        # anchor stood before and copy what followed there. Half the width keeps the zoo's size.
        return replace(spec, num_layers=2, intermediate_size=INTERMEDIATE_SIZE // 2)
    return spec


def target_kind(directory: Path) -> TargetKind:
    """Read from `config.json` whether a target directory holds the hybrid or the dense model."""
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"--target {directory}: no config.json; train the target first")
    architecture = (json.loads(path.read_text()).get("architectures") or ["none"])[0]
    kinds = {"Qwen3_5ForCausalLM": TARGET_KINDS[0], "Qwen3ForCausalLM": TARGET_KINDS[1]}
    if architecture not in kinds:
        raise ValueError(f"{path}: architecture {architecture!r} is not a zoo target")
    return kinds[architecture]


def load_frozen_target(directory: Path, device: torch.device) -> Target:
    """Load a target's bf16 weights; GDN decay parameters keep the float32 of the checkpoint."""
    target = Target(target_shape(target_kind(directory)))
    state = load_file(directory / "model.safetensors")
    own = {name: tensor for name, tensor in state.items() if not name.startswith("mtp.")}
    target.load_state_dict(own)
    decay = ("A_log", "dt_bias")
    for name, parameter in target.named_parameters():
        parameter.requires_grad_(False)
        if not name.endswith(decay):
            parameter.data = parameter.data.to(torch.bfloat16)
    return target.to(device).eval()


def disable_compilation() -> None:
    """Keep `speculators` eager: its forward passes are compiled on CUDA, and compiling costs
    longer than training a drafter of this size. Call before the library is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch._dynamo

    torch._dynamo.config.disable = True


def draft_vocab_mapping(counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Choose the `size` most frequent answer tokens as draft vocabulary.

    `counts`: [vocab] int64. Returns `d2t` [size] int64 (offset from draft id to target id) and
    `t2d` [vocab] bool. Ties and unused slots go to the lowest ids.
    """
    if size >= counts.numel():
        raise ValueError(f"draft vocabulary {size} must be smaller than {counts.numel()}")
    ranked = counts.clone()
    ranked[IM_END_ID] = counts.max() + 1
    kept = torch.sort(torch.argsort(ranked, descending=True, stable=True)[:size]).values
    t2d = torch.zeros(counts.numel(), dtype=torch.bool)
    t2d[kept] = True
    return kept - torch.arange(size), t2d


def _layer_config(spec: DrafterSpec) -> Any:
    """Configuration of the drafter's decoder layer: Llama for EAGLE-3, Qwen3 otherwise."""
    from transformers import LlamaConfig, Qwen3Config

    shared: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": RMS_EPS,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": IM_END_ID,
        "pad_token_id": PAD_ID,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attn_implementation": "sdpa",
    }
    return LlamaConfig(**shared) if spec.method == "eagle3" else Qwen3Config(**shared)


def _speculators_config(spec: DrafterSpec, target: Path) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=spec.method,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=spec.num_draft_tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(str(target)),
    )


def _block_config(spec: DrafterSpec, target: Path) -> Any:
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dflash2 import DFlash2SpeculatorConfig
    from speculators.models.dspark import DSparkSpeculatorConfig

    shared: dict[str, Any] = {
        "transformer_layer_config": _layer_config(spec),
        "draft_vocab_size": spec.draft_vocab_size,
        "block_size": spec.block_size,
        "aux_hidden_state_layer_ids": list(spec.aux_layer_ids),
        "mask_token_id": MASK_ID,
        "sample_from_anchor": spec.samples_anchor,
        "speculators_config": _speculators_config(spec, target),
    }
    if spec.method == "dspark":
        return DSparkSpeculatorConfig(**shared, markov_rank=spec.markov_rank)
    if spec.method == "dflash2":
        return DFlash2SpeculatorConfig(
            **shared,
            conv_kernel_size=spec.conv_kernel_size,
            conv_group_size=spec.conv_group_size,
            selector_rank=spec.selector_rank,
            selector_top_k=spec.selector_top_k,
        )
    return DFlashSpeculatorConfig(**shared)


def build_block_drafter(spec: DrafterSpec, target: Path) -> nn.Module:
    """Build DFlash, DSpark or DFlash 2 with the target's embedding, head and final norm."""
    from speculators.models.dflash import DFlashDraftModel
    from speculators.models.dflash2 import DFlash2DraftModel
    from speculators.models.dspark import DSparkDraftModel

    classes = {"dflash": DFlashDraftModel, "dspark": DSparkDraftModel, "dflash2": DFlash2DraftModel}
    model: Any = classes[spec.method](config=_block_config(spec, target))
    model.load_verifier_weights()
    module: nn.Module = model.float()
    return module


def build_eagle3(spec: DrafterSpec, target: Path, d2t: Tensor, t2d: Tensor) -> nn.Module:
    """Build EAGLE-3 over the draft vocabulary described by `d2t` and `t2d`."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.utils import resolve_verifier_norm_class

    config = Eagle3SpeculatorConfig(
        transformer_layer_config=_layer_config(spec),
        draft_vocab_size=spec.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(spec.aux_layer_ids),
        speculators_config=_speculators_config(spec, target),
    )
    model: Any = Eagle3DraftModel(config=config)
    # The class takes the draft layer's norm for the target's final norm, which is wrong for
    # Qwen3.5: its scale is `1 + weight`.
    model.verifier_norm = resolve_verifier_norm_class(config)(HIDDEN_SIZE, eps=RMS_EPS)
    model.load_vocab_mappings(t2d, d2t)
    model.load_verifier_weights()
    module: nn.Module = model.float()
    return module


def build_drafter(
    spec: DrafterSpec, target: Path, mapping: tuple[Tensor, Tensor] | None = None
) -> nn.Module:
    """Build the trainable module of `spec` for the target in `target` (float32, on the CPU).

    `mapping` is `(d2t, t2d)` of `draft_vocab_mapping` and is needed by EAGLE-3 alone.
    """
    disable_compilation()
    if spec.method == "mtp":
        from tools.zoo.drafters_mtp import MtpDrafter

        if target_kind(target) != "hybrid":
            raise ValueError("--method mtp: only the hybrid target's architecture has MTP layers")
        return MtpDrafter(spec, target)
    if spec.method == "eagle3":
        if mapping is None:
            raise ValueError("EAGLE-3 needs the draft vocabulary mapping")
        return build_eagle3(spec, target, *mapping)
    return build_block_drafter(spec, target)


def trainable_parameters(model: nn.Module) -> int:
    """Number of parameters that the optimizer changes."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def to_serving_precision(model: nn.Module) -> nn.Module:
    """Cast parameters to bf16 as vLLM loads them; rotary frequencies stay float32 buffers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval()
