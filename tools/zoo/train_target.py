"""Train a zoo target and write it for vLLM.

    python -m tools.zoo.train_target --kind hybrid --seconds 240 --out hybrid --json hybrid.json

`--seconds` sets a time budget, `--steps` a fixed number of steps (reproducible on one machine).
On CUDA the whole step is replayed as one CUDA graph; where capture fails it runs eagerly and the
curve file says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tools.zoo.config import IM_END, MAX_ANSWER_TOKENS, TARGET_KINDS, TargetKind, target_shape
from tools.zoo.corpus import JSON_KINDS, held_out_prompts, score_json
from tools.zoo.export import export_dense, export_hybrid, storage_dtype
from tools.zoo.generate import greedy_answers
from tools.zoo.modeling import Target
from tools.zoo.optim import MuonAdam
from tools.zoo.packing import PackedRows, build_rows, load_rows
from tools.zoo.tokenizer import load_tokenizer

WARMUP = 0.02
COOLDOWN = 0.45
HELD_OUT_SEED = 2000


@dataclass
class Settings:
    """Hyper-parameters of one run."""

    kind: TargetKind
    seed: int
    batch: int
    lr: float
    optimizer: str
    prompt_weight: float
    seconds: float | None
    steps: int | None


@dataclass
class Curve:
    """What a run writes to `--json`."""

    settings: dict[str, Any]
    versions: dict[str, str]
    device: str
    parameters: int
    notes: list[str] = field(default_factory=list)
    points: list[dict[str, float]] = field(default_factory=list)
    final: dict[str, float] = field(default_factory=dict)


def masked_loss(
    model: Target, tokens: Tensor, segments: Tensor, answer: Tensor, prompt_weight: float
) -> tuple[Tensor, Tensor]:
    """Weighted next-token loss and the answers' own mean loss, both scalars.

    `tokens` and `segments`: [B, T] int64; `answer`: [B, T] bool.
    """
    logits = model(tokens, segments).logits[:, :-1].float()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    same = ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)).flatten()
    wanted = answer[:, 1:].flatten().float() * same
    weight = wanted + prompt_weight * (same.float() - wanted)
    answer_loss = (loss.detach() * wanted).sum() / wanted.sum()
    return (loss * weight).sum() / weight.sum(), answer_loss


class Trainer:
    """Owns the model, the optimiser and the (possibly graphed) training step."""

    def __init__(self, settings: Settings, device: torch.device, compile_model: bool) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.device = device
        self.model = Target(target_shape(settings.kind)).to(device)
        use_muon = settings.optimizer == "muon"
        # Muon's updates have unit singular values; Adam's have unit entries and need less.
        self.optimizer = MuonAdam(self.model, device, use_muon, 0.25 if use_muon else 1.0)
        self.compiled = torch.compile(self.model) if compile_model else self.model
        shape = (settings.batch, 512)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.segments = torch.zeros(shape, dtype=torch.int64, device=device)
        self.answer = torch.zeros(shape, dtype=torch.bool, device=device)
        self.loss = torch.zeros(2, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, rows: PackedRows, index: Tensor) -> None:
        """Copy the chosen rows into the static inputs."""
        self.tokens.copy_(rows.tokens[index])
        self.segments.copy_(rows.segments[index])
        self.answer.copy_(rows.answer[index])

    def _autocast(self) -> torch.autocast:
        enabled = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled, cache_enabled=False)

    def _eager_step(self) -> None:
        for p in self.optimizer.params:
            p.grad = None
        with self._autocast():
            loss, answer_loss = masked_loss(
                self.compiled, self.tokens, self.segments, self.answer,
                self.settings.prompt_weight,
            )  # fmt: skip
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(torch.stack([loss.detach(), answer_loss]))

    def capture(self) -> str:
        """Record the step as a CUDA graph; returns a note on what happened."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        self.optimizer.set_lr(0.0)
        with torch.cuda.stream(side):
            for _ in range(3):
                self._eager_step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        for p in self.optimizer.params:
            p.grad = None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._eager_step()
        except RuntimeError as error:
            torch.cuda.synchronize()
            return f"CUDA graph capture failed, steps run eagerly: {str(error).splitlines()[0]}"
        self.graph = graph
        return "steps run as one CUDA graph"

    def step(self) -> None:
        if self.graph is None:
            self._eager_step()
        else:
            self.graph.replay()

    @torch.no_grad()
    def held_out_loss(self, rows: PackedRows) -> float:
        """Answer loss of the current weights on held-out rows."""
        total = 0.0
        chunks = torch.arange(len(rows), device=self.device).split(self.settings.batch)
        for index in chunks:
            with self._autocast():
                _, loss = masked_loss(
                    self.model, rows.tokens[index].long(), rows.segments[index].long(),
                    rows.answer[index], 0.0,
                )  # fmt: skip
            total += float(loss) * len(index)
        return total / len(rows)

    def round_weights(self) -> None:
        """Round the weights to what is stored, so that all scores are those of the export."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(p.to(storage_dtype(name)))


def learning_rate(progress: float, peak: float) -> float:
    """Warm-up, constant, then linear cool-down; `progress` runs from 0 to 1."""
    if progress < WARMUP:
        return peak * max(progress, 1e-4) / WARMUP
    return peak * min(1.0, (1.0 - progress) / COOLDOWN + 1e-3)


def train(trainer: Trainer, rows: PackedRows, held_out: PackedRows, curve: Curve) -> None:
    """Run the budget of the trainer's settings; fills `curve.points`."""
    s, device = trainer.settings, trainer.device
    generator = torch.Generator(device=device).manual_seed(s.seed)
    order = torch.randperm(len(rows), generator=generator, device=device)
    cursor, step, progress = 0, 0, 0.0
    log_every = 20 if device.type == "cuda" else 5
    begin = time.monotonic()
    paused = next_evaluation = 0.0
    while progress < 1.0:
        if cursor + s.batch > len(order):
            order, cursor = torch.randperm(len(rows), generator=generator, device=device), 0
        trainer.fill(rows, order[cursor : cursor + s.batch])
        cursor += s.batch
        trainer.optimizer.set_lr(learning_rate(progress, s.lr))
        trainer.step()
        step += 1
        if step % log_every:
            progress = _progress(s, step, progress, None)
            continue
        loss, answer_loss = trainer.loss.tolist()  # waits for the device: time below is honest
        elapsed = time.monotonic() - begin - paused
        progress = _progress(s, step, progress, elapsed)
        point = {"step": step, "seconds": elapsed, "loss": loss, "answer_loss": answer_loss}
        if not math.isfinite(loss):
            raise SystemExit(f"loss is {loss} at step {step}: lower --lr (now {s.lr})")
        if progress >= next_evaluation or progress >= 1.0:
            before = time.monotonic()
            point["held_out_answer_loss"] = trainer.held_out_loss(held_out)
            paused += time.monotonic() - before
            next_evaluation = progress + 0.05
            print(json.dumps({k: round(x, 4) for k, x in point.items()}), flush=True)
        curve.points.append(point)


