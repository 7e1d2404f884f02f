"""Decode throughput of adaptive verification against every fixed K and no speculation.

    python -m benchmarks.engine.adaptive [--json PATH] [--target hybrid|dense] [--layers N] ...

Dummy weights at real shapes, and the benchmark's own acceptance model (`acceptance.py`): half of
the requests are easy, half are hard, confidences are noisy. All engines run side by side on one
GPU and are measured in turn, `--repeats` times over.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engine import acceptance, shapes
from benchmarks.engine.driver import Arm, engine_arguments, median, spread, start
from benchmarks.results import Result, Row, versions

DRAFT_TOKENS = 7
SHORT, LONG = 16, 144
NOTHING_LOST = 0.99
WORTH_IT = 1.10


def requests(
    target: str, method: str, layers: int, fixed: list[int], cache_mib: int, folder: Path
) -> dict[str, dict[str, Any]]:
    """No speculation, each fixed K, the plugin's planner and vLLM's."""
    shape = {"hybrid": shapes.hybrid, "dense": shapes.dense}[target](layers)
    model = shapes.write(folder / "target", shape)
    drafter = shapes.write(folder / "drafter", shapes.drafter(method, layers))
    dummy = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 16384}

    def speculative(draft_tokens: int, adaptive: bool) -> dict[str, Any]:
        return {
            "method": method,
            "model": str(drafter),
            "num_speculative_tokens": draft_tokens,
            "enable_adaptive_verification": adaptive,
            **acceptance.speculative_options(draft_tokens),
        }

    def arm(config: dict[str, Any] | None, share: float, planner: str = "plugin") -> dict[str, Any]:
        # A native GDN cache holds K + 1 states a request, so smaller K need less.
        size = int(cache_mib * share)
        engine = engine_arguments(config, kv_cache_mib=size, planner=planner, **dummy)
        return {"model": str(model), "engine": engine, "acceptance": config is not None}

    arms = {"no speculation": arm(None, 0.4)}
    for k in fixed:
        arms[f"K = {k}"] = arm(speculative(k, False), 0.4 + 0.6 * k / DRAFT_TOKENS)
    arms["adaptive"] = arm(speculative(DRAFT_TOKENS, True), 1.0)
    arms["adaptive, vLLM's planner"] = arm(speculative(DRAFT_TOKENS, True), 1.0, "vllm")
    return arms


def measure(arms: list[Arm], loads: list[int], prompt_tokens: int, repeats: int) -> list[Row]:
    """Rows of every arm and load; ratios against the best fixed arm of the same load."""
    speeds: dict[tuple[str, int], list[float]] = {}
    for load in loads:
        for arm in arms:  # compilation, autotuning and the first learning are not measured
            ask(arm, load, prompt_tokens, seed=0)
    for turn in range(repeats):
        for load in loads:
            for arm in arms:
                answer = ask(arm, load, prompt_tokens, seed=1 + turn)
                speeds.setdefault((arm.name, load), []).append(answer["tokens_per_s"])
                print(arm.name, load, round(answer["tokens_per_s"]), flush=True)
    rows = []
    for load in loads:
        rows += compared(speeds, [arm.name for arm in arms], load, prompt_tokens)
    return rows


def ask(arm: Arm, load: int, prompt_tokens: int, seed: int) -> dict[str, Any]:
    """One measurement; ends the benchmark where the engine has ended."""
    answer = arm.ask(
        do="measure",
        requests=load,
        prompt_tokens=prompt_tokens,
        short=SHORT,
        long=LONG,
        seed=seed,
    )
    if answer is None:
        raise typer.Exit(f"{arm.name} ended, see {arm.log}")
    return answer


def compared(
    speeds: dict[tuple[str, int], list[float]], names: list[str], load: int, prompt_tokens: int
) -> list[Row]:
    """Throughput of every arm, and the adaptive ones over the best of the others."""
    case = f"{load} requests, {prompt_tokens} tokens"
    rows = [
        Row(
            case=f"{case}, {name}",
            metric="throughput",
            value=round(median(speeds[name, load]), 1),
            unit="tok/s",
            spread=round(spread(speeds[name, load]), 3),
        )
        for name in names
    ]
    others = [n for n in names if not n.startswith("adaptive")]
    best = max(others, key=lambda n: median(speeds[n, load])) if others else None
    for name in names if best else ():
        if name.startswith("adaptive"):
            baseline = median(speeds[best or "", load])
            rows.append(
                Row(
                    case=f"{case}, {name}",
                    metric=f"over the best fixed arm ({best})",
                    value=round(median(speeds[name, load]) / baseline, 3),
                    unit="x",
                    baseline=round(baseline, 1),
                    bar=NOTHING_LOST if name == "adaptive" else None,
                )
            )
    return rows


def numbers(text: str) -> list[int]:
    """Comma-separated whole numbers."""
    return [int(part) for part in text.split(",") if part.strip()]


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    target: Annotated[str, typer.Option(help="hybrid or dense.")] = "hybrid",
    method: Annotated[str, typer.Option(help="dspark or dflash.")] = "dspark",
    layers: Annotated[int, typer.Option(min=4, help="Of the target.")] = 32,
    fixed: Annotated[str, typer.Option(help="Fixed draft lengths.")] = "1,3,5,7",
    loads: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,16,64,128,256",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    cache_mib: Annotated[int, typer.Option(help="Cache of the largest arm.")] = 65536,
    only: Annotated[str, typer.Option(help="Names of arms, semicolon-separated.")] = "",
    logs: Annotated[Path | None, typer.Option(help="Folder for the engines' logs.")] = None,
) -> None:
    """Measure all arms in one run."""
    import torch

    folder = Path(tempfile.mkdtemp())
    arms = requests(target, method, layers, numbers(fixed), cache_mib, folder)
    chosen = [name.strip() for name in only.split(";") if name.strip()]
    running = start({n: a for n, a in arms.items() if not chosen or n in chosen}, logs or folder)
    rows = measure(running, numbers(loads), prompt_tokens, repeats)
    ratios = [r.value for r in rows if r.metric.startswith("over") and r.case.endswith("adaptive")]
    if ratios:
        rows.append(
            Row(
                case="adaptive, best load",
                metric="over the best fixed arm",
                value=max(ratios),
                unit="x",
                bar=WORTH_IT,
            )
        )
    result = Result(
        name="engine/adaptive",
        device=torch.cuda.get_device_name(),
        repeats=repeats,
        versions=versions("vllm", "torch", "triton", "transformers"),
        rows=rows,
        notes=f"{target} target, {layers} layers, {method} drafter of {shapes.DRAFTER_LAYERS} "
        f"layers, vocabulary {shapes.VOCABULARY}, dummy weights; decode alone, {LONG - SHORT} "
        f"tokens a request; unconditional acceptance of easy requests {acceptance.EASY}, of hard "
        f"ones {acceptance.HARD}; confidences with logit noise {acceptance.NOISE}.",
    )
    for arm in running:
        arm.close()
    for row in rows:
        print(row.case, row.metric, row.value, row.unit, "" if row.met is None else row.met)
    if json_path is not None:
        result.write(json_path)


if __name__ == "__main__":
    typer.run(main)
