"""`adaptive: "auto"`: on where it can be, off with the reason; and what compute_hash sees."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_spec.drafters.support import Host
from vllm_ascend_spec.engine import choice

HOPPER, AMPERE, CPU = Host("cuda", (9, 0)), Host("cuda", (8, 0)), Host("cpu")
SPECULATION: dict[str, Any] = {
    "method": "dspark",
    "num_speculative_tokens": 7,
    "num_speculative_tokens_per_batch_size": None,
    "enable_adaptive_verification": True,
    "draft_sample_method": "greedy",
    "rejection_sample_method": "standard",
    "dspark_draft_topk": None,
}


def config(*, graphs: bool = True, stages: int = 1, lora: Any = None, **speculation: Any) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**(SPECULATION | speculation)),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: graphs)
        ),
        lora_config=lora,
        additional_config={"ascend_spec": {}},
    )


@pytest.mark.parametrize("method", ["dspark", "dflash", "mtp", "eagle3", "eagle", "draft_model"])
@pytest.mark.parametrize("host", [HOPPER, CPU])
def test_on_where_it_can_be(method: str, host: Host):
    assert choice.adaptive(config(method=method), host).ok


@pytest.mark.parametrize(
    ("given", "host", "reason"),
    [
        (config(method="suffix"), HOPPER, "method 'suffix' gives no confidence"),
        (config(lora=object()), HOPPER, "LoRA"),
        (config(stages=2), HOPPER, "pipeline parallelism"),
        (config(graphs=False), HOPPER, "full CUDA graphs"),
        (config(), AMPERE, "TRITON_ATTN"),
    ],
)
def test_off_with_the_reason(given: Any, host: Host, reason: str):
    verdict = choice.adaptive(given, host)
    assert not verdict.ok and reason in verdict.reason


def test_a_cpu_needs_no_graphs():
    assert choice.adaptive(config(graphs=False), CPU).ok


def seen(**speculation: Any) -> str:
    """What vLLM hashes of `additional_config`."""
    made = config(**speculation)
    choice.show_to_compute_hash(made)
    return json.dumps(made.additional_config, sort_keys=True)


@pytest.mark.parametrize(
    "other",
    [
        {"enable_adaptive_verification": False},
        {"num_speculative_tokens": 9},
        {"method": "dflash"},
        {"num_speculative_tokens_per_batch_size": [(1, 8, 7), (9, 64, 3)]},
        {"draft_sample_method": "probabilistic"},
        {"rejection_sample_method": "block"},
        {"dspark_draft_topk": 8},
    ],
)
def test_the_compile_cache_tells_speculation_apart(other: dict[str, Any]):
    """Case C14: boot order must not decide which artefacts are used."""
    assert seen(**other) != seen()
    assert seen(**other) == seen(**other)


def test_what_changes_no_graph_changes_no_key():
    assert seen(ema_alpha=0.3) == seen(ema_alpha=0.7) == seen()


def test_the_options_are_read_as_before():
    from vllm_ascend_spec.options import Options

    made = config()
    made.additional_config = {}
    choice.show_to_compute_hash(made)
    assert Options.from_additional_config(made.additional_config) == Options()
