"""Write a trained target as a Hugging Face directory that vLLM loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tools.zoo.config import (
    END_OF_TEXT_ID,
    IM_END_ID,
    PAD_ID,
    TargetKind,
    hf_config_dict,
    target_shape,
)
from tools.zoo.modeling import Target
from tools.zoo.tokenizer import save_tokenizer

# vLLM keeps the decay parameters of a GDN layer in float32.
_FLOAT32_SUFFIXES = ("A_log", "dt_bias")


def storage_dtype(name: str) -> torch.dtype:
    """dtype in which a weight is stored, by its checkpoint name."""
    return torch.float32 if name.endswith(_FLOAT32_SUFFIXES) else torch.bfloat16


def cast_for_export(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights as stored: contiguous, on the CPU, in their storage dtype."""
    return {
        name: value.detach().to("cpu", storage_dtype(name)).clone().contiguous()
        for name, value in state_dict.items()
    }


def _write(kind: TargetKind, weights: Mapping[str, Tensor], directory: Path) -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), str(directory / "model.safetensors"), metadata={"format": "pt"})
    generation = {
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": [IM_END_ID, END_OF_TEXT_ID],
        "pad_token_id": PAD_ID,
        "do_sample": False,
    }
    for name, content in (
        ("config.json", hf_config_dict(kind)),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")
    save_tokenizer(directory)


def export_hybrid(
    state_dict: Mapping[str, Tensor], mtp_state_dict: Mapping[str, Tensor] | None, directory: Path
) -> None:
    """Write the hybrid target, with its MTP layer where one is trained.

    `mtp_state_dict` has checkpoint names (`mtp.…`). Raises ValueError for any other name.
    """
    wrong = [name for name in mtp_state_dict or {} if not name.startswith("mtp.")]
    if wrong:
        raise ValueError(f"weights of the MTP layer must be named mtp.*, found {wrong[0]!r}")
    _write("hybrid", cast_for_export({**state_dict, **(mtp_state_dict or {})}), directory)


def export_dense(state_dict: Mapping[str, Tensor], directory: Path) -> None:
    """Write the dense target."""
    _write("dense", cast_for_export(state_dict), directory)


def load_target(kind: TargetKind, directory: Path, device: str = "cpu") -> Target:
    """Load an exported target for drafter training: bf16-rounded weights, float32 tensors."""
    from safetensors.torch import load_file

    path = directory / "model.safetensors"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: train the target first (train_target.py)")
    state = {k: v.float() for k, v in load_file(str(path)).items() if not k.startswith("mtp.")}
    model = Target(target_shape(kind))
    model.load_state_dict(state)
    return model.to(device).eval()
