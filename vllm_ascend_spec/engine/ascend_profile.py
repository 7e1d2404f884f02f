"""Measures the cost surface of a vllm-ascend engine while it answers requests.

Real steps are timed, not dummy ones: the planner's place is taken by a sweep, which launches every
size in turn, and NPU events are recorded around the target's forward pass, sampling and drafting.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_ascend_spec.budget import surface as surfaces
from vllm_ascend_spec.budget.surface import (
    DrafterPoint,
    HostCost,
    LogitsPoint,
    StepKind,
    Surface,
    TargetPoint,
)
from vllm_ascend_spec.budget.survival import Ints
from vllm_ascend_spec.engine.ascend_adaptive import LengthPlanner
from vllm_ascend_spec.engine.ascend_lanes import Lane
from vllm_ascend_spec.errors import UserError

logger = logging.getLogger("vllm.ascend_spec.adaptive")

REPLAYS = 3
WARMUPS = 1
EAGER_SIZES = 6
SHORTEST_MS = 1e-4
PARTS = ("target", "logits", "drafter")
REQUESTS = (1, 4, 16, 64, 128, 256, 512)
CONTEXTS = (512, 8192)
ROUNDS = 8


@dataclass
class Step:
    """One step that is timed. rows: of the launch, padding included; logits: rows sampled from.

    context: mean tokens of a request, `around` so many as were asked for. events: begin and end of
    each part. begun, launched, finished: seconds of the host's clock; the device had nothing to do
    at `begun`, so the host waited for nothing since.
    """

    requests: int
    context: float
    around: int
    begun: float
    launched: float = 0.0
    finished: float = 0.0
    kind: StepKind = StepKind.EAGER
    rows: int = 0
    logits: int = 0
    events: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    @property
    def whole(self) -> bool:
        """Whether every part ran, once."""
        return self.events.keys() == set(PARTS) and all(len(e) == 2 for e in self.events.values())

    def ms(self, part: str) -> float:
        """Device time of a part; the device must have finished it."""
        begin, end = self.events[part]
        return max(float(begin.elapsed_time(end)), SHORTEST_MS)

    def host_ms(self, lane: Lane) -> float:
        """The host's own time: up to its launch where that waits for drafts, else of all."""
        end = self.launched if lane.waits_for_drafter else self.finished
        return 1e3 * (end - self.begun)


def sizes_to_time(
    requests: int, draft_tokens: int, ladder: Sequence[int], max_rows: int
) -> list[int]:
    """Row counts of a step of `requests` requests: every graph that it can fill, and some beyond.

    ladder: rows of the captured graphs, ascending.
    """
    most = min(requests * (draft_tokens + 1), max_rows)
    graphs = [rows for rows in ladder if requests <= rows <= most]
    first_eager = max(requests, ladder[-1] + 1) if ladder else requests
    if first_eager > most:
        return graphs
    eager = np.unique(np.linspace(first_eager, most, EAGER_SIZES).astype(int)).tolist()
    return graphs + eager


def spread(rows: int, drafted: Ints) -> Ints:
    """Draft tokens [R] that make a launch of `rows` rows, as even as the `drafted` ones allow."""
    left = max(rows - len(drafted), 0)
    kept = np.zeros_like(drafted)
    for position in range(int(drafted.max(initial=0))):
        open_requests = np.flatnonzero(drafted > position)[:left]
        kept[open_requests] += 1
        left -= len(open_requests)
    return kept


class SweepPlanner(LengthPlanner):
    """Launches each wanted size WARMUPS + REPLAYS times; everything else as the planner it copies.

    Only steps of `requests` requests, all of them with a whole draft, take a size from the list.
    current: the step in flight, where it is timed.
    """

    requests: int
    around: int
    wanted: list[int]
    current: Step | None
    synchronize: Callable[[], None]

    @classmethod
    def of(cls, planner: LengthPlanner, synchronize: Callable[[], None]) -> SweepPlanner:
        """A sweep over the state of `planner`, which it replaces."""
        sweep = cls.__new__(cls)
        sweep.__dict__.update(planner.__dict__)
        sweep.requests, sweep.around, sweep.wanted, sweep.current = 0, 0, [], None
        sweep.synchronize = synchronize
        return sweep

    def ask(self, requests: int, around: int, sizes: Iterable[int]) -> None:
        """Time these sizes next: `requests` requests a step, `around` tokens of context each."""
        self.requests, self.around = requests, around
        self.wanted = [rows for rows in sizes for _ in range(WARMUPS + REPLAYS)]

    def lengths(
        self, slots: Ints, drafted: Ints, rows: int, context: float, in_prompt: bool = False
    ) -> Ints:
        """The next size of the list; all of `drafted` in a step that cannot be timed."""
        self._receive(leave=self.lane.age)
        whole = len(slots) == rows == self.requests and bool((drafted == self.draft_tokens).all())
        if in_prompt or not whole or not self.wanted:
            return drafted
        self.synchronize()
        self.current = Step(rows, context, self.around, time.perf_counter())
        return spread(self.wanted.pop(0), drafted)


