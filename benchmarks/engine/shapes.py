"""Checkpoint folders without weights: shapes of real models for `load_format="dummy"`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 151_936
DRAFTER_LAYERS = 5


def hybrid(layers: int) -> dict[str, Any]:
    """Widths of Qwen3.5-9B: GDN and full attention 3:1, 16 key and 32 value heads of 128."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "layer_types": [
            "full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)
        ],
        "mamba_ssm_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def dense(layers: int) -> dict[str, Any]:
    """Widths of Qwen3-8B."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def drafter(method: str, target_layers: int, draft_tokens: int = 7) -> dict[str, Any]:
    """DSpark (K rows, Markov and confidence heads) or DFlash (K + 1 rows) for either target."""
    config = dense(DRAFTER_LAYERS)
    # Three depths, as published drafters read them: early, middle, late.
    read = [1, target_layers // 2, target_layers - 1]
    config |= {"draft_vocab_size": VOCABULARY, "target_hidden_size": 4096}
    if method == "dspark":
        return config | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": draft_tokens,
            "target_layer_ids": read,
            "mask_token_id": 4,
            "markov_rank": 256,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": True,
        }
    return config | {
        "architectures": ["DFlashDraftModel"],
        "block_size": draft_tokens + 1,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": read},
    }


def layer_kinds(target: dict[str, Any]) -> list[str]:
    """The kind of each layer of a target; a dense one names none, and all its layers attend."""
    found: list[str] = target.get("layer_types", ["full_attention"] * target["num_hidden_layers"])
    return found


def cache_mib(
    target: dict[str, Any], requests: int, tokens: int, draft_tokens: int, replay: bool
) -> int:
    """MiB of cache that holds `requests` requests of `tokens` tokens on average.

    As vLLM lays a hybrid model out: groups of as many layers as the model has attention layers, a
    page of one size for all, drafter layers padded to whole groups. draft_tokens: 0 without
    speculation. replay: one page a request, with a ring of 32 rows, instead of K + 1.
    """
    kinds = layer_kinds(target)
    attention = kinds.count("full_attention")
    row = 2 * target["num_key_value_heads"] * target["head_dim"] * 2
    drafter = DRAFTER_LAYERS if draft_tokens else 0
    if attention == len(kinds):
        pages, page = (attention + drafter) * -(-tokens // 16), 16 * row
    else:
        ring = 390 << 10 if replay else 0
        state = (1 << 20) + ring + 8192 * 2 * (3 + draft_tokens)
        block = -(-state // (16 * row)) * 16
        states = 1 if replay else draft_tokens + 1
        groups = 1 + -(-drafter // attention)
        # Half a block more than the mean needs: lengths differ from request to request.
        blocks = groups * -(-(tokens + block // 2) // block)
        pages = (len(kinds) - attention) * states + attention * blocks
        page = block * row
    return (requests * pages * page >> 20) * 21 // 20


def write(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint folder that holds only `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder


def engine_gib(target: dict[str, Any], with_drafter: bool, adaptive: bool, requests: int) -> float:
    """GiB that an engine takes besides its cache: bf16 weights, graphs, CUDA's own.

    Seen on an H200: 2.1 GiB for a drafter, 7.7 for graphs of 2048 rows with lengths of their own.
    """
    kinds = layer_kinds(target)
    width, hybrid = target["hidden_size"], "layer_types" in target
    # A gate on the attention's outputs doubles the queries of the hybrid shape.
    heads = (2 + hybrid) * target["num_attention_heads"] + 2 * target["num_key_value_heads"]
    attention = kinds.count("full_attention") * width * target["head_dim"] * heads
    linear = kinds.count("linear_attention") * width * (12288 + 4096)
    mlp = len(kinds) * 3 * width * target["intermediate_size"]
    weights = attention + linear + mlp + 2 * target["vocab_size"] * width
    graphs = 7.7 * requests / 256 if adaptive else 0.5
    return 2 * weights / (1 << 30) + 2.1 * with_drafter + graphs + 2.0
