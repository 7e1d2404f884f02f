"""Decode throughput of adaptive verification against every fixed K and no speculation.

    python -m benchmarks.engine.adaptive [--json PATH] [--target hybrid|dense] [--layers N] ...

Dummy weights at real shapes, and the benchmark's own acceptance model (`acceptance.py`): half of
the requests are easy, half are hard, confidences are noisy. The engines of a group live side by
side on one GPU and take turns with their caches: at each case one after the other prefills, warms
up and is timed over `--repeats` windows. Groups follow each other, or run on GPUs of their own
where there are several, and each has the adaptive arm in it, so every ratio is of one run.
"""

from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engine import acceptance, cases, groups, shapes
from benchmarks.engine.arms import Setting
from benchmarks.engine.cases import Case
from benchmarks.engine.driver import Arm, median, slug, spread, start
from benchmarks.engine.groups import ADAPTIVE, VLLM_ADAPTIVE
from benchmarks.results import Result, Row, versions

NOTHING_LOST = 0.99
WORTH_IT = 1.10
SETTING = (
    f"vocabulary {shapes.VOCABULARY}, dummy weights; decode alone, windows of {Case(1, 1).steps} "
    f"steps, from 64 requests on of {Case(1, 64).steps}; unconditional acceptance of easy requests "
    f"{acceptance.EASY}, of hard ones {acceptance.HARD}; confidences with logit noise "
    f"{acceptance.NOISE}."
)


def measure(arm: Arm, case: Case, repeats: int) -> list[dict[str, Any]]:
    """Windows of one arm; its requests live through all of them, and the first is not counted.

    Empty if the arm ended: the other arms go on.
    """
    begun = arm.ask(do="begin", requests=case.load, prompt_tokens=case.prompt_tokens, seed=1)
    windows = [arm.ask(do="window", skip=cases.SETTLE, steps=case.steps)]
    for _ in range(repeats):
        windows.append(arm.ask(do="window", skip=cases.BREATH, steps=case.steps))
    if begun is None or None in windows:
        print(f"{case}, {arm.name}: ended, see {arm.log}", flush=True)
        return []
    arm.ask(do="end")
    speeds = ", ".join(f"{w['tokens_per_s']:.0f}" for w in windows)
    print(f"{case}, {arm.name}: prefilled in {begun:.1f} s, tok/s {speeds}", flush=True)
    return windows[1:]


def compared(
    windows: dict[str, list[dict[str, Any]]], case: Case, upstream: Sequence[str]
) -> list[Row]:
    """Throughput of every arm, and the ratios of those that are not upstream's."""
    speeds = {name: [w["tokens_per_s"] for w in windows[name]] for name in windows}
    rows = [
        Row(
            case=f"{case}, {name}",
            metric=metric,
            value=round(median(values), 2),
            unit=unit,
            spread=round(spread(values), 3),
        )
        for name in windows
        for metric, unit, key in (
            ("throughput", "tok/s", "tokens_per_s"),
            ("step", "ms", "step_ms"),
            ("CPU time of the engine's thread", "ms a step", "thread_ms"),
            ("CPU time of all its threads", "ms a step", "process_ms"),
        )
        for values in ([w[key] for w in windows[name]],)
    ]
    for name in windows:
        rows += _decisions(f"{case}, {name}", [w["counters"] for w in windows[name]])
    medians = {name: median(values) for name, values in speeds.items()}
    return rows + _ratios(medians, case, upstream)


def _ratios(speeds: dict[str, float], case: Case, upstream: Sequence[str]) -> list[Row]:
    """Over the best of no speculation and fixed K, and over upstream's own adaptive arm."""
    others = [name for name in speeds if name in upstream]
    fixed = [name for name in others if name != VLLM_ADAPTIVE]
    rivals = {"best fixed arm": max(fixed, key=speeds.__getitem__)} if fixed else {}
    if VLLM_ADAPTIVE in others:
        rivals["adaptive arm"] = VLLM_ADAPTIVE
    return [
        Row(
            case=f"{case}, {name}",
            metric=f"over upstream's {kind} ({rival})",
            value=round(speeds[name] / speeds[rival], 3),
            unit="x",
            baseline=round(speeds[rival], 1),
            bar=NOTHING_LOST if name == ADAPTIVE else None,
        )
        for name in speeds
        if name not in others
        for kind, rival in rivals.items()
    ]


def missing(group: groups.Group, measured: Collection[str], case: Case) -> list[Row]:
    """A row for each arm that did not start, or ended: a result must not hide that it was asked."""
    return [
        Row(case=f"{case}, {name}", metric="measured", value=0, unit="of 1", bar=1)
        for name, served in group.items()
        if case in served and name not in measured
    ]


