"""Benchmarks on an Ascend NPU: operators against their oracles, engines in the talk's two tables.

    python benchmarks/npu/run.py --model DIR --drafter dspark=DIR --drafter dflash=DIR --out DIR
    python benchmarks/npu/run.py --dry-run

Every operator is compared with its oracle before it is timed, and every engine's greedy answers
with those of the target alone; a wrong one gets no figure and the exit code is 1. --dry-run needs
no NPU: operators are compared at small shapes under Triton's interpreter, arms are built and
printed, nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is imported

from benchmarks import results  # noqa: E402
from benchmarks.npu import arms, tables, talk  # noqa: E402

ARM_TIMEOUT_S = 3600
PROMPTS = ROOT / "vllm_ascend_spec/zoo/prompts.jsonl"
PACKAGES = ("vllm", "vllm-ascend", "torch", "torch-npu", "triton-ascend")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="directory of the target; without it only operators run")
    parser.add_argument(
        "--drafter",
        action="append",
        default=[],
        metavar="METHOD=DIR",
        help="drafter of dspark, dflash or eagle3; may be repeated",
    )
    parser.add_argument("--batch", type=int, action="append", help="batch size (128 and 256)")
    parser.add_argument("--draft-tokens", type=int, default=talk.DRAFT_TOKENS, help="K")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines with `prompt`")
    parser.add_argument("--output-tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of an arm")
    parser.add_argument("--engine", default="{}", metavar="JSON", help="more arguments for vLLM")
    parser.add_argument("--out", type=Path, help="folder for npu.json and tables.md")
    parser.add_argument("--dry-run", action="store_true", help="check everything, time nothing")
    options = parser.parse_args(arguments)
    options.drafters = {}
    for given in options.drafter:
        method, equals, directory = given.partition("=")
        if not equals or method not in arms.VLLM_METHODS:
            known = ", ".join(arms.VLLM_METHODS)
            parser.error(f"--drafter {given}: write METHOD=DIR, METHOD one of {known}")
        options.drafters[method] = directory
    try:
        options.engine = json.loads(options.engine)
    except ValueError as error:
        parser.error(f"--engine is not JSON: {error}")
    if not options.prompts.is_file():
        parser.error(f"--prompts {options.prompts}: no such file")
    if not options.dry_run:
        _require_npu(parser, options)
    return options


def _require_npu(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    try:
        import torch
        import torch_npu  # noqa: F401
    except ImportError as error:
        parser.error(f"no torch_npu here ({error}): run on an NPU host, or with --dry-run")
    if not torch.npu.is_available():
        parser.error("torch_npu finds no NPU: run on an NPU host, or with --dry-run")
    if options.out is None:
        parser.error("--out DIR is needed: where the figures go")
    for name, directory in {"--model": options.model, **options.drafters}.items():
        if directory is not None and not Path(directory).is_dir():
            parser.error(f"{name} {directory}: no such directory")


def plan_of(options: argparse.Namespace) -> arms.Plan | None:
    """None without a model: then only operators are measured."""
    if options.model is None and not options.dry_run:
        return None
    drafters = options.drafters
    if options.dry_run and not drafters:
        drafters = {method: f"<{method} drafter>" for method in arms.VLLM_METHODS}
    return arms.Plan(
        model=options.model or "<model>",
        drafters=drafters,
        batches=options.batch or list(talk.BATCHES),
        draft_tokens=options.draft_tokens,
        prompts=arms.read_prompts(options.prompts),
        output_tokens=options.output_tokens,
        repeats=options.repeats,
        engine=options.engine,
    )


def run_operators(dry: bool) -> tuple[list[results.Row], list[str]]:
    """(rows, what was wrong)."""
    if dry:
        from tests.interpreter import mend_interpreter

        mend_interpreter()
    from benchmarks.npu import operators

    device, checked = ("cpu", operators.DRY) if dry else ("npu", operators.CHECKED)
    rows, wrong, right = [], [], set()
    for index, case in enumerate(operators.cases(device, checked)):
        problem = operators.wrong(case)
        print(f"{case.name}: {problem or 'equals its oracle'}", flush=True)
        if problem is None:
            right.add(index)
        else:
            wrong.append(f"{case.name}: {problem}")
    clock = operators.NpuClock()
    for index, case in enumerate(() if dry else operators.cases(device, operators.TIMED)):
        if index not in right:
            continue
        time, spread = clock.microseconds(case.launch)
        print(f"{case.name}: {time:.1f} us", flush=True)
        rows.append(
            results.Row(
                case=case.name, metric="time of a call", value=time, unit="us", spread=spread,
                better="lower",
            )
        )  # fmt: skip
    return rows, wrong


def run_arm(arm: arms.Arm) -> arms.Answer | str:
    """The arm's answer, or the last line of what it died with.

    On an NPU an arm of dynamic lengths plans with its own engine's step costs, measured first.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, surface = Path(folder, "answer.json"), Path(folder, "surface.json")
        if arm.dynamic and arm.plan.platform != "cpu":
            problem = _child("surface", arm, surface)
            if problem is not None:
                return problem
            arm = arm.model_copy(update={"cost_surface": str(surface)})
        problem = _child("answer", arm, answer)
        if problem is not None:
            return problem
        return arms.Answer.model_validate_json(answer.read_text(encoding="utf-8"))


