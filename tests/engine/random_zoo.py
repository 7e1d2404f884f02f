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

HEAD_DIM = 64
BLOCK = 8

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of the models; `hybrid` and `dense` in this order where there are two.

    features: target layers whose output the drafters read, counted from 1. interval: one layer in
    so many has full attention. disturbance: weight of the layers beside the permutation. reserved:
    first token ids, which the permutation leaves alone. head: scale of the target's logits.
    """

    vocabulary: int = 512
    hidden: int = 128
    mlp: int = 256
    layers: tuple[int, int] = (8, 6)
    features: tuple[tuple[int, ...], tuple[int, ...]] = ((1, 4, 7), (1, 3, 5))
    interval: int = 4
    disturbance: tuple[float, float] = (0.45, 0.55)
    heads: int = 4
    key_heads: int = 2
    cycles: tuple[int, ...] = (5, 7, 9, 12)
    reserved: int = 4
    head: float = 0.25


# Few enough tokens to count what is sampled: two GDN layers and one with attention, flat logits.
TOY = Shape(
    vocabulary=32,
    hidden=64,
    mlp=64,
    layers=(3, 3),
    features=((1, 2, 3), (1, 2, 3)),
    interval=3,
    disturbance=(0.9, 0.9),
    heads=2,
    key_heads=1,
    cycles=(5, 7),
    head=0.12,
)
SHAPES = {"default": Shape(), "toy": TOY}


def build(root: Path, shape: Shape | None = None) -> Path:
    """Write `hybrid`, `dense` and their drafters under `root`."""
    torch.manual_seed(0)
    made = _Zoo(shape or Shape())
    permutation = made.permutation()
    for index, target in enumerate(("hybrid", "dense")):
        config, weights = (made.hybrid, made.dense)[index](permutation)
        made.write(root / target, config, weights)
        embedding = next(v for k, v in weights.items() if "embed_tokens" in k)
        head = weights["lm_head.weight"]
        layers = list(made.shape.features[index])
        for method, drafter in {
            "eagle3": made.eagle3(layers, embedding, head),
            "dflash": made.dflash(layers),
            "dspark": made.dspark(layers, embedding, head),
            "dflash2": made.dflash2(layers, embedding, head),
            "draft_model": made.draft_model(permutation),
        }.items():
            made.write(root / f"{target}-{method}", *drafter)
    return root


@dataclass(frozen=True)
class _Zoo:
    """Makes (config, weights) of every checkpoint in one shape."""

    shape: Shape

    def permutation(self) -> Tensor:
        """[vocabulary] successor of each token, in short cycles."""
        shape = self.shape
        order = (torch.randperm(shape.vocabulary - shape.reserved) + shape.reserved).tolist()
        successor = list(range(shape.vocabulary))
        start, turn = 0, 0
        while start < len(order):
            cycle = order[start : start + shape.cycles[turn % len(shape.cycles)]]
            start, turn = start + len(cycle), turn + 1
            for here, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
                successor[here] = following
        return torch.tensor(successor)

    def hybrid(self, permutation: Tensor) -> tuple[dict[str, Any], Weights]:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

        config = Qwen3_5TextConfig(
            **self._common(num_hidden_layers=self.shape.layers[0]),
            linear_key_head_dim=HEAD_DIM,
            linear_value_head_dim=HEAD_DIM,
            linear_num_key_heads=self.shape.key_heads,
            linear_num_value_heads=self.shape.heads,
            linear_conv_kernel_dim=4,
            full_attention_interval=self.shape.interval,
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
        weights = self._following(weights, permutation, self.shape.disturbance[0])
        described = config.to_dict() | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "dtype": "bfloat16",
            "mamba_ssm_dtype": "float32",
        }
        return described, weights | self._mtp(weights, config.layer_types.index("full_attention"))

    def _mtp(self, weights: Weights, attention_layer: int) -> Weights:
        """One layer that passes the token's embedding on, so that the head sees the permutation."""
        hidden = self.shape.hidden
        passed = torch.cat([torch.eye(hidden) * 2, torch.randn(hidden, hidden) * 0.03], 1)
        made = {"mtp.fc.weight": passed.bfloat16()}
        for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
            made[f"mtp.{norm}.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
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

    def dense(self, permutation: Tensor) -> tuple[dict[str, Any], Weights]:
        return self._qwen3(permutation, self.shape.layers[1], self.shape.disturbance[1])

    def draft_model(self, permutation: Tensor) -> tuple[dict[str, Any], Weights]:
        """A model of its own with one layer, which knows the permutation too."""
        return self._qwen3(permutation, 1, 0.2)

    def _qwen3(
        self, permutation: Tensor, layers: int, disturbance: float
    ) -> tuple[dict[str, Any], Weights]:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(**self._common(num_hidden_layers=layers))
        weights = _varied(Qwen3ForCausalLM(config).state_dict())
        weights = self._following(weights, permutation, disturbance)
        return _described(config, "Qwen3ForCausalLM"), weights

    def _common(self, num_hidden_layers: int) -> dict[str, Any]:
        shape = self.shape
        return {
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.mlp,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.key_heads,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        }

    def _following(self, weights: Weights, permutation: Tensor, disturbance: float) -> Weights:
        embedding = next(v for k, v in weights.items() if "embed_tokens" in k).float()
        head = torch.zeros_like(embedding)
        head[permutation] = embedding
        weights["lm_head.weight"] = (head * self.shape.head).bfloat16()
        for name in weights:
            if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
                weights[name] = (weights[name].float() * disturbance).bfloat16()
        return weights

    def _layer(self, prefix: str, input_width: int) -> Weights:
        """One Qwen3 layer of a drafter under a prefix."""
        shape = self.shape
        attention, mlp = f"{prefix}self_attn", f"{prefix}mlp"
        query, key = shape.heads * HEAD_DIM, shape.key_heads * HEAD_DIM
        ones: Callable[[int], Tensor] = lambda size: torch.ones(size).bfloat16()  # noqa: E731
        return {
            f"{attention}.q_proj.weight": _normal(query, input_width, std=0.09),
            f"{attention}.k_proj.weight": _normal(key, input_width, std=0.09),
            f"{attention}.v_proj.weight": _normal(key, input_width, std=0.09),
            f"{attention}.o_proj.weight": _normal(shape.hidden, query, std=0.06),
            f"{attention}.q_norm.weight": ones(HEAD_DIM),
            f"{attention}.k_norm.weight": ones(HEAD_DIM),
            f"{mlp}.gate_proj.weight": _normal(shape.mlp, shape.hidden, std=0.09),
            f"{mlp}.up_proj.weight": _normal(shape.mlp, shape.hidden, std=0.09),
            f"{mlp}.down_proj.weight": _normal(shape.hidden, shape.mlp, std=0.06),
            f"{prefix}input_layernorm.weight": ones(shape.hidden),
            f"{prefix}post_attention_layernorm.weight": ones(shape.hidden),
        }

    def _drafter_config(self, architecture: str, **more: Any) -> dict[str, Any]:
        from transformers import Qwen3Config

        return _described(Qwen3Config(**self._common(num_hidden_layers=1)), architecture, **more)

    def eagle3(
        self, layers: list[int], embedding: Tensor, head: Tensor
    ) -> tuple[dict[str, Any], Weights]:
        hidden = self.shape.hidden
        config = self._drafter_config(
            "LlamaForCausalLMEagle3",
            model_type="llama",
            draft_vocab_size=self.shape.vocabulary,
            target_hidden_size=hidden,
            eagle_aux_hidden_state_layer_ids=layers,
        )
        config.pop("layer_types")
        layer = self._layer("midlayer.", input_width=2 * hidden)
        weights = {name: value for name, value in layer.items() if "_norm.weight" not in name}
        return config, weights | {
            "fc.weight": _normal(hidden, len(layers) * hidden),
            "norm.weight": torch.ones(hidden).bfloat16(),
            "midlayer.hidden_norm.weight": torch.ones(hidden).bfloat16(),
            "embed_tokens.weight": embedding,
            "lm_head.weight": head,
        }

    def _backbone(self, layers: list[int]) -> Weights:
        hidden = self.shape.hidden
        return self._layer("layers.0.", input_width=hidden) | {
            "fc.weight": _normal(hidden, len(layers) * hidden),
            "hidden_norm.weight": torch.ones(hidden).bfloat16(),
            "norm.weight": torch.ones(hidden).bfloat16(),
        }

    def _features(self, layers: list[int]) -> dict[str, Any]:
        # vLLM counts the embedding's output as feature 0, the drafter's config counts layers.
        return {
            "mask_token_id": self.shape.vocabulary - 1,
            "target_layer_ids": [layer - 1 for layer in layers],
        }

    def dflash(self, layers: list[int]) -> tuple[dict[str, Any], Weights]:
        config = self._drafter_config(
            "DFlashDraftModel", block_size=BLOCK, dflash_config=self._features(layers)
        )
        return config, self._backbone(layers)

    def dflash2(
        self, layers: list[int], embedding: Tensor, head: Tensor
    ) -> tuple[dict[str, Any], Weights]:
        """The selector walks along the permutation where its candidates let it."""
        hidden, taps, group, rank = self.shape.hidden, 2, 16, self.shape.hidden
        selector = {"selector_rank": rank, "selector_top_k": 8}
        convolution = {"conv_kernel_size": taps, "conv_group_size": group}
        config = self._drafter_config(
            "DFlash2DraftModel",
            block_size=BLOCK,
            draft_vocab_size=self.shape.vocabulary,
            target_hidden_size=hidden,
            dflash_config=self._features(layers) | convolution | selector,
        )
        weights = self._backbone(layers) | {
            "candidate_selector.hidden_projection.weight": _normal(rank, hidden),
            "candidate_selector.predecessor_codebook": embedding,
            "candidate_selector.successor_codebook": head,
        }
        for name in ("attention_conv", "mlp_conv"):
            kernels = _normal(hidden // group * taps * 2, hidden, std=0.02)
            weights[f"layers.0.{name}.kernel_projection.weight"] = kernels
            weights[f"layers.0.{name}.base_kernel"] = _normal(2, taps, hidden, std=0.3)
        return config, weights

    def dspark(
        self, layers: list[int], embedding: Tensor, head: Tensor
    ) -> tuple[dict[str, Any], Weights]:
        hidden = self.shape.hidden
        config = self._drafter_config(
            "Qwen3DSparkModel",
            block_size=BLOCK,
            markov_rank=hidden,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
            draft_vocab_size=self.shape.vocabulary,
            target_hidden_size=hidden,
            sample_from_anchor=True,
            **self._features(layers),
        )
        return config, self._backbone(layers) | {
            "markov_head.markov_w1.weight": embedding,
            "markov_head.markov_w2.weight": head,
            "confidence_head.proj.weight": torch.randn(1, 2 * hidden) * 0.05,
            "confidence_head.proj.bias": torch.zeros(1),
        }

    def write(self, directory: Path, config: dict[str, Any], weights: Weights) -> None:
        """Write a checkpoint with a tokenizer that has one word a token."""
        from safetensors.torch import save_file
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(config, indent=1))
        own = {name: value.clone().contiguous() for name, value in weights.items()}
        save_file(own, directory / "model.safetensors", metadata={"format": "pt"})
        vocabulary = {f"<{i}>": i for i in range(self.shape.vocabulary)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<0>", eos_token="<1>", pad_token="<2>"
        ).save_pretrained(directory)


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


def _normal(*shape: int, std: float = 0.05) -> Tensor:
    return (torch.randn(*shape) * std).bfloat16()


if __name__ == "__main__":
    import sys

    from vllm_ascend_spec.engine import packages

    packages.hide_mismatched()
    build(Path(sys.argv[1]), SHAPES[sys.argv[2] if len(sys.argv) > 2 else "default"])
