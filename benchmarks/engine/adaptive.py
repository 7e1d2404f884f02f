"""Decode throughput of adaptive verification against every fixed K and no speculation.

    python benchmarks/engine/adaptive.py [--json PATH] [--target hybrid|dense] [--layers N] ...

Dummy weights at real shapes, and the benchmark's own acceptance model (`acceptance.py`): half of
the requests are easy, half are hard, confidences are noisy. The engines of a group run side by
side on one GPU and are measured in turn, `--repeats` times over; groups follow each other, or run
on GPUs of their own where there are several, and each has the adaptive arm in it, so every ratio is
of one run.
"""

from __future__ import annotations

import json
import queue
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engine import acceptance, shapes
from benchmarks.engine.arms import ADAPTIVE, SKIP, STEPS, Setting
from benchmarks.engine.driver import Arm, median, spread, start
from benchmarks.engine.groups import Group, packed, parsed
from benchmarks.results import Result, Row, versions

NOTHING_LOST = 0.99
WORTH_IT = 1.10
SETTING = (
    f"vocabulary {shapes.VOCABULARY}, dummy weights; decode alone, windows of {STEPS} steps; "
    f"unconditional acceptance of easy requests {acceptance.EASY}, of hard ones "
    f"{acceptance.HARD}; confidences with logit noise {acceptance.NOISE}."
)