class Stopwatch:
    """Records events around the parts of a runner's steps. event: makes one that has a time."""

    def __init__(self, runner: Any, sweep: SweepPlanner, event: Callable[[], Any]) -> None:
        self.steps: list[Step] = []
        self._sweep, self._event = sweep, event
        self._seen: Counter[tuple[int, int, int]] = Counter()
        runner.model.register_forward_pre_hook(lambda *_: self._record("target"))
        runner.model.register_forward_hook(lambda *_: self._record("target"))
        if runner.cudagraph_manager is not None:
            self._watch(runner.cudagraph_manager, "run_fullgraph", "target", _note_graph)
        self._watch(runner, "sample", "logits", _note_rows)
        self._watch(runner.speculator, "propose", "drafter", _note_nothing)
        self._keep_after(runner)

    def _record(self, part: str) -> None:
        step = self._sweep.current
        if step is None:
            return
        event = self._event()
        event.record()
        step.launched = step.launched or time.perf_counter()
        step.events[part].append(event)

    def _watch(self, owner: Any, name: str, part: str, note: Callable[..., None]) -> None:
        call = getattr(owner, name)

        @functools.wraps(call)
        def watched(*args: Any, **named: Any) -> Any:
            self._record(part)
            result = call(*args, **named)
            self._record(part)
            if self._sweep.current is not None:
                note(self._sweep.current, *args)
            return result

        setattr(owner, name, watched)

    def _keep_after(self, runner: Any) -> None:
        sample_tokens = runner.sample_tokens

        @functools.wraps(sample_tokens)
        def finished(*args: Any, **named: Any) -> Any:
            output = sample_tokens(*args, **named)
            step, self._sweep.current = self._sweep.current, None
            if step is not None and step.whole:
                step.finished = time.perf_counter()
                what = (step.requests, step.around, step.rows)
                self._seen[what] += 1
                if self._seen[what] > WARMUPS:
                    self.steps.append(step)
            return output

        runner.sample_tokens = finished


def _note_graph(step: Step, graph: Any, *_: Any) -> None:
    step.kind, step.rows = StepKind.FULL, graph.num_tokens


def _note_rows(step: Step, hidden_states: Any, batch: Any, *_: Any) -> None:
    step.logits = int(batch.logits_indices.shape[0])
    step.rows = step.rows or int(batch.num_tokens)


def _note_nothing(*_: Any) -> None:
    pass


def points(steps: Sequence[Step], draft_tokens: int, lane: Lane) -> dict[str, Any]:
    """Fields of a `Surface`: medians of what was timed.

    Steps around one context share the mean of theirs, so that the points lie on a grid.

    Raises:
        ValueError: nothing was timed.
    """
    if not steps:
        raise ValueError("no step was timed")
    contexts: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        contexts[step.around].append(step.context)
    mean = {around: round(float(np.mean(seen))) for around, seen in contexts.items()}
    target: dict[tuple[StepKind, int, int, int], list[float]] = defaultdict(list)
    logits: dict[int, list[float]] = defaultdict(list)
    drafter: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        context = mean[step.around]
        target[step.kind, step.rows, step.requests, context].append(step.ms("target"))
        logits[step.logits].append(step.ms("logits"))
        drafter[step.requests, context].append(step.ms("drafter"))
    return {
        "target": tuple(
            TargetPoint(kind=kind, rows=rows, requests=requests, context=context, ms=_median(times))
            for (kind, rows, requests, context), times in sorted(target.items())
        ),
        "logits": tuple(
            LogitsPoint(rows=rows, ms=_median(times)) for rows, times in sorted(logits.items())
        ),
        "drafter": tuple(
            DrafterPoint(kind=StepKind.EAGER, requests=requests, depth=draft_tokens,
                         context=context, ms=_median(times))
            for (requests, context), times in sorted(drafter.items())
        ),
        "host": HostCost(floor_ms=_median([step.host_ms(lane) for step in steps])),
    }  # fmt: skip


