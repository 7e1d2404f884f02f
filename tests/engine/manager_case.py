"""Child process of test_budget_manager.py: the manager alone, on the CPU engine's torch.

Prints one JSON object: what the runner would get from it, step by step.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_ascend_spec.engine import cpu

K = 4
REQUESTS = ["a", "b", "c"]
# Survivals 0.9 0.81 0.73 0.66 | 0.8 0.64 0.51 0.05 | 0.6 0.06 ...: the best 8 are 4, 3 and 1.
CONFIDENCES = [[0.9, 0.9, 0.9, 0.9], [0.8, 0.8, 0.8, 0.1], [0.6, 0.1, 0.1, 0.1]]


def main() -> None:
    cpu.enable()
    import torch
    import vllm.v1.worker.cpu.shm  # noqa: F401  # stands in for streams and events
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

    from vllm_ascend_spec.budget.planner import Limits
    from vllm_ascend_spec.engine.adaptive import BudgetManager

    states = SimpleNamespace(
        num_speculative_steps=K,
        device=torch.device("cpu"),
        max_num_reqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        req_id_to_index={"a": 2, "b": 0, "c": 3},
        num_computed_tokens_np=np.array([20, 20, 20, 20]),
        prefill_len=SimpleNamespace(np=np.array([10, 10, 10, 10])),
    )
    upstream = AdaptiveVerificationManager(
        states, torch.zeros(5, dtype=torch.int32), 1, max_total_logits=1000
    )

    def manager(limits: Limits, runner: Any = None) -> BudgetManager:
        kind = {"lockstep": False, "may_skip": True, "publishes": False}
        return BudgetManager(upstream, "dspark", limits, runner=runner, **kind)

    found = play(manager(Limits(K, 4, 64, max_draft_rows=8)), torch)
    unprobed = Limits(K, 4, 64, probe_share=0.0, probe_credit_ms=0.0)
    found["layouts"] = layouts_copied(manager(Limits(K, 4, 64, max_draft_rows=8)), torch)
    found["calibrated"] = lengths_by_calibration(manager(Limits(K, 4, 64, max_draft_rows=8)), torch)
    drawing = SimpleNamespace(
        vllm_config=config(), speculator=SimpleNamespace(draft_logits=torch.zeros(1))
    )
    for name, runner, temperature in (
        ("drawn and sampled", drawing, 1.0),
        ("drawn, greedy", drawing, 0.0),
        ("likeliest and sampled", None, 1.0),
    ):
        found[name] = [
            total_after(manager(unprobed, runner), torch, temperature, drafts)
            for drafts in (CONFIDENCES, [[0.02] * K] * 3)
        ]
    print(json.dumps(found))


def layouts_copied(manager: Any, torch: Any) -> list[int]:
    """Row layouts sent to the device up to each of five steps, of which the fourth differs."""
    from vllm_ascend_spec.engine import adaptive

    copy, copied = adaptive.async_tensor_h2d, []

    def counted(rows: Any, **named: Any) -> Any:
        copied.append(rows.tolist())
        return copy(rows, **named)

    adaptive.async_tensor_h2d = counted
    slots = np.array([2, 0, 3])
    batch = SimpleNamespace(num_reqs=3, idx_mapping=torch.from_numpy(slots), idx_mapping_np=slots)
    counts = []
    for first in (1, 1, 1, 2, 1):
        manager.get_num_tokens(
            {name: K + (first if name == "a" else 1) for name in REQUESTS},
            {name: [-1] * K for name in REQUESTS},
        )
        manager.reallocate_drafts(REQUESTS, batch.idx_mapping)
        assert manager._layout[:6].tolist() == [first, 1, 1, K, K, K]
        counts.append(len(copied))
    adaptive.async_tensor_h2d = copy
    return counts


def lengths_by_calibration(manager: Any, torch: Any) -> list[list[int]]:
    """Rows of three equal drafts, before and after it is learnt that sampled ones fail more."""
    slots = np.array([2, 0, 3])
    batch = SimpleNamespace(num_reqs=3, idx_mapping=torch.from_numpy(slots), idx_mapping_np=slots)
    for slot, temperature in zip(slots.tolist(), (0.0, 0.7, 1.0), strict=True):
        manager.add_request(slot)
        manager.describe_request(slot, temperature, 1.0, adaptive=True)
    lengths = []
    calibration = manager.controller.calibration
    for biases in ((0.0, 0.0, 0.0), (0.0, -4.0, 4.0)):
        calibration.fitted[:, :, 1] = np.array(biases)[:, None]
        calibration._tabulate()
        calibration.version += 1
        manager.observe_verdict(torch.ones(3, dtype=torch.int32))
        manager.record_confidences(torch.full((3, K), 0.7), batch)
        lengths.append(step(manager, torch, batch)["lengths"])
    return lengths


def config() -> Any:
    """As much of vLLM's configuration as the manager reads."""
    return SimpleNamespace(
        additional_config={},
        model_config=SimpleNamespace(model="toy", dtype="torch.bfloat16"),
        speculative_config=SimpleNamespace(model="toy-dspark", num_speculative_tokens=K),
    )