def measure(
    arms: list[Arm],
    loads: list[int],
    prompt_tokens: int,
    repeats: int,
    up_to: Group,
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Every window of every arm and load, by (arm, load)."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for turn in range(repeats + 1):
        for arm in arms:
            windows = arm.ask(
                do="windows",
                loads=[load for load in loads if load <= up_to[arm.name]],
                prompt_tokens=prompt_tokens,
                skip=SKIP,
                steps=STEPS,
                seed=turn,
            )
            if windows is None:
                raise typer.Exit(f"{arm.name} ended, see {arm.log}")
            if turn == 0:  # compilation, autotuning and the first learning are not measured
                continue
            for window in windows:
                found.setdefault((arm.name, window["load"]), []).append(window)
            speeds = [f"{w['load']}: {w['tokens_per_s']:.0f}" for w in windows]
            print(arm.name, "|", ", ".join(speeds), flush=True)
    return found


def compared(
    windows: dict[tuple[str, int], list[dict[str, Any]]],
    names: list[str],
    load: int,
    prompt_tokens: int,
) -> list[Row]:
    """Throughput of every arm, and the adaptive ones over the best of upstream's."""
    case = f"{load} requests, {prompt_tokens} tokens"
    names = [name for name in names if (name, load) in windows]
    speeds = {name: [w["tokens_per_s"] for w in windows[name, load]] for name in names}
    rows = [
        Row(
            case=f"{case}, {name}",
            metric=metric,
            value=round(median(values), 2),
            unit=unit,
            spread=round(spread(values), 3),
        )
        for name in names
        for metric, unit, values in (
            ("throughput", "tok/s", speeds[name]),
            ("step", "ms", [w["step_ms"] for w in windows[name, load]]),
        )
    ]
    for name in names:
        rows += _decisions(f"{case}, {name}", [w["counters"] for w in windows[name, load]])
    others = [n for n in names if not n.startswith(ADAPTIVE) and "replay" not in n]
    best = max(others, key=lambda n: median(speeds[n])) if others else None
    for name in names if best else ():
        if name not in others:
            baseline = median(speeds[best or ""])
            rows.append(
                Row(
                    case=f"{case}, {name}",
                    metric=f"over upstream's best arm ({best})",
                    value=round(median(speeds[name]) / baseline, 3),
                    unit="x",
                    baseline=round(baseline, 1),
                    bar=NOTHING_LOST if name == ADAPTIVE else None,
                )
            )
    return rows


def traced(arm: Arm, load: int, prompt_tokens: int, folder: Path) -> list[Row]:
    """Profile the adaptive arm: how long its kernels run, and whether the host waits for them."""
    folder.mkdir(parents=True, exist_ok=True)
    found = arm.ask(
        do="trace", requests=load, prompt_tokens=prompt_tokens, steps=16, folder=str(folder),
        name=arm.name,
    )  # fmt: skip
    case = f"{load} requests, {prompt_tokens} tokens, {arm.name}, traced"
    waits = Row(
        case=case,
        metric="calls that wait for the stream",
        value=found["host_waits"],
        unit="a step",
        bar=0,
        better="lower",
    )
    kernels = Row(case=case, metric="kernels", value=round(found["kernel_ms"], 2), unit="ms")
    return [waits, kernels]


def _decisions(case: str, counted: list[dict[str, float]]) -> list[Row]:
    """What the planner did in those windows, a request and step."""
    total = {key: sum(c[key] for c in counted) for key in (counted[0] if counted else {})}
    if not total.get("requests"):
        return []
    ratios = {
        "draft tokens made": total["drafted"] / total["requests"],
        "draft tokens verified": total["verified"] / total["requests"],
        "tokens emitted": total["emitted"] / total["requests"],
        "expected over real acceptances": total["expected_accepted"]
        / max(total["emitted"] - total["requests"], 1e-9),
        "predicted over real step time": total["predicted_ms"] / max(total["real_ms"], 1e-9),
    }
    return [Row(case=case, metric=m, value=round(v, 3), unit="") for m, v in ratios.items()]


def numbers(text: str) -> list[int]:
    """Comma-separated whole numbers."""
    return [int(part) for part in text.split(",") if part.strip()]


@dataclass
class Run:
    """Groups of one setting, and what they showed so far. json_path: written after each group."""

    setting: Setting
    groups: list[Group]
    repeats: int
    logs: Path
    json_path: Path | None = None
    traces: Path | None = None
    rows: dict[int, list[Row]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on(self, gpus: int) -> list[Row]:
        """All groups, each on one of so many GPUs."""
        free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for gpu in range(gpus):
            free.put(gpu)

        def one(number: int) -> None:
            gpu = free.get()
            try:
                self._group(number, gpu)
            finally:
                free.put(gpu)

        with ThreadPoolExecutor(max_workers=gpus) as pool:
            for done in [pool.submit(one, n) for n in range(1, len(self.groups) + 1)]:
                done.result()
        return self.found()

    def found(self) -> list[Row]:
        """The rows of all groups that are done, and the verdict over them."""
        rows = [row for number in sorted(self.rows) for row in self.rows[number]]
        return rows + worth(rows)

    def _group(self, number: int, gpu: int) -> None:
        group, setting = self.groups[number - 1], self.setting
        folder = self.logs / f"group_{number}"
        caches = Path(tempfile.gettempdir()) / f"vllm_cache_gpu_{gpu}"

        def request(name: str, most: int) -> dict[str, Any]:
            environment = {
                "CUDA_VISIBLE_DEVICES": str(gpu),
                "VLLM_CACHE_ROOT": str(caches / name.replace(" ", "_").replace("=", "")),
            }
            return setting.request(name, most, environment)

        running = start({name: request(name, most) for name, most in group.items()}, folder)
        windows = measure(running, setting.loads, setting.prompt_tokens, self.repeats, group)
        rows = [
            row
            for load in setting.loads
            for row in compared(windows, [arm.name for arm in running], load, setting.prompt_tokens)
        ]
        for arm in running:
            if arm.name == ADAPTIVE:
                rows += self._looked_into(arm, folder)
            arm.close()
        with self._lock:
            cased = [r.model_copy(update={"case": f"group {number}, {r.case}"}) for r in rows]
            self.rows[number] = cased
            self._write()

    def _looked_into(self, arm: Arm, folder: Path) -> list[Row]:
        """Traces where asked for; the surface that the arm planned with, among the logs."""
        print("host, ms by octave of requests:", arm.ask(do="host_ms"), flush=True)
        surface = json.dumps(arm.ask(do="surface"))
        (folder / "surface.json").write_text(surface + "\n", encoding="utf-8")
        if self.traces is None:
            return []
        return traced(arm, max(self.setting.loads), self.setting.prompt_tokens, self.traces)

    def _write(self) -> None:
        import torch

        setting = self.setting
        result = Result(
            name="engine/adaptive",
            device=torch.cuda.get_device_name(),
            repeats=self.repeats,
            versions=versions("vllm", "torch", "triton", "transformers"),
            rows=self.found(),
            notes=f"{setting.target} target, {setting.layers} layers, {setting.method} drafter of "
            f"{shapes.DRAFTER_LAYERS} layers; {SETTING}",
        )
        if self.json_path is not None:
            result.write(self.json_path)


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    target: Annotated[str, typer.Option(help="hybrid or dense.")] = "hybrid",
    method: Annotated[str, typer.Option(help="dspark or dflash.")] = "dspark",
    layers: Annotated[int, typer.Option(min=4, help="Of the target.")] = 32,
    fixed: Annotated[str, typer.Option(help="Fixed draft lengths.")] = "1,3,5,7",
    loads: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,16,64,128,256",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    groups: Annotated[
        str,
        typer.Option(
            help="Arms side by side: names by commas, groups by semicolons; NAME:64 leaves loads "
            "above 64 out. Default: as many as fit."
        ),
    ] = "",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs to use; 0 for all.")] = 0,
    logs: Annotated[Path | None, typer.Option(help="Folder for the engines' logs.")] = None,
    traces: Annotated[Path | None, typer.Option(help="Folder for traces of the arm.")] = None,
) -> None:
    """Measure the arms, group after group."""
    import torch

    folder = Path(tempfile.mkdtemp())
    try:
        setting = Setting(
            target, method, layers, numbers(fixed), numbers(loads), prompt_tokens, folder
        )
        chosen = parsed(groups, max(setting.loads)) or packed(
            setting.upstream(), ADAPTIVE, setting.loads, _room_gib(), setting.memory_gib
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for number, group in enumerate(chosen, 1):
        print(f"group {number}:", ", ".join(f"{name}:{most}" for name, most in group.items()))
    run = Run(setting, chosen, repeats, logs or folder, json_path, traces)
    for row in run.on(gpus or torch.cuda.device_count()):
        if row.metric.startswith(("over", "gain")) or row.metric == "throughput":
            print(row.case, row.metric, row.value, row.unit, "" if row.met is None else row.met)


def _room_gib() -> float:
    import torch

    return torch.cuda.get_device_properties(0).total_memory / (1 << 30) - 1.0


def worth(rows: list[Row]) -> list[Row]:
    """At the load where it gains most: over the best of all groups' arms, not of one group's."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.metric.startswith("over") and row.case.endswith(f", {ADAPTIVE}"):
            ratios.setdefault(row.case.split(", ", 1)[1], []).append(row.value)
    if not ratios:
        return []
    case, worst = max(((c, min(values)) for c, values in ratios.items()), key=lambda x: x[1])
    return [Row(case=case, metric="gain at the best load", value=worst, unit="x", bar=WORTH_IT)]


if __name__ == "__main__":
    typer.run(main)
