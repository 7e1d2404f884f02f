"""What each method can do on each engine, with the reason for every "no". Facts, no probing.

The reasons were found by reading or running the engine versions named in `engine/versions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_ascend_spec.drafters.methods import Confidence, Method


class Feature(str, Enum):
    """A column of the support matrix."""

    MRV2 = "mrv2"  # runs on Model Runner V2
    ASYNC = "async"  # with async scheduling
    ADAPTIVE = "adaptive"  # verification length per request, on targets without linear attention
    HYBRID = "hybrid"  # on GDN targets at fixed K
    ADAPTIVE_HYBRID = "adaptive_hybrid"  # both


@dataclass(frozen=True)
class Verdict:
    """Whether it runs; `reason` says why not, or what a "yes" rests on."""

    ok: bool
    reason: str


YES = Verdict(True, "")
_NO_RUNNER = "vLLM's Model Runner V2 has no {title} speculator; the plugin's own is not there yet"
_NO_FULL_GRAPHS = Verdict(
    False,
    "FlashAttention 2 has no graph for varying lengths; set "
    '--attention-config \'{"backend": "TRITON_ATTN"}\', or use a Hopper or newer GPU',
)
_NO_ASCEND_SPECULATOR = "vllm-ascend's Model Runner V2 has no {title} speculator"
_CONFIDENCES = {Confidence.HEAD: "head", Confidence.MATCH: Confidence.MATCH.value}
_ASCEND_SPECULATORS = ("mtp", "eagle3", "dflash", "dspark")


@dataclass(frozen=True)
class Host:
    """What decides: platform `cpu`, `cuda` or `ascend`; CUDA compute capability (major, minor)."""

    platform: str
    capability: tuple[int, int] | None = None

    @property
    def varying_length_graphs(self) -> bool:
        """FlashAttention 3 and later capture a FULL graph for varying query lengths."""
        return self.platform == "cpu" or (self.capability or (0, 0)) >= (9, 0)


def verdict(method: Method, feature: Feature, host: Host) -> Verdict:
    """Whether `method` has `feature` on `host`."""
    if host.platform == "ascend":
        return _on_ascend(method, feature)
    if method.vllm_method is None:
        return Verdict(False, _NO_RUNNER.format(title=method.title))
    if feature in (Feature.MRV2, Feature.ASYNC, Feature.HYBRID):
        return YES
    return _adaptive(method, host)


def _on_ascend(method: Method, feature: Feature) -> Verdict:
    if method.name not in _ASCEND_SPECULATORS:
        return Verdict(False, _NO_ASCEND_SPECULATOR.format(title=method.title))
    if feature in (Feature.ADAPTIVE, Feature.ADAPTIVE_HYBRID):
        # vLLM 0.27.1 loads no confidence head.
        return Verdict(True, f"confidence: {Confidence.MAX_SOFTMAX.value}")
    return YES


def _adaptive(method: Method, host: Host) -> Verdict:
    if not host.varying_length_graphs:
        return _NO_FULL_GRAPHS
    source = _CONFIDENCES.get(method.confidence, "upstream's online estimator")
    return Verdict(True, f"confidence: {source}")
