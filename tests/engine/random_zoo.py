"""Random models in the zoo's layout and checkpoint formats, made in seconds.

Purely random weights accept nothing. Here the head of every target prefers PERMUTATION[token], and
the layers disturb that: greedy answers follow the permutation for about 70 % of the steps, and the
drafters that know it (MTP, DSpark's Markov head) see acceptances and rejections alike. EAGLE-3 and
DFlash stay near zero, which makes them references that no accepted token depends on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY, HIDDEN, HEAD_DIM, MLP = 512, 128, 64, 256
FEATURE_LAYERS = {"hybrid": [1, 4, 7], "dense": [1, 3, 5]}
DISTURBANCE = {"hybrid": 0.45, "dense": 0.55}
BLOCK = 8
CYCLES = (5, 7, 9, 12)

Weights = dict[str, Tensor]


def build(root: Path) -> Path:
    """Write `hybrid`, `dense` and their drafters under `root`."""
    torch.manual_seed(0)
    permutation = _permutation()
    for target, make in (("hybrid", _hybrid), ("dense", _dense)):
        config, weights = make(permutation)
        _write(root / target, config, weights)
        embedding = next(v for k, v in weights.items() if "embed_tokens" in k)
        head = weights["lm_head.weight"]
        layers = FEATURE_LAYERS[target]
        _write(root / f"{target}-eagle3", *_eagle3(layers, embedding, head))
        _write(root / f"{target}-dflash", *_dflash(layers))
        _write(root / f"{target}-dspark", *_dspark(layers, embedding, head))
    return root


def _permutation() -> Tensor:
    """[VOCABULARY] successor of each token, in short cycles."""
    order = (torch.randperm(VOCABULARY - 4) + 4).tolist()
    successor = list(range(VOCABULARY))
    start, turn = 0, 0
    while start < len(order):
        cycle = order[start : start + CYCLES[turn % len(CYCLES)]]
        start, turn = start + len(cycle), turn + 1
        for here, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            successor[here] = following
    return torch.tensor(successor)


def _hybrid(permutation: Tensor) -> tuple[dict[str, Any], Weights]:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    config = Qwen3_5TextConfig(
        **_common(num_hidden_layers=8),
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
        full_attention_interval=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    )
    weights = _varied(Qwen3_5ForCausalLM(config).state_dict())
    for name, value in weights.items():
        if name.endswith("A_log"):
            weights[name] = torch.empty_like(value.float()).uniform_(0.5, 8).log()
        if name.endswith("dt_bias"):
            weights[name] = torch.full_like(value.float(), -2.0)
    weights = _following(weights, permutation, "hybrid")
    described = config.to_dict() | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "dtype": "bfloat16",
        "mamba_ssm_dtype": "float32",
    }
    return described, weights | _mtp(weights, config.layer_types.index("full_attention"))


def _mtp(weights: Weights, attention_layer: int) -> Weights:
    """One layer that passes the token's embedding on, so that the head sees the permutation."""
    passed = torch.cat([torch.eye(HIDDEN) * 2, torch.randn(HIDDEN, HIDDEN) * 0.03], 1)
    made = {"mtp.fc.weight": passed.bfloat16()}
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        made[f"mtp.{norm}.weight"] = torch.zeros(HIDDEN, dtype=torch.bfloat16)
    marker = f"layers.{attention_layer}."
    for name, value in weights.items():
        if marker in name:
            suffix = name.split(marker)[1]
            made[f"mtp.layers.0.{suffix}"] = (
                _normal(*value.shape, std=0.3 / value.shape[-1] ** 0.5)
                if value.dim() > 1
                else value
            )
    return made


def _dense(permutation: Tensor) -> tuple[dict[str, Any], Weights]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_common(num_hidden_layers=6))
    weights = _following(_varied(Qwen3ForCausalLM(config).state_dict()), permutation, "dense")
    return _described(config, "Qwen3ForCausalLM"), weights


