"""The engines that `benchmarks.engine.exact` compares, and how they are asked side by side."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.driver import GRAPH_SIZES, engine_arguments, log_of, start
from vllm_ascend_spec.budget import surface as surfaces
from vllm_ascend_spec.budget.surface import (
    DrafterPoint,
    StepKind,
    Surface,
    SurfaceKey,
    TargetPoint,
)
from vllm_ascend_spec.zoo import DRAFT_TOKENS, Zoo

METHODS = ("mtp", "eagle3", "dflash", "dflash2", "dspark", "ngram", "draft_model")
DRAFT_LENGTHS = (1, 2, 4)
WITH_LENGTHS = ("mtp", "eagle3")  # a draft token is a pass
TARGET = "hybrid"
CACHED, UNCACHED = "none cached", "uncached"
CACHE_MIB = 600
MAX_DRAFT_ROWS = 96  # of 224
MAX_REQUESTS = 32
LARGEST_GRAPH = MAX_REQUESTS * (DRAFT_TOKENS + 1)

# So many processes on one host: none may start a thread for every core.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")

# Assumed costs: a pass is a third of a step. So large that neither the host's own time of a step
# nor a correction while serving (at most `budget.residual.LIMIT`) makes all passes pay.
STEP_MS, PASS_MS = 20_000.0, 6_600.0
_CPU_COSTS = {
    "cpu": {
        "verify_cost_ms": [[1, 1.0], [64, 1.1]],
        "draft_cost_ms": [[1, 2.3], [8, 2.3]],
    }
}
_CPU_ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "compilation_config": None,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 272,  # at 256, a block of states, vLLM 0.32 can spin for ever
    "kv_cache_memory_bytes": 128 << 20,
}
_TAIL = 3000  # of a failed arm's log is printed


@dataclass(frozen=True)
class Host:
    """What differs between hosts: arguments of `LLM` (None drops one), and options that price.

    short_pays: ascend_spec options by method under which short drafts pay, on a model this small.
    """

    name: str
    engine: dict[str, Any]
    short_pays: Callable[[str], dict[str, Any]]

    @classmethod
    def here(cls, folder: Path) -> Host:
        """The GPU, or without one the CPU engine. folder: for files that arms read."""
        import torch

        if not torch.cuda.is_available():
            return cls("CPU engine", _CPU_ENGINE, lambda _: _CPU_COSTS)
        name = torch.cuda.get_device_name()

        def short_pays(method: str) -> dict[str, Any]:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"assumed_costs_{method}.json"
            surfaces.save(assumed_costs(method, name), path)
            return {"cost_surface": str(path)}

        return cls(name, {}, short_pays)


def assumed_costs(method: str, device: str) -> Surface:
    """Costs under which short drafts pay; nothing of it is measured. device: as torch names it."""
    from vllm_ascend_spec.engine.versions import require_engine

    ladder = tuple(size for size in GRAPH_SIZES if size <= LARGEST_GRAPH)

    def target(kind: StepKind, rows: int) -> TargetPoint:
        return TargetPoint(kind=kind, rows=rows, requests=1, context=1, ms=STEP_MS)

    return Surface(
        key=SurfaceKey(
            model=Zoo().target(TARGET).name,
            dtype="bfloat16",
            device=device,
            engine=f"vllm {require_engine().version}",
            method=method,
            draft_tokens=DRAFT_TOKENS,
            full_ladder=ladder,
            mixed_ladder=(),
            drafter_ladder=(),
        ),
        measured={"assumed": f"a pass of the drafter takes {PASS_MS / STEP_MS:.2f} of a step"},
        target=(
            *(target(StepKind.FULL, rows) for rows in ladder),
            *(target(StepKind.EAGER, rows) for rows in (1, 8192)),
        ),
        drafter=tuple(
            DrafterPoint(requests=requests, depth=depth, context=1, ms=PASS_MS * depth)
            for requests in (1, MAX_REQUESTS)
            for depth in (*DRAFT_LENGTHS, DRAFT_TOKENS)
        ),
    )


def speculative_config(method: str, adaptive: bool = False) -> dict[str, Any]:
    """The zoo's; as draft model its dense model, which has the same tokenizer."""
    zoo = Zoo()
    if method != "draft_model":
        config = zoo.speculative_config(TARGET, method, adaptive=adaptive)
        assert config is not None
        return config
    return {
        "method": method,
        "model": str(zoo.target("dense")),
        "num_speculative_tokens": DRAFT_TOKENS,
        "enable_adaptive_verification": adaptive,
    }


