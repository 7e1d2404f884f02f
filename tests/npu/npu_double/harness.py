"""Runs cases on the double in processes of their own."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomllib

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TIMEOUT_S = 600
SOURCE_VERSION = "0+source"  # a tree on the path has no version of its own
KNOWN_SOURCES = {"c961b427ebdb8e44": "182b75e"}


def environment() -> Path:
    """Where `tools/npu_env.sh double` put its environment."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    default = Path(cache_home, "vllm_ascend_spec", "npu_double")
    return Path(os.environ.get("VLLM_ASCEND_SPEC_NPU_DOUBLE") or default)


def why_not() -> str | None:
    """Reason for which the double cannot run here; None if it can."""
    source = os.environ.get("VLLM_ASCEND_SRC")
    if not source:
        return "VLLM_ASCEND_SRC is not set: it names a source tree of vllm-ascend"
    if not Path(source, "vllm_ascend", "platform.py").is_file():
        return f"VLLM_ASCEND_SRC={source} is no source tree of vllm-ascend"
    if not (environment() / "fakeacl" / "libascendcl.so").is_file():
        return f"no double in {environment()}: run `tools/npu_env.sh double`"
    return None


@dataclass(frozen=True)
class Case:
    """One engine on the double and what it is asked.

    plugin: whether vllm_ascend_spec is installed there. prompt_tokens: texts are cut to it, and
    max_tokens: limits, both for the prompts in turn. sampling: arguments of vLLM's SamplingParams,
    greedy without. rounds: how often the prompts are answered, one after another. ranks: processes
    of one NPU each that hold the model together. trace: have AscendCL's calls in the answer.
    mutation: functions of mutations.py that the child calls first, joined by "+".
    """

    model: str
    speculative_config: dict[str, Any] | None = None
    prompts: tuple[str, ...] = ()
    # Cut in the middle of a text drafts are often wrong, at its end mostly right.
    prompt_tokens: tuple[int, ...] = (60, 110, 24)
    max_tokens: tuple[int, ...] = (16, 12, 20)
    engine: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    ranks: int = 1
    mutation: str | None = None
    plugin: bool = True
    trace: bool = False


def cost_surface(
    folder: Path,
    target: str,
    method: str,
    draft_tokens: int,
    graphs: tuple[int, ...] = (),
    ranks: int = 1,
) -> Path:
    """A cost surface for the double, on which many rows are dear: nothing here measures one.

    graphs: sizes in rows of the FULL graphs that the engine captures of its target.
    """
    from vllm_ascend_spec.budget import surface as surfaces

    key = surfaces.SurfaceKey(
        model=target, dtype="bfloat16", device="Ascend910B3",
        engine=f"vllm-ascend {SOURCE_VERSION}", method=method, draft_tokens=draft_tokens,
        ranks=ranks, full_ladder=graphs, mixed_ladder=(), drafter_ladder=(),
    )  # fmt: skip
    points = [
        surfaces.TargetPoint(
            kind=surfaces.StepKind.EAGER, rows=rows, requests=1, context=16, ms=40 * ms
        )
        for rows, ms in ((1, 1.0), (8, 1.1), (16, 1.3), (24, 1.8), (40, 3.0), (64, 5.0))
    ]
    path = folder / f"{target}-{method}-{len(graphs)}-{ranks}.json"
    surfaces.save(surfaces.Surface(key=key, target=tuple(points)), path)
    return path


class ChildError(RuntimeError):
    """The child ended without an answer; carries its log."""


def run(case: Case, folder: Path) -> dict[str, Any]:
    """The case's answer as `case.py` wrote it; `error` is None or what start-up or a step raised.

    With several ranks it is the first one's, and the others' are under `others`.

    Raises:
        ChildError: a process itself failed.
    """
    _prepare(folder, case.plugin)
    request, calls = folder / "request.json", folder / "calls.txt"
    request.write_text(json.dumps(_request(case)))
    traced = {"FAKE_ACL_TRACE": str(calls)} if case.trace else {}
    port = _free_port()

    def answer_of(rank: int) -> dict[str, Any]:
        answer = folder / f"answer-{rank}.json"
        launched = _rank_environment(rank, case.ranks, port) if case.ranks > 1 else {}
        command = ("-m", "npu_double.case", str(request), str(answer))
        done = _python(folder, command, traced | launched)
        (folder / f"log-{rank}.txt").write_text(done.stdout + done.stderr)
        if not answer.exists():
            raise ChildError(done.stdout[-4000:] + done.stderr[-8000:])
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    with ThreadPoolExecutor(case.ranks) as processes:
        first, *others = processes.map(answer_of, range(case.ranks))
    first["others"] = others
    return first | {"calls": read_calls(calls)} if case.trace else first