def _median(times: Sequence[float]) -> float:
    return float(np.median(times))


def measure(llm: Any) -> Surface:
    """The surface of an engine on vllm-ascend; it answers made-up prompts meanwhile.

    Raises:
        UserError: adaptive verification is off, the engine runs in another process, or nothing
            could be timed.
    """
    if getattr(llm.llm_engine.engine_core, "engine_core", None) is None:
        raise UserError(
            "profile: the engine runs in a process of its own. Set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 for this command."
        )
    first: dict[str, Any] = llm.collective_rpc(_start)[0]
    config = llm.llm_engine.vllm_config
    for context in contexts_to_time(config.model_config.max_model_len, first["draft_tokens"]):
        for requests in counts_to_time(first["max_requests"]):
            sizes = sizes_to_time(
                requests, first["draft_tokens"], first["ladder"], first["max_rows"]
            )
            if requests * context <= _cached_tokens(config):
                _sweep(llm, requests, context, sizes, first["draft_tokens"])
    return Surface.model_validate_json(llm.collective_rpc(_surface)[0])


def counts_to_time(max_requests: int) -> list[int]:
    """Request counts, the most that may run among them."""
    return [count for count in REQUESTS if count < max_requests] + [max_requests]


def contexts_to_time(max_model_len: int, draft_tokens: int) -> list[int]:
    """Prompt lengths in tokens; half of a short model's length is left for the timed steps."""
    longest = max(min(max_model_len // 2, max_model_len - 2 * (draft_tokens + 1)), 1)
    return sorted({min(context, longest) for context in CONTEXTS})


def _cached_tokens(config: Any) -> int:
    return int(config.cache_config.num_gpu_blocks * config.cache_config.block_size)


def _sweep(llm: Any, requests: int, context: int, sizes: list[int], draft_tokens: int) -> None:
    from vllm import SamplingParams, TokensPrompt

    model = llm.llm_engine.vllm_config.model_config
    random = np.random.default_rng(context + requests)
    llm.collective_rpc(_ask, args=(requests, context, sizes))
    for _ in range(ROUNDS):
        left: int = llm.collective_rpc(_left)[0]
        if not left:
            return
        # All requests must be there for each of the steps, even if every draft is accepted.
        answer = min(model.max_model_len - context, (left + requests) * (draft_tokens + 1))
        prompts = random.integers(0, model.get_vocab_size(), (requests, context)).tolist()
        llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
    logger.warning(
        "%d steps of %d requests around %d tokens were not timed: fewer ran at once",
        *(llm.collective_rpc(_left)[0], requests, context),
    )


def _start(worker: Any) -> dict[str, Any]:
    import torch_npu

    from vllm_ascend_spec.engine.ascend_runner import graph_rows

    runner, npu = worker.model_runner, torch_npu.npu
    planner = runner.length_planner
    if planner is None:
        raise UserError("profile: adaptive verification is off, and only it plans with step costs")
    runner.length_planner = SweepPlanner.of(planner, npu.synchronize)
    runner.stopwatch = Stopwatch(
        runner, runner.length_planner, functools.partial(npu.Event, enable_timing=True)
    )
    return {
        "ladder": graph_rows(runner),
        "draft_tokens": planner.draft_tokens,
        "max_requests": runner.max_num_reqs,
        "max_rows": runner.max_num_tokens,
    }


def _ask(worker: Any, requests: int, context: int, sizes: list[int]) -> None:
    worker.model_runner.length_planner.ask(requests, context, sizes)


def _left(worker: Any) -> int:
    return len(worker.model_runner.length_planner.wanted)


def _surface(worker: Any) -> str:
    import torch_npu

    from vllm_ascend_spec.engine.ascend_runner import graph_rows, surface_key

    runner = worker.model_runner
    torch_npu.npu.synchronize()
    steps, planner = runner.stopwatch.steps, runner.length_planner
    key = surface_key(runner.vllm_config, graph_rows(runner))
    try:
        fields = points(steps, planner.draft_tokens, planner.lane)
    except ValueError as error:
        raise UserError(
            f"profile: {error}. Raise max_model_len or the cache's memory in --engine-args."
        ) from None
    measured = {"steps": len(steps), "replays": REPLAYS, "lane": planner.lane.value}
    return surfaces.dumps(Surface(key=key, measured=measured, **fields))