def requests(
    methods: list[str], host: Host, adaptive_state: str = "replay", prefix_caching: bool = False,
    block_size: int | None = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """An arm without speculation, and for every method upstream's fixed K and adaptive ones.

    prefix_caching: of all arms but the first, which says what is right. Others then say how far a
    cache alone makes answers part, and fixed K alone on prompts that long. block_size: tokens of a
    cache block, where not as many as a page of states asks for.
    """

    def arm(
        config: dict[str, Any] | None, checked: bool = True, cached: bool = prefix_caching,
        **options: Any,
    ) -> dict[str, Any]:  # fmt: skip
        environment = {name: os.environ.get(name, "1") for name in _ONE_THREAD}
        if checked:
            environment["VLLM_GPU_SYNC_CHECK"] = "warn"
        engine = engine_arguments(
            config,
            kv_cache_mib=CACHE_MIB,
            max_model_len=1024 if prefix_caching else 512,
            max_num_seqs=MAX_REQUESTS,
            largest_graph=LARGEST_GRAPH,
            enable_prefix_caching=cached,
            **({} if block_size is None else {"block_size": block_size}),
        )
        engine["additional_config"]["ascend_spec"].update(options)
        engine = {k: v for k, v in (engine | host.engine).items() if v is not None}
        return {"model": str(Zoo().target(TARGET)), "engine": engine, "environment": environment}

    arms = {"none": arm(None, checked=False, cached=False)}
    if prefix_caching:
        arms[CACHED] = arm(None, checked=False)
    for method in methods:
        adaptive: dict[str, Any] = {"gdn_state": adaptive_state, "max_draft_rows": MAX_DRAFT_ROWS}
        arms[f"{method} fixed"] = arm(speculative_config(method))
        if prefix_caching:
            arms[f"{method} fixed {UNCACHED}"] = arm(speculative_config(method), cached=False)
        arms[f"{method} adaptive"] = arm(speculative_config(method, adaptive=True), **adaptive)
        if method in WITH_LENGTHS:
            arms[f"{method} lengths"] = arm(
                speculative_config(method, adaptive=True),
                draft_lengths=list(DRAFT_LENGTHS),
                **host.short_pays(method),
                **adaptive,
            )
    return arms


@dataclass(frozen=True)
class Asked:
    """What came of an arm; answer None: it did not start, or ended before it answered."""

    name: str
    answer: dict[str, Any] | None = None
    log: str = field(default="", repr=False)
    seconds: float = 0.0


def ask(
    wanted: dict[str, dict[str, Any]], folder: Path, limit_s: float, **command: Any
) -> dict[str, Asked]:
    """Start all arms and ask each as soon as it is up; one that fails takes no other with it.

    An arm that has not answered after `limit_s` seconds counts as failed.
    """
    landed: queue.SimpleQueue[Asked] = queue.SimpleQueue()
    began = time.monotonic()
    for name, request in wanted.items():
        # Daemons: the command must be able to end where an engine hangs.
        threading.Thread(
            target=_serve, args=(landed, name, request, folder, command), daemon=True
        ).start()
    found = {name: Asked(name) for name in wanted}
    for _ in wanted:
        try:
            asked = landed.get(timeout=max(began + limit_s - time.monotonic(), 0.001))
        except queue.Empty:
            break
        found[asked.name] = asked
        state = "answered" if asked.answer else "FAILED"
        print(f"{asked.name}: {state} after {asked.seconds:.0f} s", flush=True)
        if asked.answer is None:
            print(asked.log[-_TAIL:], flush=True)
    return found


def _serve(
    landed: queue.SimpleQueue[Asked],
    name: str,
    request: dict[str, Any],
    folder: Path,
    command: dict[str, Any],
) -> None:
    """One arm from its start to its end, the answer into `landed` before it ends."""
    began = time.monotonic()
    answer, arms = None, []
    try:
        arms = start({name: request}, folder)  # none where it did not start
        for arm in arms:
            answer = arm.ask(**command)
    except Exception as error:  # whatever it is, the others' rows must not be lost
        print(f"{name}: {error!r}", flush=True)
    log = log_of(name, folder)
    text = log.read_text(errors="replace") if log.is_file() else ""
    landed.put(Asked(name, answer, text, time.monotonic() - began))
    for arm in arms:
        arm.close()
