"""Sizes of the zoo's models and the Hugging Face configurations that describe them.

The sizes follow from one limit: all weights of the zoo (two targets and their drafters)
must fit 8 MiB of bf16, and every head size must be one that vLLM's CPU and Triton kernels take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

TargetKind = Literal["hybrid", "dense"]
TARGET_KINDS: tuple[TargetKind, ...] = ("hybrid", "dense")

VOCAB_SIZE = 1024
HIDDEN_SIZE = 128
INTERMEDIATE_SIZE = 256
NUM_LAYERS = 4
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 64
GDN_KEY_HEADS = 2
GDN_VALUE_HEADS = 4
GDN_HEAD_DIM = 64
GDN_CONV_WIDTH = 4
FULL_ATTENTION_INTERVAL = 4
PARTIAL_ROTARY_FACTOR = 0.5
ROPE_THETA = 10000.0
RMS_EPS = 1e-6
MAX_POSITIONS = 2048

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
PAD = "<|pad|>"
MASK = "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, PAD, MASK)
END_OF_TEXT_ID, IM_START_ID, IM_END_ID, PAD_ID, MASK_ID = range(len(SPECIAL_TOKENS))

MAX_PROMPT_TOKENS = 200
MAX_ANSWER_TOKENS = 160


@dataclass(frozen=True)
class TargetShape:
    """Everything the plain-torch model needs to know about one target.

    `layer_types` uses transformers' words: `linear_attention` (GDN) and `full_attention`.
    """

    kind: TargetKind
    layer_types: tuple[str, ...]
    rotary_dim: int
    vocab_size: int = VOCAB_SIZE
    hidden_size: int = HIDDEN_SIZE
    intermediate_size: int = INTERMEDIATE_SIZE
    num_heads: int = NUM_HEADS
    num_kv_heads: int = NUM_KV_HEADS
    head_dim: int = HEAD_DIM
    gdn_key_heads: int = GDN_KEY_HEADS
    gdn_value_heads: int = GDN_VALUE_HEADS
    gdn_head_dim: int = GDN_HEAD_DIM
    conv_width: int = GDN_CONV_WIDTH
    rope_theta: float = ROPE_THETA
    rms_eps: float = RMS_EPS

    @property
    def gated_attention(self) -> bool:
        """Qwen3.5 gates the attention output and centres its RMSNorm weights on zero."""
        return self.kind == "hybrid"


def target_shape(kind: TargetKind) -> TargetShape:
    """Return the fixed shape of the `hybrid` or `dense` target."""
    if kind == "dense":
        return TargetShape("dense", ("full_attention",) * NUM_LAYERS, HEAD_DIM)
    types = tuple(
        "full_attention" if (i + 1) % FULL_ATTENTION_INTERVAL == 0 else "linear_attention"
        for i in range(NUM_LAYERS)
    )
    return TargetShape("hybrid", types, int(HEAD_DIM * PARTIAL_ROTARY_FACTOR))


_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": RMS_EPS,
    "tie_word_embeddings": False,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": IM_END_ID,
    "pad_token_id": PAD_ID,
}


def hf_config(kind: TargetKind) -> Any:
    """Return transformers' configuration object of a target (imports transformers)."""
    if kind == "dense":
        from transformers import Qwen3Config

        rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
        return Qwen3Config(**_SHARED, rope_parameters=rope)
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    rope = {
        "rope_type": "default",
        "rope_theta": ROPE_THETA,
        "partial_rotary_factor": PARTIAL_ROTARY_FACTOR,
    }
    return Qwen3_5TextConfig(
        **_SHARED,
        linear_key_head_dim=GDN_HEAD_DIM,
        linear_value_head_dim=GDN_HEAD_DIM,
        linear_num_key_heads=GDN_KEY_HEADS,
        linear_num_value_heads=GDN_VALUE_HEADS,
        linear_conv_kernel_dim=GDN_CONV_WIDTH,
        full_attention_interval=FULL_ATTENTION_INTERVAL,
        rope_parameters=rope,
    )


def hf_config_dict(kind: TargetKind) -> dict[str, Any]:
    """Return the `config.json` contents that vLLM loads for a target."""
    config: dict[str, Any] = hf_config(kind).to_dict()
    config["dtype"] = "bfloat16"
    if kind == "dense":
        config["architectures"] = ["Qwen3ForCausalLM"]
        return config
    config.update(
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
        mtp_num_hidden_layers=1,
        mamba_ssm_dtype="float32",
    )
    return config