def _child(what: str, arm: arms.Arm, out: Path) -> str | None:
    """Have `engine_arm` write `out`; the last line of what it died with, None where it did not."""
    request = out.with_name("request.json")
    request.write_text(arm.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.npu.engine_arm", what, str(request), str(out)]
    # Only an engine in the same process can be asked for its step costs.
    environment = os.environ | (
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if what == "surface" else {}
    )
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            timeout=ARM_TIMEOUT_S,
            check=False,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"failed: no end after {ARM_TIMEOUT_S} s"
    if out.exists():
        return None
    sys.stderr.write(done.stderr[-6000:])
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return f"failed: {lines[-1][:120]}"


def run_engines(plan: arms.Plan) -> tuple[dict[tables.Key, Any], list[str]]:
    """(answer or why there is none, by arm; what was wrong)."""
    seen: dict[tables.Key, Any] = {}
    wrong = []
    for arm in arms.arms_of(plan):
        found = run_arm(arm)
        target = seen.get((arm.batch, "none", False))
        if isinstance(found, arms.Answer) and arm.method != "none":
            if not isinstance(target, arms.Answer):
                found = "no figure: the target alone has none to compare with"
            elif (problem := arms.differs(found, target)) is not None:
                found = f"wrong answers ({problem})"
        if isinstance(found, str):
            wrong.append(f"{arm.name}: {found}")
        seen[arm.batch, arm.method, arm.dynamic] = found
        print(f"{arm.name}: {found if isinstance(found, str) else found.tokens_per_s}", flush=True)
    return seen, wrong


def engine_rows(plan: arms.Plan, seen: dict[tables.Key, Any]) -> list[results.Row]:
    rows = []
    for arm in arms.arms_of(plan):
        key = arm.batch, arm.method, arm.dynamic
        answer, relative = seen[key], tables.ratio(*key, seen)
        if relative is None:
            continue
        said = talk.FIGURES.get(key, talk.Figure())
        rows.append(
            results.Row(
                case=arm.name,
                metric="speedup over the target alone",
                value=relative,
                unit="x",
                spread=arms.spread(answer.tokens_per_s),
                baseline=said.ratio,
            )
        )
    return rows


def main() -> int:
    options = parse()
    rows, wrong = run_operators(options.dry_run)
    plan, seen = plan_of(options), {}
    if plan is not None and options.dry_run:
        for arm in arms.arms_of(plan):
            print(f"{arm.name}: {json.dumps(arm.llm_arguments())}")
    elif plan is not None:
        seen, wrong_arms = run_engines(plan)
        wrong += wrong_arms
        rows += engine_rows(plan, seen)
    batches = plan.batches if plan else talk.BATCHES
    text = "\n\n".join(tables.table(batch, seen) for batch in batches)
    print(f"\n{text}")
    if options.out is not None and not options.dry_run:
        write(options, rows, text)
    for problem in wrong:
        print(f"wrong: {problem}", file=sys.stderr)
    return 1 if wrong else 0


def write(options: argparse.Namespace, rows: list[results.Row], text: str) -> None:
    import torch

    device = torch.npu.get_device_name()
    results.Result(
        name="npu",
        device=device,
        repeats=options.repeats,
        rows=rows,
        versions=results.versions(*PACKAGES),
        notes="Ratios' baseline is the talk's figure, of another machine and Model Runner V1.",
    ).write(options.out / "npu.json")
    (options.out / "tables.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
