"""What the runner did, read from inside its process without changing anything."""

from __future__ import annotations

from typing import Any


def steps(runner: Any) -> list[dict[str, Any]]:
    """A list that grows by one entry a step: rows that each request verified and what came of it.

    drafted: draft tokens the scheduler handed over; rows: rows the device computed for the
    request; emitted: tokens sampled; lengths and host_lengths: context lengths on the device, and
    on the host, where attention takes them from.
    """
    seen: list[dict[str, Any]] = []
    sample = runner.sample

    def observed(hidden_states: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        result = sample(hidden_states, batch, *rest, **named)
        drafted = batch.num_draft_tokens_per_req
        seen.append(
            {
                "prefill": batch.is_prefilling_np.tolist(),
                "drafted": [0] * batch.num_reqs if drafted is None else drafted.tolist(),
                "rows": batch.query_start_loc[: batch.num_reqs + 1].diff().tolist(),
                "emitted": result[1].tolist(),
                "lengths": batch.seq_lens[: batch.num_reqs].tolist(),
                "host_lengths": batch.seq_lens_np[: batch.num_reqs].tolist(),
            }
        )
        return result

    runner.sample = observed
    return seen


def replacements() -> list[str]:
    """Targets that the plugin replaced in this process; empty without the plugin."""
    try:
        from vllm_ascend_spec.engine import patching
    except ImportError:
        return []
    return [replacement.target for replacement in patching.applied()]