def _progress(s: Settings, step: int, before: float, elapsed: float | None) -> float:
    if s.steps is not None:
        return step / s.steps
    return before if elapsed is None or s.seconds is None else elapsed / s.seconds


def evaluate(trainer: Trainer, count: int, final: dict[str, float]) -> list[dict[str, str]]:
    """Greedy answers to held-out prompts with the model as it will be stored."""
    tokenizer = load_tokenizer()
    prompts = held_out_prompts(count, HELD_OUT_SEED)
    ids = [tokenizer.encode(p.text).ids for p in prompts]
    begin = time.monotonic()
    answers = greedy_answers(trainer.model, ids, MAX_ANSWER_TOKENS)
    final["generation_seconds"] = time.monotonic() - begin
    texts = [tokenizer.decode(a, skip_special_tokens=False).removesuffix(IM_END) for a in answers]
    for kind in (None, *JSON_KINDS):
        chosen = [(p, t) for p, t in zip(prompts, texts, strict=True) if kind in (None, p.kind)]
        if any(p.kind in JSON_KINDS for p, _ in chosen):
            score = score_json([p for p, _ in chosen], [t for _, t in chosen])
            final.update({f"{kind or 'json'}_{k}": v for k, v in asdict(score).items()})
    final["exact_all"] = sum(t == p.reference for p, t in zip(prompts, texts, strict=True)) / len(
        prompts
    )
    return [
        {"id": p.id, "prompt": p.text, "answer": t, "reference": p.reference}
        for p, t in zip(prompts, texts, strict=True)
    ]


