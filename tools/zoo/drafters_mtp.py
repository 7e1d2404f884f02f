"""The MTP drafter: one Qwen3.5 full-attention layer trained over K recursive steps.

The layer class is `speculators`'. Its training loop is not: it lets step `s` attend to keys and
values that step `s` itself computed for earlier positions, while vLLM's cache holds, for earlier
positions, what step 0 computed from the target's hidden states. Here step `s` of the draft that
starts at row `t` sees step 0 at rows `<= t` and its own steps `1..s`, as when serving.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DynamicCache

from tools.zoo.config import RMS_EPS, hf_config, target_shape
from tools.zoo.drafters import DrafterSpec
from tools.zoo.modeling import RMSNorm

#: Names in a Qwen3.5 checkpoint (`mtp.` prefix) of the modules of `speculators`' MTP layer.
CHECKPOINT_NAMES = {
    "input_proj.": "fc.",
    "final_layernorm.": "norm.",
    "hidden_layernorm.": "pre_fc_norm_hidden.",
    "token_layernorm.": "pre_fc_norm_embedding.",
}


class MtpDrafter(nn.Module):
    """Trainable MTP layer with the frozen embedding, final norm and head of its target."""

    def __init__(self, spec: DrafterSpec, target: Path) -> None:
        super().__init__()
        from speculators.models.mtp.model_definitions import mtp_model_classes

        config = hf_config("hybrid")
        config._attn_implementation = "sdpa"
        definitions = mtp_model_classes["qwen3_5_text"]
        self.num_steps = spec.num_draft_tokens
        self.layer = definitions.first_layer_class(config, layer_idx=0)
        self.rotary_emb = definitions.rotary_emb_class(config)
        shape = target_shape("hybrid")
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.verifier_norm = RMSNorm(shape.hidden_size, RMS_EPS, zero_centred=True)
        self._load_frozen(target)
        self._initialise()

    def _load_frozen(self, target: Path) -> None:
        state = load_file(target / "model.safetensors")
        for module, name in (
            (self.embed_tokens, "model.embed_tokens.weight"),
            (self.lm_head, "lm_head.weight"),
            (self.verifier_norm, "model.norm.weight"),
        ):
            module.weight.data = state[name].float()
            module.weight.requires_grad_(False)

    def _initialise(self) -> None:
        """Start as a copy of the hidden state, so step 0 begins near the target's own guess."""
        for module in self.layer.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5 / 2)
        size = self.embed_tokens.weight.shape[1]
        weight = self.layer.input_proj.weight.data
        weight[:, size:] += torch.eye(size)

    def step(
        self,
        tokens: Tensor,
        hidden: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: DynamicCache,
    ) -> Tensor:
        """One recursive step over rows [1, T]; appends its keys and values to `cache`.

        `mask`: [1, 1, T, cached + T] bool. `positions`: [1, T] position of `hidden` in the text.
        Returns the hidden states [1, T, hidden] that `lm_head` and the next step read.
        """
        rotary = self.rotary_emb(hidden, positions.unsqueeze(0).expand(3, -1, -1))
        output: Tensor = self.layer(
            hidden_states=hidden,
            token_embeddings=self.embed_tokens(tokens).to(hidden.dtype),
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotary,
            past_key_values=cache,
        )
        return output

    def serving_hidden(self, last_stream: Tensor) -> Tensor:
        """vLLM hands MTP the target's states after the final norm: [1, T, hidden] -> same."""
        normed: Tensor = self.verifier_norm(last_stream)
        return normed

    def checkpoint(self) -> dict[str, Tensor]:
        """Weights under the names that vLLM's Qwen3.5 MTP loads, in bf16."""
        return {
            _checkpoint_name(name): tensor.detach().to(torch.bfloat16).cpu()
            for name, tensor in self.layer.state_dict().items()
        }

    def load_checkpoint(self, state: dict[str, Tensor]) -> None:
        """Load the `mtp.*` tensors of a merged target checkpoint."""
        own = self.layer.state_dict()
        missing = [n for n in map(_checkpoint_name, own) if n not in state]
        if missing:
            raise ValueError(f"the target's checkpoint has no {missing[0]}")
        self.layer.load_state_dict({name: state[_checkpoint_name(name)] for name in own})


def _checkpoint_name(name: str) -> str:
    for ours, theirs in CHECKPOINT_NAMES.items():
        if name.startswith(ours):
            return f"mtp.{theirs}{name[len(ours) :]}"
    return f"mtp.layers.0.{name}"
