"""Writes trained drafters in the checkpoint formats that vLLM 0.32 loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tools.zoo.config import (
    HEAD_DIM,
    HIDDEN_SIZE,
    IM_END_ID,
    MASK_ID,
    MAX_POSITIONS,
    NUM_HEADS,
    NUM_KV_HEADS,
    PAD_ID,
    RMS_EPS,
    ROPE_THETA,
    VOCAB_SIZE,
)
from tools.zoo.drafters import DrafterSpec
from tools.zoo.drafters_mtp import MtpDrafter

_ARCHITECTURES = {
    "eagle3": "LlamaForCausalLMEagle3",
    "dflash": "DFlashDraftModel",
    "dspark": "Qwen3DSparkModel",
    "dflash2": "DFlash2DraftModel",
}
#: vLLM takes these from the target, so a checkpoint leaves them out.
_SHARED_WITH_TARGET = ("embed_tokens.", "verifier_norm.", "verifier_lm_head.", "t2d")


def drafter_config(spec: DrafterSpec) -> dict[str, Any]:
    """Return the `config.json` contents of a drafter that is its own checkpoint (not MTP).

    `target_layer_ids` count from the layer, vLLM's auxiliary ids from the layer's output, hence
    the difference of one.
    """
    target_layers = [i - 1 for i in spec.aux_layer_ids]
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[spec.method]],
        "model_type": "llama" if spec.method == "eagle3" else "qwen3",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": spec.draft_vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "target_hidden_size": HIDDEN_SIZE,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": RMS_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": IM_END_ID,
        "pad_token_id": PAD_ID,
    }
    if spec.method == "eagle3":
        config["eagle_aux_hidden_state_layer_ids"] = list(spec.aux_layer_ids)
        return config
    config["block_size"] = spec.block_size
    if spec.method == "dspark":
        config.update(
            target_layer_ids=target_layers,
            mask_token_id=MASK_ID,
            markov_rank=spec.markov_rank,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
            sample_from_anchor=True,
        )
        return config
    config["dflash_config"] = {"mask_token_id": MASK_ID, "target_layer_ids": target_layers}
    if spec.method == "dflash2":
        config["dflash_config"].update(
            conv_kernel_size=spec.conv_kernel_size,
            conv_group_size=spec.conv_group_size,
            selector_rank=spec.selector_rank,
            selector_top_k=spec.selector_top_k,
        )
    return config


def drafter_weights(model: nn.Module, spec: DrafterSpec) -> dict[str, Tensor]:
    """Return the tensors of a drafter's checkpoint, bf16 except ids and the confidence head."""
    full_head = spec.draft_vocab_size == VOCAB_SIZE
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(_SHARED_WITH_TARGET) or (full_head and name.startswith("lm_head.")):
            continue
        keep = not tensor.is_floating_point() or name.startswith("confidence_head.")
        weights[name] = tensor.detach().cpu().to(tensor.dtype if keep else torch.bfloat16)
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def export_drafter(model: nn.Module, spec: DrafterSpec, target: Path, out: Path) -> int:
    """Write the checkpoint to `out`; returns the number of new parameters in it.

    An MTP layer belongs to its target's checkpoint: `out` then is a copy of `target` with the
    `mtp.*` tensors added or replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    if isinstance(model, MtpDrafter):
        return _export_mtp(model, target, out)
    weights = drafter_weights(model, spec)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(drafter_config(spec), indent=1) + "\n")
    return sum(t.numel() for t in weights.values())


def _export_mtp(model: MtpDrafter, target: Path, out: Path) -> int:
    added = model.checkpoint()
    state = load_file(target / "model.safetensors")
    state = {name: t for name, t in state.items() if not name.startswith("mtp.")}
    if out.resolve() != target.resolve():
        for path in target.iterdir():
            if path.is_file() and path.name != "model.safetensors":
                shutil.copy2(path, out / path.name)
    merged = {name: t.contiguous() for name, t in (state | added).items()}
    save_file(merged, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["mtp_num_hidden_layers"] = 1
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return sum(t.numel() for t in added.values())


def load_drafter_weights(model: nn.Module, spec: DrafterSpec, directory: Path) -> None:
    """Load an exported checkpoint back into a training module built for the same target."""
    state = load_file(directory / "model.safetensors")
    if isinstance(model, MtpDrafter):
        model.load_checkpoint(state)
        return
    missing = set(drafter_weights(model, spec)) ^ set(state)
    if missing:
        raise ValueError(f"{directory}: tensors do not fit {spec.method}: {sorted(missing)[:4]}")
    model.load_state_dict(state, strict=False)
