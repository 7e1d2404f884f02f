"""Runs arms as processes, one a core, and reports how far each one is."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_spec.demo.records import ArmRecord, ArmRequest

ARM_LIMIT_SECONDS = 600
SIDE_BY_SIDE = 2
LOG_TAIL_LINES = 30
MODEL_INFO = "modelinfos"  # folder below VLLM_CACHE_ROOT

ERROR_LINE = re.compile(r"(?:^|[\]):] )((?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception): .+)$")

Listener = Callable[[str, str, int], None]  # arm, kind of progress, amount


_model_info_lock = threading.Lock()


@dataclass(frozen=True)
class ArmFailure:
    """Why an arm gave no record; `log` is the end of what its process printed."""

    name: str
    reason: str
    log: str


def run_all(
    requests: Sequence[ArmRequest], directory: Path, listener: Listener
) -> list[ArmRecord | ArmFailure]:
    """Run every arm, two side by side on cores of their own; results in the order of `requests`.

    A failing arm becomes an `ArmFailure` and leaves the others alone. `directory` takes the logs
    and caches.
    """
    cores = sorted(os.sched_getaffinity(0))[:SIDE_BY_SIDE]
    free: queue.Queue[int] = queue.Queue()
    for core in cores:
        free.put(core)

    def run_one(request: ArmRequest) -> ArmRecord | ArmFailure:
        core = free.get()
        try:
            return _run_one(request, directory / request.name, core, listener)
        finally:
            free.put(core)

    with ThreadPoolExecutor(len(cores)) as pool:
        return list(pool.map(run_one, requests))


def _run_one(
    request: ArmRequest, directory: Path, core: int, listener: Listener
) -> ArmRecord | ArmFailure:
    directory.mkdir(parents=True)
    _share_model_info(directory.parent / MODEL_INFO, directory / "cache" / MODEL_INFO)
    request_path, result_path = directory / "request.json", directory / "result.json"
    request_path.write_text(request.model_dump_json(), encoding="utf-8")
    read_end, write_end = os.pipe()
    log_path = directory / "log.txt"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vllm_ascend_spec.demo.arm",
                str(request_path),
                str(result_path),
                str(write_end),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(directory),
            pass_fds=(write_end,),
        )
    # Set from outside so that the interpreter and every library see one core from their start.
    os.sched_setaffinity(process.pid, {core})
    os.close(write_end)
    follower = threading.Thread(target=_follow, args=(read_end, request.name, listener))
    follower.start()
    reason = _wait(process)
    follower.join()
    listener(request.name, "done" if reason is None else "failed", 0)
    if reason is None:
        _share_model_info(directory / "cache" / MODEL_INFO, directory.parent / MODEL_INFO)
        return ArmRecord.model_validate_json(result_path.read_text(encoding="utf-8"))
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    return ArmFailure(
        request.name, _last_error(lines) or reason, "\n".join(lines[-LOG_TAIL_LINES:])
    )


def _share_model_info(source: Path, target: Path) -> None:
    """Pass on what vLLM found out about model classes: ten seconds a class and process."""
    with _model_info_lock:
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)


def _environment(directory: Path) -> dict[str, str]:
    return {
        **os.environ,
        # Two arms that share vLLM's cache meet in its compile and model-info files.
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def _follow(read_end: int, name: str, listener: Listener) -> None:
    with os.fdopen(read_end, encoding="utf-8") as lines:
        for line in lines:
            kind, _, amount = line.strip().partition(" ")
            listener(name, kind, int(amount or 0))


def _wait(process: subprocess.Popen[bytes]) -> str | None:
    try:
        code = process.wait(ARM_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"took more than {ARM_LIMIT_SECONDS} s"
    return None if code == 0 else f"exit code {code}"


def _last_error(lines: Sequence[str]) -> str | None:
    """The message of the last traceback in a log; processes put their name before each line."""
    for line in reversed(lines):
        found = ERROR_LINE.search(line)
        if found:
            return found.group(1)
    return None
