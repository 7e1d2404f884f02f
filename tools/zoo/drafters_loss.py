"""Training losses of the drafters, computed by `speculators` on one packed batch.

All targets are the frozen target's own distributions. Steps and slots after the first are
teacher forced: a later draft only counts when the earlier ones were right, so its context then is
the true text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tools.zoo.drafters import DrafterSpec
from tools.zoo.drafters_data import Batch
from tools.zoo.drafters_mtp import MtpDrafter
from tools.zoo.drafters_propose import MtpSteps


@dataclass(frozen=True)
class LossOptions:
    """`terms`: a `speculators` loss spec (name, or JSON of name to weight). `gamma`: decay
    length of a block's slots. `step_decay`: factor per recursive step. `anchors`: drafts per
    batch of the block methods. `greedy_confidence`: DSpark's confidence learns whether the
    greedy draft is right instead of the overlap of the two distributions."""

    terms: str = '{"kl_div": 0.7, "ce": 0.3}'
    gamma: float = 4.0
    step_decay: float = 0.9
    anchors: int = 384
    greedy_confidence: bool = True


def greedy_mismatch(logits: Tensor, targets: Tensor) -> Tensor:
    """1 where the greedy draft differs from the target's, else 0: [1, T, V] twice -> [1, T].

    Takes the place of the total variation distance in DSpark's confidence target, since greedy
    verification accepts a draft if and only if the two argmaxes agree.
    """
    return (logits.argmax(-1) != targets.argmax(-1)).float()


def loss_function(
    model: nn.Module, spec: DrafterSpec, options: LossOptions
) -> Callable[[Batch], Tensor]:
    """Return a function from a batch to the scalar training loss of `model`."""
    from speculators.losses import resolve_loss_config

    terms = resolve_loss_config(options.terms, "eager")
    overlap = resolve_loss_config("tv", "eager")["tv"][0]
    if isinstance(model, MtpDrafter):
        return lambda batch: mtp_loss(model, batch, options)
    if spec.method == "eagle3":
        extra: dict[str, object] = {
            "ttt_steps": spec.num_draft_tokens,
            "ttt_step_loss_decay": options.step_decay,
        }
    else:
        extra = {"gamma": options.gamma, "max_anchors": options.anchors}
        if spec.method == "dspark":
            extra["tv_loss_fn"] = greedy_mismatch if options.greedy_confidence else overlap
        elif spec.method == "dflash2":
            extra["tv_loss_fn"] = overlap

    def compute(batch: Batch) -> Tensor:
        loss: Tensor = model(**batch.items(), loss_config=terms, **extra)[1]
        return loss

    return compute


def mtp_loss(model: MtpDrafter, batch: Batch, options: LossOptions) -> Tensor:
    """Sum of the decayed losses of K teacher-forced MTP steps, by EAGLE-3's alignment."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.metrics import compute_metrics

    terms = resolve_loss_config(options.terms, "eager")
    with torch.no_grad():
        targets = model.lm_head(model.verifier_norm(batch.verifier_last_hidden_states.float()))
    steps = MtpSteps(model, batch)
    tokens = batch.input_ids
    total = torch.zeros((), device=tokens.device)
    for step in range(model.num_steps):
        logits = steps.advance(tokens)
        loss, _ = compute_metrics(
            logits,
            targets,
            batch.loss_mask,
            batch.loss_mask.clone(),
            step,
            options.step_decay,
            loss_config=terms,
        )
        total = total + loss
        tokens = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
    return total