def _request(case: Case) -> dict[str, Any]:
    request = asdict(case) | {"vllm_ascend": os.environ["VLLM_ASCEND_SRC"]}
    if case.ranks > 1:
        # Every rank runs its own scheduler, as under torchrun; they must come to equal decisions.
        parallel = {"tensor_parallel_size": case.ranks}
        launcher = {"distributed_executor_backend": "external_launcher"}
        request["engine"] = case.engine | parallel | launcher
    return request


def _rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "FAKE_NPU_COUNT": str(ranks),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Call:
    """One call of AscendCL that orders work; stream and event (or graph, or task) by number."""

    name: str
    stream: int
    event: int | None


def read_calls(path: Path) -> list[Call]:
    """The calls in a trace of fakeacl.c, in order."""
    lines = (line.split() for line in path.read_text().splitlines())
    return [Call(n, int(stream), None if e == "-" else int(e)) for n, stream, e in lines]


def python(
    folder: Path, *arguments: str, plugin: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the double's Python, with vllm-ascend's source and the plugin found as if installed."""
    _prepare(folder, plugin)
    return _python(folder, arguments, variables)


def _prepare(folder: Path, plugin: bool) -> None:
    site = folder / "site"
    site.mkdir(exist_ok=True)
    _install_vllm_ascend(site, Path(os.environ["VLLM_ASCEND_SRC"]))
    # The package is always importable, for the zoo and the import repairs; what makes it a plugin
    # is its entry points.
    _install_plugin(site, entry_points=plugin)
    prepare = "from npu_double import startup\n\nstartup.prepare_process()\n"
    (site / "sitecustomize.py").write_text(prepare)


def _python(
    folder: Path, arguments: tuple[str, ...], variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    own = {
        "PYTHONPATH": f"{folder / 'site'}:{HERE.parent}:{ROOT / 'tests'}",
        "LD_LIBRARY_PATH": str(environment() / "fakeacl"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        # torch_npu launches from a thread of its own, after the memory may have a new owner: on a
        # device the order within a stream makes that right, here nothing does.
        "TASK_QUEUE_ENABLE": "0",
        "TRITON_INTERPRET": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_CACHE_ROOT": str(folder.parent / "vllm-cache-double"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [str(environment() / "bin" / "python"), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=folder,
        env=_inherited() | own | variables,
    )


def _inherited() -> dict[str, str]:
    foreign = ("VLLM_", "PYTHON", "TRITON", "TORCH")
    return {name: text for name, text in os.environ.items() if not name.startswith(foreign)}


def _install_vllm_ascend(site: Path, source: Path) -> None:
    _link(site / "vllm_ascend", source / "vllm_ascend")
    points = {"vllm.platform_plugins": {"ascend": "vllm_ascend:register"}}
    _write_metadata(site, "vllm_ascend", SOURCE_VERSION, points)


def _install_plugin(site: Path, entry_points: bool) -> None:
    """The package as its wheel lays it out: kernels/ and graphs/ inside."""
    package = site / "vllm_ascend_spec"
    package.mkdir(exist_ok=True)
    for path in [*(ROOT / "vllm_ascend_spec").iterdir(), ROOT / "kernels", ROOT / "graphs"]:
        _link(package / path.name, path)
    with (ROOT / "pyproject.toml").open("rb") as text:
        project = tomllib.load(text)["project"]
    points = project["entry-points"] if entry_points else {}
    _write_metadata(site, "vllm_ascend_spec", project["version"], points)


def _link(link: Path, target: Path) -> None:
    if not link.is_symlink():
        link.symlink_to(target)


def _write_metadata(site: Path, name: str, version: str, points: dict[str, dict[str, str]]) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (folder / "entry_points.txt").write_text("\n".join([*lines, ""]))


def double_versions() -> dict[str, str]:
    """What runs on the double: versions of its packages, and which source of vllm-ascend."""
    code = (
        "import importlib.metadata as m;"
        "print(*(m.version(n) for n in ('vllm', 'torch', 'torch-npu', 'triton', 'transformers')))"
    )
    command = [str(environment() / "bin" / "python"), "-I", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    names = ("vllm", "torch", "torch_npu", "triton", "transformers")
    return dict(zip(names, found, strict=True)) | {"vllm_ascend": _source_version()}


def _source_version() -> str:
    """The commit of the vllm-ascend tree where it is a known one, else a digest of its Python."""
    root = Path(os.environ["VLLM_ASCEND_SRC"], "vllm_ascend")
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    found = digest.hexdigest()[:16]
    return KNOWN_SOURCES.get(found, f"sha256 {found}")


if __name__ == "__main__":
    sys.exit(why_not())
