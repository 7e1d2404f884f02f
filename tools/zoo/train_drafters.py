"""Trains one drafter on a frozen target's own answers and writes the checkpoint vLLM loads.

python -m tools.zoo.train_drafters --method dspark --target DIR --answers FILE --out DIR
"""

from __future__ import annotations

import json
import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from tools.zoo.config import VOCAB_SIZE
from tools.zoo.drafters import (
    METHODS,
    DrafterSpec,
    build_drafter,
    draft_vocab_mapping,
    drafter_spec,
    load_frozen_target,
    to_serving_precision,
    trainable_parameters,
)
from tools.zoo.drafters_data import (
    Answers,
    Batch,
    HiddenStates,
    Packer,
    collect_hidden_states,
    load_answers,
)
from tools.zoo.drafters_eval import simulate
from tools.zoo.drafters_export import export_drafter, load_drafter_weights
from tools.zoo.drafters_loss import LossOptions, loss_function
from tools.zoo.modeling import Target


@dataclass(frozen=True)
class Budget:
    """When training stops: after `steps` if given, else after `seconds`."""

    seconds: float
    steps: int | None

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the budget used, 0 to 1."""
        return min(1.0, step / self.steps if self.steps else elapsed / self.seconds)


@dataclass(frozen=True)
class OptimizerOptions:
    """Muon for the weight matrices, AdamW for the rest; one cosine schedule over the budget."""

    muon_lr: float = 0.01
    adam_lr: float = 2e-3
    weight_decay: float = 0.01
    warmup: float = 0.03

    def scale(self, progress: float) -> float:
        """Learning-rate factor at `progress` (0 to 1): linear warm-up, then a cosine to zero."""
        if progress < self.warmup:
            return progress / self.warmup
        rest = (progress - self.warmup) / (1 - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * rest))


def make_optimizers(model: nn.Module, options: OptimizerOptions) -> list[torch.optim.Optimizer]:
    """The library's split of parameters between Muon and AdamW."""
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig

    config = TrainerConfig(
        lr=options.adam_lr,
        num_epochs=1,
        save_path="",
        optimizer="muon",
        weight_decay=options.weight_decay,
        muon_lr=options.muon_lr,
        muon_weight_decay=options.weight_decay,
    )
    optimizers = build_optimizers(model, config)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def split_held_out(answers: Answers, held_out: int) -> tuple[Answers, Answers]:
    """Keep the last `held_out` documents apart for measuring acceptance."""
    if not 0 < held_out < len(answers):
        raise ValueError(f"--keep {held_out}: must lie between 1 and {len(answers) - 1}")
    first = len(answers) - held_out
    return answers.slice(0, first), answers.slice(first, len(answers))


def as_float(batch: Batch) -> Batch:
    """The batch with float32 hidden states, which also keeps rotary tables in float32."""
    batch.hidden_states = batch.hidden_states.float()
    batch.verifier_last_hidden_states = batch.verifier_last_hidden_states.float()
    return batch


