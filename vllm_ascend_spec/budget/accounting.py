"""Counters of speculative decoding that tell trimmed draft tokens from rejected ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Totals since the start. A trimmed draft token was drafted and never verified.

    requests: request steps, undrafted ones included. invalid: NaN or out-of-range confidences.
    """

    steps: int = 0
    requests: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    invalid: int = 0
    expected_accepted: float = 0.0
    predicted_ms: float = 0.0
    real_ms: float = 0.0

    @property
    def trimmed(self) -> int:
        return self.drafted - self.verified

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the verified draft tokens; None where nothing was verified."""
        return self.accepted / self.verified if self.verified else None

    @property
    def tau(self) -> float | None:
        """Emitted tokens per request and step, over all steps, undrafted ones included."""
        return self.emitted / self.requests if self.requests else None

    @property
    def expectation_error(self) -> float | None:
        """Expected over real acceptances, less 1."""
        return self.expected_accepted / self.accepted - 1.0 if self.accepted else None

    @property
    def time_error(self) -> float | None:
        """Predicted over real step time, less 1."""
        return self.predicted_ms / self.real_ms - 1.0 if self.real_ms else None

    def since(self, earlier: Counters) -> Counters:
        """The interval between two snapshots."""
        names = self.__dataclass_fields__
        return Counters(**{name: getattr(self, name) - getattr(earlier, name) for name in names})
