"""One run of the demo from its options to its files."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_ascend_spec.demo import answers, arms, processes, rows, table
from vllm_ascend_spec.demo.arms import Arm
from vllm_ascend_spec.demo.records import ArmRecord, ArmRequest, Report
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.zoo import DRAFT_TOKENS, Zoo

DEFAULT_PROMPTS = 24


def run(
    methods: list[str] | None,
    prompts: int | None,
    json_path: Path | None,
    html_path: Path | None,
    model: str,
) -> int:
    """See `vllm_ascend_spec.demo.run`."""
    for path in (json_path, html_path):
        check_writable(path)
    check_packages(html_path)
    console = Console()
    report = measure(arms.choose(methods), prompts or DEFAULT_PROMPTS, Zoo(), model, console)
    console.print(table.table(report.rows))
    for row in report.rows:
        if row.note:
            console.print(f"[dim]{row.title}: {row.note}[/dim]")
    console.print(f"[dim]{report.speed_note}[/dim]")
    if json_path is not None:
        json_path.write_text(report.model_dump_json(indent=1), encoding="utf-8")
        console.print(f"wrote {json_path}")
    if html_path is not None:
        from vllm_ascend_spec.demo import page

        html_path.write_text(page.render(report), encoding="utf-8")
        console.print(f"wrote {html_path}")
    problems = rows.problems(report.rows)
    for problem in problems:
        console.print(f"FAILED {problem}", style="bold red", soft_wrap=True)
    return 1 if problems else 0


def check_writable(path: Path | None) -> None:
    """Refuse a result file whose folder is not there before minutes are spent on the run."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UserError(f"{path}: no folder {path.absolute().parent}; make it or name another")


def check_packages(html_path: Path | None) -> None:
    """Refuse to start without the packages that the end of the run needs."""
    needed = ("jsonschema", *(("plotly", "jinja2") if html_path is not None else ()))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the demo needs {', '.join(missing)}: pip install 'vllm-ascend-spec[cpu]'")


def measure(chosen: Sequence[Arm], prompts: int, zoo: Zoo, target: str, console: Console) -> Report:
    """Run the arms and sum up what they saw."""
    picked = arms.sample(zoo.prompts(), prompts)
    runnable = [arm for arm in chosen if _runs(arm, zoo, target)]
    requests = [arms.request(arm, zoo, target, picked) for arm in runnable]
    started = time.monotonic()
    outcomes = _run_with_bars(requests, {arm.name: arm.title for arm in runnable}, console)
    by_name = {request.name: o for request, o in zip(requests, outcomes, strict=True)}
    records = [outcome for outcome in outcomes if isinstance(outcome, ArmRecord)]
    for outcome in outcomes:
        if isinstance(outcome, processes.ArmFailure):
            console.print(f"[bold red]{outcome.name} failed[/bold red]; the end of its log:")
            console.print(outcome.log, markup=False, highlight=False, soft_wrap=True)
    prompt_records = [arms.prompt_record(prompt) for prompt in picked]
    return Report(
        command=shlex.join(["vllm-ascend-spec", *sys.argv[1:]]),
        date=datetime.now(timezone.utc).date().isoformat(),
        device=f"CPU {platform.machine()}, {os.cpu_count()} cores, one an arm",
        model=target,
        draft_tokens=DRAFT_TOKENS,
        max_tokens=arms.MAX_TOKENS,
        prompts=prompt_records,
        versions=records[0].versions if records else {},
        seconds=time.monotonic() - started,
        speed_note=table.SPEED_NOTE,
        near_tie_gap=answers.NEAR_TIE_GAP,
        rows=rows.build(chosen, by_name, prompt_records, DRAFT_TOKENS),
        arms=records,
    )


def _runs(arm: Arm, zoo: Zoo, target: str) -> bool:
    if arm.name in arms.NOT_YET:
        return False
    return arm.method == "none" or arm.method in zoo.methods(target)


def _run_with_bars(
    requests: Sequence[ArmRequest], titles: dict[str, str], console: Console
) -> list[ArmRecord | processes.ArmFailure]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[title]:<16}"),
        BarColumn(),
        TextColumn("{task.fields[state]:<32}"),
        TimeElapsedColumn(),
    )
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        bars = {
            request.name: progress.add_task(
                request.name,
                total=len(request.prompts),
                title=titles[request.name],
                state="waits for a core",
                start=False,
            )
            for request in requests
        }
        tokens = dict.fromkeys(bars, 0)

        def listen(name: str, kind: str, amount: int) -> None:
            with lock:
                tokens[name] += amount if kind == "tokens" else 0
                state = {
                    "load": "loads the model",
                    "failed": "failed",
                    "done": f"done, {tokens[name]} tokens",
                }.get(kind, f"{tokens[name]} tokens")
                if kind == "load":
                    progress.start_task(bars[name])
                advance = amount if kind == "prompt" else 0
                progress.update(bars[name], advance=advance, state=state)
                if kind in ("done", "failed"):
                    progress.stop_task(bars[name])

        return processes.run_all(requests, Path(folder), listen)