def versions() -> dict[str, str]:
    """Versions that a rerun needs to know."""
    import tokenizers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kind", choices=TARGET_KINDS, required=True)
    parser.add_argument("--seconds", type=float, help="time budget of the training loop")
    parser.add_argument("--steps", type=int, help="fixed number of steps instead of a time budget")
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoint")
    parser.add_argument("--json", type=Path, help="file for the loss curve and scores")
    parser.add_argument("--rows", type=Path, help="rows made by tools.zoo.packing")
    parser.add_argument("--samples", type=int, default=400_000, help="tasks drawn without --rows")
    parser.add_argument("--held-out-samples", type=int, default=600)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64, help="rows of 512 tokens per step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--prompt-weight", type=float, default=0.1)
    parser.add_argument("--eval-prompts", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the forward pass")
    parser.add_argument("--no-graph", action="store_true", help="never capture a CUDA graph")
    args = parser.parse_args()
    if (args.seconds is None) == (args.steps is None):
        parser.error("give one of --seconds and --steps")
    return args


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    # cuDNN builds a plan per shape, which does not go well with graph capture.
    torch.backends.cuda.enable_cudnn_sdp(False)
    settings = Settings(
        args.kind, args.seed, args.batch, args.lr, args.optimizer, args.prompt_weight,
        args.seconds, args.steps,
    )  # fmt: skip
    begin = time.monotonic()
    rows = load_rows(args.rows) if args.rows else build_rows(
        "train", args.seed, args.samples, args.workers
    )  # fmt: skip
    if len(rows) < args.batch:
        raise SystemExit(f"--batch {args.batch} needs more rows than {len(rows)}: raise --samples")
    held_out = build_rows("held_out", HELD_OUT_SEED + 1, args.held_out_samples, 1)
    rows, held_out = rows.to(device), held_out.to(device)
    trainer = Trainer(settings, device, args.compile)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    curve = Curve(asdict(settings), versions(), name, parameters)
    print(f"{parameters} parameters, {len(rows)} rows, data {time.monotonic() - begin:.1f} s")
    if device.type == "cuda" and not args.no_graph:
        trainer.fill(rows, torch.arange(args.batch, device=device))
        curve.notes.append(trainer.capture())
        print(curve.notes[-1], flush=True)
    train(trainer, rows, held_out, curve)
    trainer.round_weights()
    curve.final["held_out_answer_loss"] = trainer.held_out_loss(held_out)
    state = trainer.model.state_dict()
    if args.kind == "hybrid":
        export_hybrid(state, None, args.out)
    else:
        export_dense(state, args.out)
    samples = evaluate(trainer, args.eval_prompts, curve.final)
    curve.final["total_seconds"] = time.monotonic() - begin
    print(json.dumps(curve.final, indent=1))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(asdict(curve), indent=1) + "\n")
        args.json.with_suffix(".answers.json").write_text(json.dumps(samples, indent=1) + "\n")


if __name__ == "__main__":
    main()
