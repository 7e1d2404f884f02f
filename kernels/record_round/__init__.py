"""The end of a drafting round in one launch: what the ranking reads, and what travels to the host.

Raw confidences become acceptance chances by the calibration of each request's sampling class, and
lie down at the request's slot; the raw ones, with the verdict on the step, lie down in batch order
for the copy to the host. In torch operators this is two dozen launches a step, and a host that
launches them for one request takes longer than the device takes for the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class RoundTables:
    """Device tables that change seldom. S slots, C sampling classes, K draft tokens, L levels.

    chances: float32 [C, K, L], acceptance chance of each level of a raw confidence. classes: int32
    [S], sampling class of each slot. whole: int32 [S], nonzero for requests whose drafts are never
    trimmed: they rank before all others.
    """

    chances: torch.Tensor
    classes: torch.Tensor
    whole: torch.Tensor


@dataclass
class Verdict:
    """int32 [R] each, in batch order: draft tokens verified (None: none were), tokens emitted."""

    verified: torch.Tensor | None
    sampled: torch.Tensor


def check_shapes(
    confidence: torch.Tensor, slots: torch.Tensor, tables: RoundTables, ranking: torch.Tensor,
    figures: torch.Tensor | None,
) -> None:  # fmt: skip
    """ValueError names the tensor that does not fit; reads no device value."""
    requests, depth = confidence.shape
    size = tables.classes.shape[0]
    expected = {
        "slots": (slots.shape[0], requests),
        "chances": (tables.chances.shape[1], depth),
        "whole": (tables.whole.shape[0], size),
        "ranking": (tuple(ranking.shape), (size, depth)),
    }
    if figures is not None:
        expected["figures"] = (figures.shape[1], depth + 2)
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise ValueError(
                f"record_round: {name} has size {found}, {wanted} fits confidences "
                f"{tuple(confidence.shape)} and {size} slots"
            )
    if confidence.stride(1) != 1 or ranking.stride(1) != 1 or not tables.chances.is_contiguous():
        raise ValueError("record_round: rows must be contiguous, and the table of chances whole")
