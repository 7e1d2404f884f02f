"""The drafting methods: how many rows they compute, and where their confidence comes from.

Sources: DSpark arXiv 2607.05147, DFlash arXiv 2602.06036, EAGLE-3 arXiv 2503.01840, suffix decoding
arXiv 2411.04975.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum


class Drafting(Enum):
    """How the K draft tokens of a request come about."""

    LOOKUP = "lookup"  # found in known text: no model runs
    SEQUENTIAL = "sequential"  # one row, K times in turn
    PARALLEL = "parallel"  # one pass over a block of anchor and masks


class Confidence(Enum):
    """What estimates the chance that a draft token is accepted."""

    HEAD = "confidence head"
    SELECTOR = "selector score"
    MAX_SOFTMAX = "max softmax"
    MATCH = "match statistics"


@dataclass(frozen=True)
class Method:
    """One drafting method.

    name: the project's name. vllm_method: `method` in vLLM's speculative config on Model Runner
    V2, or None where that runner has no such speculator. block_rows_beyond_k: rows of a parallel
    pass less K (DFlash reads the anchor row too; DSpark's first draft token is read at the anchor).
    own_checkpoint: its weights lie apart from the target's.
    """

    name: str
    title: str
    vllm_method: str | None
    drafting: Drafting
    confidence: Confidence
    block_rows_beyond_k: int = 0
    own_checkpoint: bool = True

    def rows_per_request(self, draft_tokens: int) -> int:
        """Rows that one drafting pass computes for a request with `draft_tokens` = K."""
        if self.drafting is Drafting.LOOKUP:
            return 0
        if self.drafting is Drafting.SEQUENTIAL:
            return 1
        return draft_tokens + self.block_rows_beyond_k


METHODS: tuple[Method, ...] = (
    Method("ngram", "n-gram", "ngram_gpu", Drafting.LOOKUP, Confidence.MATCH, own_checkpoint=False),
    Method("suffix", "suffix", None, Drafting.LOOKUP, Confidence.MATCH, own_checkpoint=False),
    Method("mtp", "MTP", "mtp", Drafting.SEQUENTIAL, Confidence.MAX_SOFTMAX, own_checkpoint=False),
    Method("eagle3", "EAGLE-3", "eagle3", Drafting.SEQUENTIAL, Confidence.MAX_SOFTMAX),
    Method(
        "draft_model", "draft model", "draft_model", Drafting.SEQUENTIAL, Confidence.MAX_SOFTMAX
    ),
    Method("dflash", "DFlash", "dflash", Drafting.PARALLEL, Confidence.MAX_SOFTMAX, 1),
    Method("dspark", "DSpark", "dspark", Drafting.PARALLEL, Confidence.HEAD),
    Method("dflash2", "DFlash 2", "dflash", Drafting.PARALLEL, Confidence.SELECTOR, 1),
)


def method(name: str) -> Method:
    """The method of that name; ValueError names the nearest one."""
    for candidate in METHODS:
        if candidate.name == name:
            return candidate
    names = [candidate.name for candidate in METHODS]
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f", did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown method {name!r}{hint} Known: {', '.join(names)}")