def total_after(manager: Any, torch: Any, temperature: float, newest: Any) -> int:
    """Rows of a step whose drafts have these confidences, after rounds that were all alike."""
    from vllm_ascend_spec.engine.cpu_adaptive import assumed_surface
    from vllm_ascend_spec.options import CpuOptions

    cost = CpuOptions(verify_cost_ms=[(rows, 1 + 0.3 * rows) for rows in range(1, 33)])
    manager.use_surface(assumed_surface(cost, "dspark", K))
    slots = np.array([2, 0, 3])
    batch = SimpleNamespace(num_reqs=3, idx_mapping=torch.from_numpy(slots), idx_mapping_np=slots)
    for slot in slots:
        manager.add_request(int(slot))
        manager.describe_request(int(slot), temperature, 1.0, adaptive=True)
    for confidences in (CONFIDENCES, CONFIDENCES, newest):
        manager.observe_verdict(torch.ones(3, dtype=torch.int32))
        manager.record_confidences(torch.tensor(confidences), batch)
        total = step(manager, torch, batch)["total"]
    return total


def play(manager: Any, torch: Any) -> dict[str, Any]:
    """A round of drafts, the worked example, a request that opts out, a round that is skipped."""
    slots = np.array([2, 0, 3])
    batch = SimpleNamespace(num_reqs=3, idx_mapping=torch.from_numpy(slots), idx_mapping_np=slots)
    for slot in slots:
        manager.add_request(int(slot))
        manager.describe_request(int(slot), 0.0, 1.0, adaptive=True)
    one, drafts = torch.ones(3, dtype=torch.int32), torch.tensor(CONFIDENCES)
    manager.observe_verdict(one)
    manager.record_confidences(drafts, batch)
    found = {"worked": step(manager, torch, batch)}
    manager.observe_verdict(torch.tensor([4, 3, 1], dtype=torch.int32))
    manager.record_confidences(drafts, batch)

    manager.describe_request(3, 0.0, 1.0, adaptive=False)
    manager.observe_verdict(one)
    manager.record_confidences(drafts, batch)
    found["opted_out"] = step(manager, torch, batch)
    manager.describe_request(3, 0.0, 1.0, adaptive=True)

    nan = torch.tensor(CONFIDENCES)
    nan[0] = float("nan")
    manager.observe_verdict(one)
    manager.record_confidences(nan, batch)
    found["nan"] = step(manager, torch, batch)
    found["invalid"] = manager.controller.counters.invalid

    manager._planned = skipped(manager._planned)
    manager.observe_verdict(one)
    manager.record_confidences(drafts, batch)
    found["skipped"] = step(manager, torch, batch)
    counters = manager.controller.counters
    found["counters"] = {n: getattr(counters, n) for n in ("drafted", "verified", "accepted")}
    return found


def skipped(planned: Any) -> Any:
    import dataclasses

    return dataclasses.replace(planned, draft_next=np.zeros_like(planned.draft_next))


def step(manager: Any, torch: Any, batch: Any) -> dict[str, Any]:
    """One step as the runner plays it, up to the row layout."""
    total = manager.get_num_tokens(
        dict.fromkeys(REQUESTS, K + 1), {name: [-1] * K for name in REQUESTS}
    )
    drafts = np.full(3, K)
    lengths, _ = manager.compact_batch(drafts, drafts + 1, np.arange(4) * (K + 1))
    logits, starts, budget = manager.reallocate_drafts(REQUESTS, batch.idx_mapping)
    return {
        "total": total,
        "host": lengths.tolist(),
        "budget": budget,
        "query_start_loc": starts.tolist(),
        "cu_num_logits": logits.tolist(),
        "lengths": torch.diff(starts[:4]).tolist(),
    }


if __name__ == "__main__":
    main()