def _common(num_hidden_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def _described(config: Any, architecture: str, **more: Any) -> dict[str, Any]:
    return config.to_dict() | {"architectures": [architecture], "dtype": "bfloat16"} | more


def _varied(weights: Weights) -> Weights:
    """Matrices with enough variance that the argmax is not constant; vectors as they are."""

    def redraw(name: str, value: Tensor) -> Tensor:
        if value.dim() < 2:
            return value.clone().bfloat16()
        fan_in = value.shape[-1] if value.dim() == 2 else value.shape[-1] * value.shape[-2]
        return _normal(*value.shape, std=1.0 if "embed" in name else 1.5 / fan_in**0.5)

    return {name: redraw(name, value) for name, value in weights.items()}


def _following(weights: Weights, permutation: Tensor, target: str) -> Weights:
    embedding = next(v for k, v in weights.items() if "embed_tokens" in k).float()
    head = torch.zeros_like(embedding)
    head[permutation] = embedding
    weights["lm_head.weight"] = (head * 0.25).bfloat16()
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            weights[name] = (weights[name].float() * DISTURBANCE[target]).bfloat16()
    return weights


@dataclass(frozen=True)
class _Layer:
    """One Qwen3 layer of a drafter under a prefix."""

    prefix: str
    input_width: int = HIDDEN

    def weights(self) -> Weights:
        attention, mlp = f"{self.prefix}self_attn", f"{self.prefix}mlp"
        ones: Callable[[int], Tensor] = lambda size: torch.ones(size).bfloat16()  # noqa: E731
        return {
            f"{attention}.q_proj.weight": _normal(4 * HEAD_DIM, self.input_width, std=0.09),
            f"{attention}.k_proj.weight": _normal(2 * HEAD_DIM, self.input_width, std=0.09),
            f"{attention}.v_proj.weight": _normal(2 * HEAD_DIM, self.input_width, std=0.09),
            f"{attention}.o_proj.weight": _normal(HIDDEN, 4 * HEAD_DIM, std=0.06),
            f"{attention}.q_norm.weight": ones(HEAD_DIM),
            f"{attention}.k_norm.weight": ones(HEAD_DIM),
            f"{mlp}.gate_proj.weight": _normal(MLP, HIDDEN, std=0.09),
            f"{mlp}.up_proj.weight": _normal(MLP, HIDDEN, std=0.09),
            f"{mlp}.down_proj.weight": _normal(HIDDEN, MLP, std=0.06),
            f"{self.prefix}input_layernorm.weight": ones(HIDDEN),
            f"{self.prefix}post_attention_layernorm.weight": ones(HIDDEN),
        }


def _drafter_config(architecture: str, **more: Any) -> dict[str, Any]:
    from transformers import Qwen3Config

    return _described(Qwen3Config(**_common(num_hidden_layers=1)), architecture, **more)


def _eagle3(layers: list[int], embedding: Tensor, head: Tensor) -> tuple[dict[str, Any], Weights]:
    config = _drafter_config(
        "LlamaForCausalLMEagle3",
        model_type="llama",
        draft_vocab_size=VOCABULARY,
        target_hidden_size=HIDDEN,
        eagle_aux_hidden_state_layer_ids=layers,
    )
    config.pop("layer_types")
    layer = _Layer("midlayer.", input_width=2 * HIDDEN).weights()
    weights = {name: value for name, value in layer.items() if "_norm.weight" not in name}
    return config, weights | {
        "fc.weight": _normal(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN).bfloat16(),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN).bfloat16(),
        "embed_tokens.weight": embedding,
        "lm_head.weight": head,
    }


def _backbone() -> Weights:
    return _Layer("layers.0.").weights() | {
        "fc.weight": _normal(HIDDEN, 3 * HIDDEN),
        "hidden_norm.weight": torch.ones(HIDDEN).bfloat16(),
        "norm.weight": torch.ones(HIDDEN).bfloat16(),
    }


def _dflash(layers: list[int]) -> tuple[dict[str, Any], Weights]:
    # vLLM counts the embedding's output as feature 0, the drafter's config counts layers.
    features = {"mask_token_id": VOCABULARY - 1, "target_layer_ids": [i - 1 for i in layers]}
    config = _drafter_config("DFlashDraftModel", block_size=BLOCK, dflash_config=features)
    return config, _backbone()


def _dspark(layers: list[int], embedding: Tensor, head: Tensor) -> tuple[dict[str, Any], Weights]:
    config = _drafter_config(
        "Qwen3DSparkModel",
        block_size=BLOCK,
        markov_rank=HIDDEN,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        mask_token_id=VOCABULARY - 1,
        target_layer_ids=[i - 1 for i in layers],
        draft_vocab_size=VOCABULARY,
        target_hidden_size=HIDDEN,
        sample_from_anchor=True,
    )
    return config, _backbone() | {
        "markov_head.markov_w1.weight": embedding,
        "markov_head.markov_w2.weight": head,
        "confidence_head.proj.weight": torch.randn(1, 2 * HIDDEN) * 0.05,
        "confidence_head.proj.bias": torch.zeros(1),
    }


def _normal(*shape: int, std: float = 0.05) -> Tensor:
    return (torch.randn(*shape) * std).bfloat16()


def _write(directory: Path, config: dict[str, Any], weights: Weights) -> None:
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    own = {name: value.clone().contiguous() for name, value in weights.items()}
    save_file(own, directory / "model.safetensors", metadata={"format": "pt"})
    words = models.WordLevel({f"<{i}>": i for i in range(VOCABULARY)}, unk_token="<0>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<0>", eos_token="<1>", pad_token="<2>"
    ).save_pretrained(directory)


if __name__ == "__main__":
    import sys

    from vllm_ascend_spec.engine import packages

    packages.hide_mismatched()
    build(Path(sys.argv[1]))
