"""Whether an engine verifies adaptively where that was left open, and what its caches must know."""

from __future__ import annotations

from typing import Any

from vllm_ascend_spec.drafters.methods import METHODS, Method
from vllm_ascend_spec.drafters.support import Feature, Host, Verdict, verdict

# Beside the options: vLLM hashes `additional_config` whole, and any key of another name is ours.
GRAPH_KEY = "speculation_seen_by_compute_hash"
# What makes a step's graphs, or what runs in them, other graphs. vLLM's own hash of the speculative
# config knows none of these for most methods (vllm#53366).
_SPECULATION = (
    "method",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "enable_adaptive_verification",
    "draft_sample_method",
    "rejection_sample_method",
    "dspark_draft_topk",
)


def adaptive(vllm_config: Any, host: Host) -> Verdict:
    """Whether adaptive verification can be turned on, by what is known before anything is built."""
    speculative = vllm_config.speculative_config
    name = str(speculative.method)
    method = _method_of(name)
    if method is None:
        return Verdict(False, f"method {name!r} gives no confidence")
    obstacles = {
        "it does not go with LoRA": getattr(vllm_config, "lora_config", None) is not None,
        "it does not go with pipeline parallelism": (
            vllm_config.parallel_config.pipeline_parallel_size > 1
        ),
        "it needs full CUDA graphs": host.platform == "cuda" and not _full_graphs(vllm_config),
    }
    found = [obstacle for obstacle, there in obstacles.items() if there]
    if found:
        return Verdict(False, found[0])
    return verdict(method, Feature.ADAPTIVE, host)


def _method_of(vllm_method: str) -> Method | None:
    names = {"ngram": "ngram_gpu", "eagle": "eagle3"}
    wanted = names.get(vllm_method, vllm_method)
    return next((method for method in METHODS if method.vllm_method == wanted), None)


def _full_graphs(vllm_config: Any) -> bool:
    mode = vllm_config.compilation_config.cudagraph_mode
    return bool(mode is not None and mode.has_full_cudagraphs())


def show_to_compute_hash(vllm_config: Any) -> None:
    """Put what makes other graphs where vLLM's `compute_hash` looks. Later calls renew it."""
    speculative, shown = vllm_config.speculative_config, vllm_config.additional_config
    if speculative is None or not isinstance(shown, dict):
        return
    shown[GRAPH_KEY] = {name: getattr(speculative, name, None) for name in _SPECULATION}
