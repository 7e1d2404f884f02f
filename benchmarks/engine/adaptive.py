"""Decode throughput of adaptive verification against every fixed K and no speculation.

    python -m benchmarks.engine.adaptive [--json PATH] [--target hybrid|dense] [--layers N] ...

Dummy weights at real shapes, and the benchmark's own acceptance model (`acceptance.py`): half of
the requests are easy, half are hard, confidences are noisy. The engines of a group run side by
side on one GPU and are measured in turn, `--repeats` times over; groups follow each other, and
each has the adaptive arm in it, so every ratio is of one run.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engine import acceptance, shapes
from benchmarks.engine.driver import Arm, engine_arguments, median, spread, start
from benchmarks.results import Result, Row, versions

DRAFT_TOKENS = 7
SKIP, STEPS = 24, 64
EMITTED = 4.0  # tokens a step and request, mean over the acceptance model's requests at K = 7
NOTHING_LOST = 0.99
WORTH_IT = 1.10
ADAPTIVE = "adaptive"
SETTING = (
    f"vocabulary {shapes.VOCABULARY}, dummy weights; decode alone, windows of {STEPS} steps; "
    f"unconditional acceptance of easy requests {acceptance.EASY}, of hard ones "
    f"{acceptance.HARD}; confidences with logit noise {acceptance.NOISE}."
)


def requests(
    target: str, method: str, layers: int, fixed: list[int], loads: list[int], prompt_tokens: int,
    folder: Path, up_to: dict[str, int] | None = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """No speculation, each fixed K as upstream has it, and the plugin's arms.

    up_to: largest load of an arm whose cache for all loads would take the memory of the others.
    """
    shape = {"hybrid": shapes.hybrid, "dense": shapes.dense}[target](layers)
    model = shapes.write(folder / "target", shape)
    drafter = shapes.write(folder / "drafter", shapes.drafter(method, layers))
    # Prompt, then for every load its steps, each of up to K + 1 tokens.
    tokens = prompt_tokens + len(loads) * (SKIP + STEPS) * (DRAFT_TOKENS + 1)

    def speculative(draft_tokens: int, adaptive: bool) -> dict[str, Any]:
        return {
            "method": method,
            "model": str(drafter),
            "num_speculative_tokens": draft_tokens,
            "enable_adaptive_verification": adaptive,
            **acceptance.speculative_options(draft_tokens),
        }

    def arm(
        name: str,
        draft_tokens: int,
        adaptive: bool = False,
        planner: str = "plugin",
        state: str = "native",
    ) -> dict[str, Any]:
        most = min((up_to or {}).get(name, max(loads)), max(loads))
        # The largest load alone matters for the cache; easy requests grow beyond the mean.
        held = prompt_tokens + int((SKIP + STEPS) * min(draft_tokens + 1, EMITTED))
        engine = engine_arguments(
            speculative(draft_tokens, adaptive) if draft_tokens else None,
            kv_cache_mib=shapes.cache_mib(shape, most, held, draft_tokens, state == "replay"),
            planner=planner,
            gdn_state=state,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=max(2048, -(-tokens // 1024) * 1024),
            max_num_seqs=most,
            largest_graph=min(2048, most * (draft_tokens + 1)),
        )
        accepting = bool(draft_tokens)
        return {"model": str(model), "engine": engine, "acceptance": accepting, "waits": adaptive}

    state = "replay" if target == "hybrid" else "native"
    wanted: dict[str, dict[str, Any]] = {
        "no speculation": {"draft_tokens": 0},
        **{f"K = {k}": {"draft_tokens": k} for k in fixed},
        ADAPTIVE: {"draft_tokens": DRAFT_TOKENS, "adaptive": True, "state": state},
        "adaptive with vLLM's planner": {
            "draft_tokens": DRAFT_TOKENS, "adaptive": True, "state": state, "planner": "vllm",
        },
    }  # fmt: skip
    if target == "hybrid":
        wanted["adaptive with native states"] = {"draft_tokens": DRAFT_TOKENS, "adaptive": True}
        wanted["K = 7 with replay states"] = {"draft_tokens": DRAFT_TOKENS, "state": "replay"}
    return {name: arm(name, **options) for name, options in wanted.items()}


def measure(
    arms: list[Arm],
    loads: list[int],
    prompt_tokens: int,
    repeats: int,
    up_to: dict[str, int] | None = None,
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Every window of every arm and load, by (arm, load)."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for turn in range(repeats + 1):
        for arm in arms:
            windows = arm.ask(
                do="windows",
                loads=[load for load in loads if load <= (up_to or {}).get(arm.name, load)],
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


def members(group: str, most: int) -> dict[str, int]:
    """Arms of a group, and the largest load of each: "K = 1,K = 7:64"."""
    parts = [part.strip().partition(":") for part in group.split(",") if part.strip()]
    return {name.strip(): int(limit or most) for name, _, limit in parts}


def numbers(text: str) -> list[int]:
    """Comma-separated whole numbers."""
    return [int(part) for part in text.split(",") if part.strip()]


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    target: Annotated[str, typer.Option(help="hybrid or dense.")] = "hybrid",
    method: Annotated[str, typer.Option(help="dspark or dflash.")] = "dspark",
    layers: Annotated[int, typer.Option(min=4, help="Of the target.")] = 16,
    fixed: Annotated[str, typer.Option(help="Fixed draft lengths.")] = "1,3,5,7",
    loads: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,16,64,128,256",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    groups: Annotated[
        str,
        typer.Option(
            help="Arms side by side: names by commas, groups by semicolons; NAME:64 leaves loads "
            "above 64 out."
        ),
    ] = "no speculation,K = 1,K = 3,adaptive;no speculation,K = 5,K = 7,adaptive",
    logs: Annotated[Path | None, typer.Option(help="Folder for the engines' logs.")] = None,
    traces: Annotated[Path | None, typer.Option(help="Folder for traces of the arm.")] = None,
) -> None:
    """Measure the arms, group after group."""
    import torch

    folder, sizes = Path(tempfile.mkdtemp()), numbers(loads)
    rows: list[Row] = []
    for number, group in enumerate(groups.split(";"), 1):
        up_to = members(group, max(sizes))
        arms = requests(target, method, layers, numbers(fixed), sizes, prompt_tokens, folder, up_to)
        running = start({name: arms[name] for name in up_to}, logs or folder)
        windows = measure(running, sizes, prompt_tokens, repeats, up_to)
        for arm in running:
            if traces is not None and arm.name == ADAPTIVE:
                rows += traced(arm, max(sizes), prompt_tokens, traces)
        for arm in running:
            if arm.name == ADAPTIVE:
                print("host, ms by octave of requests:", arm.ask(do="host_ms"), flush=True)
                surface = json.dumps(arm.ask(do="surface"))
                ((logs or folder) / f"surface_{number}.json").write_text(surface + "\n")
            arm.close()
        for load in sizes:
            rows += [
                row.model_copy(update={"case": f"group {number}, {row.case}"})
                for row in compared(windows, [arm.name for arm in running], load, prompt_tokens)
            ]
        notes = f"{target} target, {layers} layers, {method} drafter of {shapes.DRAFTER_LAYERS} "
        result = Result(
            name="engine/adaptive",
            device=torch.cuda.get_device_name(),
            repeats=repeats,
            versions=versions("vllm", "torch", "triton", "transformers"),
            rows=rows + worth(rows),
            notes=f"{notes}layers; {SETTING}",
        )
        if json_path is not None:
            result.write(json_path)
    for row in rows + worth(rows):
        if row.metric.startswith(("over", "gain")) or row.metric == "throughput":
            print(row.case, row.metric, row.value, row.unit, "" if row.met is None else row.met)


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
