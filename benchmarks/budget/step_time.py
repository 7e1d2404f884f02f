"""Host time of a whole step of the plugin's manager, without a device: part of `planner_time`.

The real `BudgetManager` is called in the runner's order, on the CPU engine's torch. In the place of
the two launches stands a world that accepts draft tokens as their confidences say; its own time is
not counted, nor is what a device's driver takes for launches, events and copies. An engine does
other work between two steps, so all of it is measured with emptied caches as well.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.planner import Limits
from vllm_ascend_spec.budget.survival import Ints, prefix_products, split, to_grid
from vllm_ascend_spec.engine import cpu

SLOTS, PROMPT = 256, 600
CASES = ((1, 7), (4, 7), (16, 7), (64, 7), (256, 7))
BARS_US = {4: 500.0, 64: 1000.0}
CACHE_BYTES = 32 << 20
BLOCK = 128  # steps a mean is taken over: learning, fits and metrics come every few steps
WARM_UP = 3 * BLOCK


class Stopwatch:
    """Seconds by part, of the calls that were wrapped with `part`."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def part(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed


class SimulatedClock:
    """In the place of `StepClock`: every step was timed, and near what was predicted."""

    def __init__(self, random: np.random.Generator) -> None:
        from vllm_ascend_spec.engine.step_clock import StepTimes

        self._random, self._times = random, StepTimes

    def start(self) -> None: ...

    def target_done(self) -> None: ...

    def finish(self, alike: bool) -> Any:
        target = 5.0 * self._random.uniform(0.95, 1.05)
        times = self._times(target, target + 0.9, idle_ms=0.05, period_ms=target + 0.95)
        return SimpleNamespace(read=lambda: times)