def traced(arm: Arm, case: Case, folder: Path) -> list[Row]:
    """Profile an arm: how long its kernels run, and whether the host waits for them.

    Empty if the arm ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = arm.ask(
        do="trace", requests=case.load, prompt_tokens=case.prompt_tokens, steps=16,
        folder=str(folder), name=f"{slug(arm.name)}_{case.load}_{case.prompt_tokens}",
    )  # fmt: skip
    if found is None:
        print(f"{case}, {arm.name}: ended under the profiler, see {arm.log}", flush=True)
        return []
    label = f"{case}, {arm.name}, traced"
    waits = Row(
        case=label,
        metric="calls that wait for the stream",
        value=found["host_waits"],
        unit="a step",
        bar=0 if arm.name == ADAPTIVE else None,
        better="lower",
    )
    kernels = Row(case=label, metric="kernels", value=round(found["kernel_ms"], 2), unit="ms")
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


@dataclass
class Run:
    """Groups of one setting, and what they showed so far. json_path: written after each case."""

    setting: Setting
    groups: list[groups.Group]
    logs: Path
    json_path: Path | None = None
    traces: Path | None = None
    rows: dict[int, list[Row]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on(self, gpus: int) -> list[Row]:
        """All groups, on so many GPUs: a GPU's adaptive arm lives through all of its groups."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(1, len(self.groups) + 1):
            waiting.put(number)
        with ThreadPoolExecutor(max_workers=gpus) as pool:
            for done in [pool.submit(self._serve, waiting, gpu) for gpu in range(gpus)]:
                done.result()
        return self.found()

    def found(self) -> list[Row]:
        """The rows so far, and the verdict over them."""
        rows = [row for number in sorted(self.rows) for row in self.rows[number]]
        return rows + worth(rows)

    def _serve(self, waiting: queue.SimpleQueue[int], gpu: int) -> None:
        kept: list[Arm] = []
        while True:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                break
            kept = self._group(number, gpu, kept)
        for arm in kept:
            self._look_into(arm, gpu)
            arm.close()

    def _group(self, number: int, gpu: int, kept: list[Arm]) -> list[Arm]:
        """Measure a group; kept: the adaptive arm of the one before, as what is returned."""
        group, folder = self.groups[number - 1], self.logs / f"group_{number}"
        known = {arm.name for arm in kept}
        order = sorted((n for n in group if n not in known), key=lambda name: name == ADAPTIVE)
        running = start({name: self._request(name, group[name], gpu) for name in order}, folder)
        running += kept
        for case in self.setting.cases:
            found = {
                arm.name: measure(arm, case, self.setting.repeats)
                for arm in running
                if case in group.get(arm.name, ())  # one that was kept may not be asked for
            }
            running = [arm for arm in running if found.get(arm.name) != []]
            windows = {name: measured for name, measured in found.items() if measured}
            rows = compared(windows, case, self.setting.upstream())
            self._keep(number, rows + missing(group, windows, case))
        if self.traces is not None and number == len(self.groups):
            self._trace(running, group, self.traces)
        for arm in running:
            if arm.name != ADAPTIVE:
                arm.close()
        return [arm for arm in running if arm.name == ADAPTIVE]

    def _request(self, name: str, served: Sequence[Case], gpu: int) -> dict[str, Any]:
        caches = Path(tempfile.gettempdir()) / f"vllm_cache_gpu_{gpu}"
        environment = {
            "CUDA_VISIBLE_DEVICES": _device(gpu),
            "VLLM_CACHE_ROOT": str(caches / slug(name)),
        }
        return self.setting.request(name, served, environment)

    def _trace(self, running: Sequence[Arm], group: groups.Group, folder: Path) -> None:
        """Each arm of the last group, at its smallest case and its largest."""
        for arm in running:
            served = sorted(group[arm.name], key=lambda case: (case.load, case.prompt_tokens))
            for case in dict.fromkeys((served[0], served[-1])):
                self._keep(len(self.groups), traced(arm, case, folder))

    def _look_into(self, arm: Arm, gpu: int) -> None:
        """What the arm learnt of the host; the surface that it planned with, among the logs."""
        print("host, ms by octave of requests:", arm.ask(do="host_ms"), flush=True)
        surface = json.dumps(arm.ask(do="surface"))
        (self.logs / f"surface_{gpu}.json").write_text(surface + "\n", encoding="utf-8")

    def _keep(self, number: int, rows: list[Row]) -> None:
        with self._lock:
            cased = [r.model_copy(update={"case": f"group {number}, {r.case}"}) for r in rows]
            self.rows.setdefault(number, []).extend(cased)
            self._write()

    def _write(self) -> None:
        import torch

        setting = self.setting
        result = Result(
            name="engine/adaptive",
            device=torch.cuda.get_device_name(),
            repeats=setting.repeats,
            versions=versions("vllm", "torch", "triton", "transformers"),
            rows=self.found(),
            notes=f"{setting.target} target, {setting.layers} layers, {setting.method} drafter of "
            f"{shapes.DRAFTER_LAYERS} layers; "
            + "prefix caching, no two prompts alike; " * setting.prefix_caching
            + SETTING,
        )
        if self.json_path is not None:
            result.write(self.json_path)


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    target: Annotated[str, typer.Option(help="hybrid or dense.")] = "hybrid",
    method: Annotated[str, typer.Option(help="dspark or dflash.")] = "dspark",
    layers: Annotated[int, typer.Option(min=4, help="Of the target.")] = 32,
    fixed: Annotated[str, typer.Option(help="Fixed draft lengths.")] = "1,3,5,7",
    loads: Annotated[
        str, typer.Option(help="Requests at once; lists by semicolons, one a prompt length.")
    ] = "1,4,16,64,128,256; 1,4,16,64",
    prompt_tokens: Annotated[str, typer.Option(help="Prompt lengths.")] = "1024,8192",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    prefix_caching: Annotated[
        bool, typer.Option(help="Of all arms; prompts differ, so what it costs is seen.")
    ] = False,
    side_by_side: Annotated[
        str,
        typer.Option(
            "--groups",
            help="Arms side by side: names by commas, groups by semicolons; NAME:64 leaves loads "
            "above 64 out. Default: as many as fit.",
        ),
    ] = "",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs to use; 0 for all.")] = 0,
    logs: Annotated[Path | None, typer.Option(help="Folder for the engines' logs.")] = None,
    traces: Annotated[Path | None, typer.Option(help="Folder; of the last group's arms.")] = None,
) -> None:
    """Measure the arms, group after group."""
    folder = Path(tempfile.mkdtemp())
    try:
        asked = cases.parsed(prompt_tokens, loads)
        lengths = cases.numbers("--fixed", fixed)
        setting = Setting(target, method, layers, lengths, asked, repeats, folder, prefix_caching)
        used = _gpus(gpus)
        chosen = groups.parsed(side_by_side, asked, setting.options()) or groups.packed(
            setting.upstream(), ADAPTIVE, asked, _room_gib(), setting.memory_gib
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for number, group in enumerate(chosen, 1):
        left_out = {
            name: [str(case) for case in asked if case not in served]
            for name, served in group.items()
        }
        print(f"group {number}:", ", ".join(group), {n: c for n, c in left_out.items() if c})
    run = Run(setting, chosen, logs or folder, json_path, traces)
    (logs or folder).mkdir(parents=True, exist_ok=True)
    for row in run.on(used):
        if row.metric.startswith(("over", "gain", "throughput", "measured")):
            print(row.case, row.metric, row.value, row.unit, "" if row.met is None else row.met)


def _gpus(asked: int) -> int:
    """How many GPUs to use; ValueError where there are not so many."""
    import torch

    seen = torch.cuda.device_count()
    if seen < max(asked, 1):
        raise ValueError(f"--gpus: {max(asked, 1)} wanted, and torch sees {seen}")
    return asked or seen


def _device(gpu: int) -> str:
    """Name of the gpu-th device that this process sees, for a process that is to see it alone."""
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return seen[gpu] if seen else str(gpu)


def _room_gib() -> float:
    import torch

    return torch.cuda.get_device_properties(0).total_memory / (1 << 30) - 1.0


def worth(rows: list[Row]) -> list[Row]:
    """At the load where it gains most: over the best of no speculation and fixed K of all groups.

    How it does beside vLLM's own adaptive arm is said at every load, and is another question.
    """
    ratios: dict[str, list[float]] = {}
    for row in rows:
        over = row.metric.startswith("over") and VLLM_ADAPTIVE not in row.metric
        if over and row.case.endswith(f", {ADAPTIVE}"):
            ratios.setdefault(row.case.split(", ", 1)[1], []).append(row.value)
    if not ratios:
        return []
    case, worst = max(((c, min(values)) for c, values in ratios.items()), key=lambda x: x[1])
    return [Row(case=case, metric="gain at the best load", value=worst, unit="x", bar=WORTH_IT)]


if __name__ == "__main__":
    typer.run(main)