class DrafterTraining:
    """One training run: data, module, optimizers and the curve that it writes."""

    def __init__(
        self,
        spec: DrafterSpec,
        target_dir: Path,
        answers: Answers,
        held_out: Answers,
        device: torch.device,
        seed: int,
        tokens_per_batch: int,
        loss: LossOptions,
        optimizer: OptimizerOptions,
    ) -> None:
        torch.manual_seed(seed)
        self.spec, self.target_dir, self.device = spec, target_dir, device
        self.tokens_per_batch, self.options, self.held_out = tokens_per_batch, optimizer, held_out
        mapping = None
        if spec.method == "eagle3":
            counts = answers.answer_counts(VOCAB_SIZE)
            mapping = draft_vocab_mapping(counts, spec.draft_vocab_size)
        self.mapping = mapping
        self.model = build_drafter(spec, target_dir, mapping).to(device)
        target = load_frozen_target(target_dir, device)
        self.packer = self._packer(target, answers, seed)
        self.held_out_hidden = collect_hidden_states(target, held_out, spec.aux_layer_ids)
        self.loss = loss_function(self.model, spec, loss)
        self.optimizers = make_optimizers(self.model, optimizer)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.curve: list[dict[str, Any]] = []

    def _packer(self, target: Target, answers: Answers, seed: int) -> Packer:
        hidden: HiddenStates = collect_hidden_states(target, answers, self.spec.aux_layer_ids)
        return Packer(
            answers,
            hidden,
            shifted=self.spec.method in ("mtp", "eagle3"),
            targets_in_place=self.spec.method in ("dflash", "dflash2"),
            tokens_per_batch=self.tokens_per_batch,
            seed=seed,
        )

    def _precision(self) -> AbstractContextManager[Any]:
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()

    def _set_learning_rate(self, progress: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * self.options.scale(progress)

    def _train_step(self, progress: float) -> Tensor:
        self._set_learning_rate(progress)
        batch = as_float(self.packer.random_batch())
        with self._precision():
            loss = self.loss(batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def run(self, budget: Budget, log_every: int) -> None:
        """Train until the budget is used; a mean loss enters the curve every `log_every`."""
        began, step, window = time.monotonic(), 0, []
        self.model.train()
        while (progress := budget.progress(step, time.monotonic() - began)) < 1.0:
            window.append(self._train_step(progress))
            step += 1
            if step % log_every == 0:
                self._log(step, time.monotonic() - began, window)
                window = []
        if window:
            self._log(step, time.monotonic() - began, window)

    def _log(self, step: int, elapsed: float, window: list[Tensor]) -> None:
        loss = float(torch.stack(window).mean())
        if not math.isfinite(loss):
            raise RuntimeError(f"loss is {loss} at step {step}; lower --muon-lr or --adam-lr")
        self.curve.append({"step": step, "seconds": round(elapsed, 2), "loss": round(loss, 4)})
        typer.echo(f"{self.spec.method} step {step} {elapsed:.1f} s loss {loss:.4f}")

    def evaluate_checkpoint(self, checkpoint: Path) -> dict[str, Any]:
        """Acceptance of the exported bf16 weights on the held-out answers."""
        model = build_drafter(self.spec, self.target_dir, self.mapping)
        load_drafter_weights(model, self.spec, checkpoint)
        model = to_serving_precision(model.to(self.device))
        result = simulate(
            model, self.spec, self.held_out, self.held_out_hidden, self.tokens_per_batch
        )
        return result.report()


def main(
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")],
    target: Annotated[Path, typer.Option(help="Checkpoint of the frozen target.")],
    answers: Annotated[Path, typer.Option(help="Its answers, written by tools.zoo.distill.")],
    out: Annotated[Path, typer.Option(help="Where the drafter's checkpoint goes.")],
    seconds: Annotated[float, typer.Option(help="Training time; see --steps.")] = 120.0,
    steps: Annotated[int | None, typer.Option(help="Stop after so many steps instead.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Curve and figures.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    held_out: Annotated[
        Path | None, typer.Option(help="Answers to held-out prompts, to measure acceptance.")
    ] = None,
    keep: Annotated[int, typer.Option(help="Without --held-out: documents kept apart.")] = 256,
    tokens: Annotated[int, typer.Option(help="Tokens per packed batch.")] = 2048,
    anchors: Annotated[int, typer.Option(help="Drafts per batch of block methods.")] = 384,
    loss: Annotated[str, typer.Option(help="speculators loss spec.")] = LossOptions.terms,
    gamma: Annotated[float, typer.Option(help="Decay length of block slots.")] = 4.0,
    step_decay: Annotated[float, typer.Option(help="Weight factor per recursive step.")] = 0.9,
    greedy_confidence: Annotated[bool, typer.Option(help="DSpark's confidence target.")] = True,
    muon_lr: Annotated[float, typer.Option()] = OptimizerOptions.muon_lr,
    adam_lr: Annotated[float, typer.Option()] = OptimizerOptions.adam_lr,
    log_every: Annotated[int, typer.Option()] = 50,
    init: Annotated[
        Path | None, typer.Option(help="Checkpoint of this drafter to go on from.")
    ] = None,
) -> None:
    """Train one drafter."""
    began = time.monotonic()
    try:
        spec = drafter_spec(method)  # type: ignore[arg-type]
        training_set = load_answers(answers)
        if held_out is None:
            training_set, held_out_set = split_held_out(training_set, keep)
        else:
            held_out_set = load_answers(held_out)
        training = DrafterTraining(
            spec,
            target,
            training_set,
            held_out_set,
            torch.device(device),
            seed,
            tokens,
            LossOptions(loss, gamma, step_decay, anchors, greedy_confidence),
            OptimizerOptions(muon_lr, adam_lr),
        )
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if init is not None:
        load_drafter_weights(training.model, spec, init)
    prepared = time.monotonic() - began
    training.run(Budget(seconds, steps), log_every)
    parameters = export_drafter(training.model, spec, target, out)
    figures = {
        "method": method,
        "spec": spec.to_dict(),
        "seed": seed,
        "trained_parameters": trainable_parameters(training.model),
        "checkpoint_parameters": parameters,
        "documents": len(training_set),
        "answer_tokens": int(training_set.answer_counts(VOCAB_SIZE).sum()),
        "held_out_documents": len(held_out_set),
        "preparation_seconds": round(prepared, 2),
        "held_out": training.evaluate_checkpoint(out),
        "total_seconds": round(time.monotonic() - began, 2),
        "curve": training.curve,
    }
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(figures, indent=1) + "\n")
    typer.echo(json.dumps({k: v for k, v in figures.items() if k not in ("curve", "spec")}))


if __name__ == "__main__":
    typer.run(main)
