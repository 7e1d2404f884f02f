"""Figures of the talk (Huawei, Practical ML Conf 2026): Ascend 910A2, K = 9, Model Runner V1.

Ratios to the target alone where it gave ratios, tokens a second where it gave those.
"""

from __future__ import annotations

from dataclasses import dataclass

DRAFT_TOKENS = 9
BATCHES = (128, 256)
METHODS = ("none", "dspark", "dflash", "eagle3")
TITLES = {"none": "target alone", "dspark": "DSpark", "dflash": "DFlash", "eagle3": "EAGLE-3"}


@dataclass(frozen=True)
class Figure:
    """What the talk says of one arm; said: its own words where it gave no number."""

    tokens_per_s: float | None = None
    ratio: float | None = None
    said: str = ""

    def __str__(self) -> str:
        if self.said:
            return self.said
        parts = [f"{self.tokens_per_s:.0f} tok/s"] if self.tokens_per_s is not None else []
        parts += [f"{self.ratio:.2f}x"] if self.ratio is not None else []
        return ", ".join(parts) or "not given"


# (batch, method, dynamic)
FIGURES: dict[tuple[int, str, bool], Figure] = {
    (128, "none", False): Figure(ratio=1.0),
    (128, "dspark", False): Figure(ratio=1.43),
    (128, "dflash", False): Figure(ratio=1.22),
    (128, "eagle3", False): Figure(said="below 1"),
    (256, "none", False): Figure(tokens_per_s=2411, ratio=1.0),
    (256, "dspark", False): Figure(tokens_per_s=2614),
    (256, "dflash", False): Figure(ratio=0.99),
    (256, "eagle3", False): Figure(said="below 1"),
    (256, "dspark", True): Figure(tokens_per_s=3120, ratio=1.29),
    (256, "dflash", True): Figure(said="above the target"),
    (256, "eagle3", True): Figure(said="above the target"),
}