class World:
    """What the device would do: rank, verify, emit, draft; half of the requests are easy."""

    def __init__(self, requests: int, k: int, random: np.random.Generator) -> None:
        self._requests, self._k, self._random = requests, k, random
        self._confidence = self._drafts()
        self._lengths = np.zeros(requests, dtype=np.int32)
        self._others = np.zeros(CACHE_BYTES // 8)

    def _drafts(self) -> np.ndarray:
        easy = self._random.beta(8, 1, (self._requests, self._k))
        half = self._requests // 2
        easy[half:] = self._random.beta(3, 2, (self._requests - half, self._k))
        return easy.astype(np.float32)

    def empty_caches(self) -> None:
        """What the engine does between two steps, as far as the next one feels it."""
        self._others += 1.0

    def pack_rows(self, _scores: Any, budget: int, batch: Any, _out: Any, **_named: Any) -> None:
        survival = prefix_products(to_grid(self._confidence))
        self._lengths = split(survival, batch.draft_counts.numpy(), budget)

    def record_round(self, _confidence: Any, _slots: Any, _t: Any, _r: Any, out: Any, *_: Any):
        accepts = self._random.random(self._confidence.shape) < self._confidence
        accepts &= np.arange(self._k) < self._lengths[:, None]
        self._confidence = self._drafts()
        if out is not None:
            figures = out[: self._requests].numpy()
            figures[:, : self._k] = self._confidence
            figures[:, self._k] = self._lengths
            figures[:, self._k + 1] = 1 + np.cumprod(accepts, axis=1).sum(axis=1)


def manager_of(surface_of: CostModel, k: int, torch: Any) -> Any:
    """The plugin's manager over request states as vLLM's runner keeps them."""
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

    from vllm_ascend_spec.engine.adaptive import BudgetManager

    states = SimpleNamespace(
        num_speculative_steps=k,
        device=torch.device("cpu"),
        max_num_reqs=SLOTS,
        req_id_to_index={},
        num_computed_tokens_np=np.full(SLOTS, PROMPT),
        prefill_len=SimpleNamespace(np=np.full(SLOTS, PROMPT)),
    )
    starts = torch.zeros(SLOTS + 1, dtype=torch.int32)
    upstream = AdaptiveVerificationManager(states, starts, 1, max_total_logits=1 << 20)
    limits = Limits(k, SLOTS, surface_of.max_rows)
    manager = BudgetManager(upstream, "dspark", limits, lockstep=False, may_skip=True, runner=None)
    manager.use_surface(surface_of.surface)
    return manager


class Played:
    """Steps of `requests` decoding requests, and where their host time went."""

    def __init__(self, requests: int, k: int, cost: CostModel) -> None:
        cpu.enable()
        import torch
        import vllm.v1.worker.cpu.shm  # noqa: F401  # stands in for streams and events

        from vllm_ascend_spec.engine import adaptive

        self.watch, self._requests, self._k = Stopwatch(), requests, k
        random = np.random.default_rng(2)
        self.manager = manager = manager_of(cost, k, torch)
        manager.clock = SimulatedClock(random)
        world, part = World(requests, k, random), self.watch.part
        self._empty_caches = part("world", world.empty_caches)
        adaptive.ops = SimpleNamespace(
            pack_rows=part("world", world.pack_rows), record_round=part("world", world.record_round)
        )
        manager.clock.finish = part("world", manager.clock.finish)
        manager._read_arrivals = part("arrivals", manager._read_arrivals)
        manager._plan = part("plan", manager._plan)
        manager.metrics.step = part("metrics", manager.metrics.step)
        self._names = [f"request-{index}" for index in range(requests)]
        self._slots: Ints = random.permutation(SLOTS)[:requests]
        for name, slot in zip(self._names, self._slots.tolist(), strict=True):
            manager.req_states.req_id_to_index[name] = slot
            manager.add_request(slot)
            manager.describe_request(slot, 0.0, 1.0, adaptive=True)
        self._mapping = torch.from_numpy(self._slots)
        self._sampled = torch.ones(requests, dtype=torch.int32)
        self._confidence = torch.zeros(requests, k)
        self._scheduled = dict.fromkeys(self._names, k + 1)
        self._drafts = {name: [-1] * k for name in self._names}
        self._batch = SimpleNamespace(
            num_reqs=requests, idx_mapping=self._mapping, idx_mapping_np=self._slots
        )

    def step(self, cold: bool) -> None:
        """One step in the runner's order, without the launches that are not the manager's."""
        manager = self.manager
        if cold:
            self._empty_caches()
        manager.get_num_tokens(self._scheduled, self._drafts)
        manager.reallocate_drafts(self._names, self._mapping)
        manager.observe_verdict(self._sampled)
        manager.drafted_rows(self._slots)
        manager.draft_length()
        manager.record_confidences(self._confidence, self._batch)

    def block(self, steps: int, cold: bool = False) -> dict[str, float]:
        """Microseconds a step by part, means over `steps` steps."""
        self.watch.seconds.clear()
        step = self.watch.part("all", self.step)
        for _ in range(steps):
            step(cold)
            self.manager.req_states.num_computed_tokens_np += 3
        spent = {name: 1e6 * seconds / steps for name, seconds in self.watch.seconds.items()}
        found = {
            "all": spent["all"] - spent["world"],
            "plan": spent["plan"],
            "arrivals": spent["arrivals"] - spent["metrics"],
            "metrics": spent["metrics"],
        }
        return found | {"rest": 2 * found["all"] - sum(found.values())}


def step_times(requests: int, k: int, steps: int, cost: CostModel) -> dict[str, np.ndarray]:
    """Microseconds a step by part, one mean for each block of steps."""
    played = Played(requests, k, cost)
    played.block(WARM_UP)
    blocks = []
    for _ in range(max(steps // BLOCK, 1)):
        cold = played.block(BLOCK, cold=True)
        blocks.append(played.block(BLOCK) | {"all, emptied caches": cold["all"]})
    return {name: np.array([block[name] for block in blocks]) for name in blocks[0]}
