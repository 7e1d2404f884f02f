"""Greedy drafts of every method from every anchor at once, with vLLM's serving semantics.

Used offline in place of the engine: to check that a training module drafts what vLLM drafts,
and to measure acceptance on held-out answers. The context of an anchor is the target's states of
all tokens before it; the anchor itself is known only as a token (vLLM drafts before it runs it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tools.zoo.drafters import DrafterSpec
from tools.zoo.drafters_data import Batch
from tools.zoo.drafters_mtp import MtpDrafter


@dataclass
class Drafts:
    """Drafts from `A` anchors.

    `rows` [A]: row of each anchor token in the batch. `tokens` [A, K] int64 in the target's
    vocabulary. `confidence` [A, K] acceptance probabilities, DSpark only.
    """

    rows: Tensor
    tokens: Tensor
    confidence: Tensor | None = None


@torch.no_grad()
def propose(model: nn.Module, spec: DrafterSpec, batch: Batch) -> Drafts:
    """Draft K tokens from every row that `batch.loss_mask` marks as a possible anchor."""
    if spec.method in ("mtp", "eagle3"):
        return _recursive_drafts(model, spec, batch)
    return _block_drafts(model, spec, batch)


def _block_drafts(model: Any, spec: DrafterSpec, batch: Batch) -> Drafts:
    """Run one block per anchor, all of them as one batch of queries."""
    anchors = int(batch.loss_mask[:, : -spec.block_size].sum())
    dtype = model.fc.weight.dtype
    hidden, logits, _, _, indices = model._backbone_forward(
        batch.hidden_states.to(dtype),
        batch.input_ids,
        batch.loss_mask,
        batch.verifier_last_hidden_states.to(dtype),
        batch.document_ids,
        batch.position_ids,
        max_anchors=anchors,
    )
    rows = indices.view(anchors, spec.block_size)[:, 0]
    hidden = hidden.view(anchors, spec.block_size, -1)
    logits = logits.view(anchors, spec.block_size, -1)
    anchor_tokens = batch.input_ids[0, rows]
    if spec.method == "dspark":
        return _markov_walk(model, rows, anchor_tokens, hidden, logits)
    if spec.method == "dflash2":
        tokens = _selector_walk(model, anchor_tokens, hidden[:, 1:], logits[:, 1:])
        return Drafts(rows, tokens)
    return Drafts(rows, logits[:, 1:].argmax(-1))


def _markov_walk(
    model: Any, rows: Tensor, previous: Tensor, hidden: Tensor, logits: Tensor
) -> Drafts:
    """Sample left to right: the bias of each slot follows from the token drafted before it."""
    tokens, confidence = [], []
    for slot in range(hidden.shape[1]):
        embedding = model.markov_head.prev_embeddings(previous)
        previous = (logits[:, slot] + model.markov_head.markov_w2(embedding)).argmax(-1)
        features = torch.cat([hidden[:, slot], embedding], -1)
        # vLLM keeps the confidence head in float32.
        head = model.confidence_head.proj
        score = torch.nn.functional.linear(features.float(), head.weight.float(), head.bias.float())
        tokens.append(previous)
        confidence.append(score.squeeze(-1).sigmoid())
    return Drafts(rows, torch.stack(tokens, 1), torch.stack(confidence, 1))


def _selector_walk(model: Any, previous: Tensor, hidden: Tensor, logits: Tensor) -> Tensor:
    tokens = []
    for slot in range(hidden.shape[1]):
        candidates, scores = model.candidate_selector.select(
            logits[:, slot], hidden[:, slot], previous
        )
        previous = candidates.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
        tokens.append(previous)
    return torch.stack(tokens, 1)


def _recursive_drafts(model: Any, spec: DrafterSpec, batch: Batch) -> Drafts:
    """Run every row's recursion side by side: row `t` starts from the token at `t + 1`."""
    is_mtp = isinstance(model, MtpDrafter)
    stepper = MtpSteps(model, batch) if is_mtp else EagleSteps(model, batch)
    tokens, drafts = batch.input_ids, []
    for _ in range(spec.num_draft_tokens):
        tokens = stepper.advance(tokens).argmax(-1)
        if not is_mtp and model.d2t is not None:
            tokens = tokens + model.d2t[tokens]
        drafts.append(tokens)
    rows = batch.loss_mask[0].nonzero().squeeze(-1)
    return Drafts(rows, torch.stack(drafts, -1)[0, rows])


class RecursiveSteps:
    """State of a recursion over all rows of a batch: mask, cache, positions and hidden states.

    Step 0 attends causally within its document; step `s` attends to step 0 at rows up to its
    own and, through diagonal blocks, to its own steps `1..s`.
    """

    def __init__(self, batch: Batch) -> None:
        from speculators.models.eagle3.attention import create_combined_mask_mod
        from torch.nn.attention.flex_attention import create_mask

        self.length = batch.input_ids.shape[1]
        mask_mod = create_combined_mask_mod(batch.document_ids[0], self.length)
        self.mask = create_mask(
            mask_mod, None, None, self.length, self.length, device=batch.input_ids.device
        )
        self.positions = batch.position_ids
        self.cache = DynamicCache()
        self.steps = 0

    def next_mask(self) -> tuple[Tensor, Tensor]:
        """Mask [1, 1, T, cached + T] and positions [1, T] of the next step."""
        from speculators.models.eagle3.attention import extend_dense_mask_for_draft_tokens

        if self.steps > 0:
            self.mask = extend_dense_mask_for_draft_tokens(self.mask, self.length)
            self.positions = self.positions + 1
        self.steps += 1
        return self.mask, self.positions


class MtpSteps(RecursiveSteps):
    """MTP: the post-norm output of a step is both read by the head and fed back."""

    def __init__(self, model: MtpDrafter, batch: Batch) -> None:
        super().__init__(batch)
        self.model = model
        dtype = model.lm_head.weight.dtype
        # In the shifted layout `last` belongs to the row's token; MTP reads the row before it.
        width = model.lm_head.weight.shape[1]
        self.hidden = model.serving_hidden(batch.hidden_states[..., -width:].to(dtype))

    def advance(self, tokens: Tensor) -> Tensor:
        """Feed one token per row [1, T]; returns logits [1, T, vocab]."""
        mask, positions = self.next_mask()
        self.hidden = self.model.step(tokens, self.hidden, mask, positions, self.cache)
        logits: Tensor = self.model.lm_head(self.hidden)
        return logits


class EagleSteps(RecursiveSteps):
    """EAGLE-3: the head reads the normed output, the next step the stream before that norm."""

    def __init__(self, model: Any, batch: Batch) -> None:
        super().__init__(batch)
        self.model = model
        self.hidden = model.fc(batch.hidden_states.to(model.fc.weight.dtype))

    def advance(self, tokens: Tensor) -> Tensor:
        """Feed one token per row [1, T]; returns logits [1, T, draft vocab]."""
        mask, positions = self.next_mask()
        model = self.model
        stream = torch.cat([model.embed_tokens(tokens), self.hidden], -1)
        rotary = model.rotary_emb(stream, positions)
        for layer in model.layers:
            stream = layer(
                stream,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                position_embeddings=rotary,
            )
        self.hidden = stream
        logits: Tensor = model.lm_head(model.norm(stream))
        return logits
