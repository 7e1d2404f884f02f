"""The whole recipe on one GPU: targets, their answers, every drafter, one folder that vLLM loads.

    python -m tools.zoo.train --out zoo                     # about 12 minutes on an H200
    python -m tools.zoo.train --out zoo --stage refine      # the block drafters, further

Processes run side by side: the models are so small that one alone leaves the GPU idle. Every
process writes its log and its curve under `--out/curves`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

TARGETS = ("hybrid", "dense")
HYBRID_DRAFTERS = ("mtp", "eagle3", "dflash", "dspark", "dflash2")
DENSE_DRAFTERS = ("dspark",)
# A parallel drafter learns more slowly than a sequential one: it sees one token less of context in
# every slot, and has one pass in which to find it. These get a second run, at a lower rate.
REFINED = (("hybrid", "dflash"), ("hybrid", "dspark"), ("hybrid", "dflash2"))
REFINE_RATES = {"muon_lr": 0.007, "adam_lr": 1.4e-3}


class Stage(str, Enum):
    """What to run; a later stage takes what an earlier one left in `--out`."""

    ALL = "all"
    TARGETS = "targets"
    DRAFTERS = "drafters"
    REFINE = "refine"


@dataclass(frozen=True)
class Batch:
    """A drafter's batch: packed tokens, and drafts that a block method learns from."""

    tokens: int
    anchors: int


def launch(module: str, arguments: dict[str, object], log: Path) -> subprocess.Popen[bytes]:
    """Start `python -m tools.zoo.<module>` with `--key value` arguments, its output in `log`."""
    command = [sys.executable, "-m", f"tools.zoo.{module}"]
    for key, value in arguments.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    return subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)


def wait(processes: dict[str, tuple[subprocess.Popen[bytes], Path]]) -> None:
    """Wait for all; a failure shows the end of that log and ends the recipe."""
    failed = [name for name, (process, _) in processes.items() if process.wait()]
    for name in failed:
        log = processes[name][1]
        typer.echo(f"--- {name} failed, end of {log}:", err=True)
        typer.echo("\n".join(log.read_text(errors="replace").splitlines()[-25:]), err=True)
    if failed:
        raise typer.Exit(1)


def train_targets(out: Path, seconds: float, samples: int, seed: int) -> None:
    """Both targets at once, on the same rows."""
    curves = out / "curves"
    rows = out / "rows.safetensors"
    log = curves / "rows.log"
    wait({"rows": (launch("packing", {"samples": samples, "seed": seed, "out": rows}, log), log)})
    processes = {}
    for kind in TARGETS:
        log = curves / f"{kind}.log"
        arguments = {
            "kind": kind,
            "seconds": seconds,
            "rows": rows,
            "out": out / kind,
            "json": curves / f"{kind}.json",
            "seed": seed,
        }
        processes[kind] = (launch("train_target", arguments, log), log)
    wait(processes)
    rows.unlink()


def write_answers(out: Path, count: int, seed: int) -> None:
    """The targets' own answers: for training, and to held-out prompts for measuring."""
    processes = {}
    for kind in TARGETS:
        for split, number in (("train", count), ("held_out", 512)):
            name = f"{kind}-{split}"
            log = out / "curves" / f"answers-{name}.log"
            arguments = {
                "target": out / kind,
                "out": out / f"{name}.safetensors",
                "split": split,
                "count": number,
                # Decoding is bound by launches: one large batch takes as long as a small one.
                "batch": 32_768,
                "seed": seed,
            }
            processes[name] = (launch("distill", arguments, log), log)
    wait(processes)


def train_drafters(out: Path, seconds: float, seed: int, batch: Batch) -> None:
    """All drafters at once, then MTP's layer goes into the hybrid checkpoint."""
    pairs = [("hybrid", m) for m in HYBRID_DRAFTERS] + [("dense", m) for m in DENSE_DRAFTERS]
    wait(dict(train_drafter(out, *pair, seconds, seed, batch) for pair in pairs))
    merged = out / "hybrid-mtp"
    shutil.copy(merged / "model.safetensors", out / "hybrid" / "model.safetensors")
    shutil.rmtree(merged)


def refine(out: Path, seconds: float, seed: int, batch: Batch) -> None:
    """The block drafters go on from their checkpoints, on other draws of the same answers."""
    processes = {}
    for target, method in REFINED:
        more = {**REFINE_RATES, "init": out / f"{target}-{method}"}
        name, process = train_drafter(out, target, method, seconds, seed + 1, batch, more)
        processes[name] = process
    wait(processes)


def train_drafter(
    out: Path,
    target: str,
    method: str,
    seconds: float,
    seed: int,
    batch: Batch,
    more: dict[str, object] | None = None,
) -> tuple[str, tuple[subprocess.Popen[bytes], Path]]:
    """Start one drafter; with `more` it is a second run, whose curve has a name of its own."""
    name = f"{target}-{method}"
    run = f"{name}-refined" if more else name
    log = out / "curves" / f"{run}.log"
    arguments = {
        "method": method,
        "target": out / target,
        "answers": out / f"{target}-train.safetensors",
        "held_out": out / f"{target}-held_out.safetensors",
        "out": out / name,
        "json": out / "curves" / f"{run}.json",
        "seconds": seconds,
        "seed": seed,
        "tokens": batch.tokens,
        "anchors": batch.anchors,
        **(more or {}),
    }
    return run, (launch("train_drafters", arguments, log), log)


def summarise(out: Path) -> None:
    """One line a run: what its curve file ends with."""
    for path in sorted((out / "curves").glob("*.json")):
        figures = json.loads(path.read_text())
        if not isinstance(figures, dict):  # the answers that a target gave, for reading
            continue
        end = figures.get("held_out") or figures.get("final")
        typer.echo(f"{path.stem}: {json.dumps(end)}")


def main(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, curves and logs.")],
    stage: Annotated[Stage, typer.Option()] = Stage.ALL,
    target_seconds: Annotated[float, typer.Option(help="Training time of the targets.")] = 180.0,
    drafter_seconds: Annotated[float, typer.Option(help="Training time of the drafters.")] = 105.0,
    refine_seconds: Annotated[
        float, typer.Option(help="Second run of the block drafters.")
    ] = 370.0,
    samples: Annotated[int, typer.Option(help="Tasks that the targets learn from.")] = 400_000,
    answers: Annotated[int, typer.Option(help="Prompts that the targets answer.")] = 24_000,
    tokens: Annotated[int, typer.Option(help="Tokens in a drafter's batch.")] = 4096,
    anchors: Annotated[int, typer.Option(help="Drafts in a block drafter's batch.")] = 768,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Run the recipe, or one stage of it."""
    began = time.monotonic()
    (out / "curves").mkdir(parents=True, exist_ok=True)
    batch = Batch(tokens, anchors)
    if stage in (Stage.ALL, Stage.TARGETS):
        train_targets(out, target_seconds, samples, seed)
        typer.echo(f"targets after {time.monotonic() - began:.0f} s")
    if stage in (Stage.ALL, Stage.DRAFTERS):
        write_answers(out, answers, seed)
        typer.echo(f"answers after {time.monotonic() - began:.0f} s")
        train_drafters(out, drafter_seconds, seed, batch)
        typer.echo(f"drafters after {time.monotonic() - began:.0f} s")
    if stage in (Stage.ALL, Stage.REFINE):
        refine(out, refine_seconds, seed, batch)
    summarise(out)
    typer.echo(f"all after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    typer.run(main)
