"""Paying for information: probes that may cost a fixed share of the time, and no more."""

from __future__ import annotations


class ProbeAccount:
    """Earns `share` of all step time; a probe is affordable when its expected loss is covered.

    The loss of a probe is the time it takes beyond what its own tokens are worth at the best known
    rate. `credit_ms` is granted once, so that a bad start is found out at once. In ns.
    """

    def __init__(self, share: float, credit_ms: float = 0.0) -> None:
        if not 0.0 <= share < 1.0:
            raise ValueError(f"probe share {share} outside 0 <= share < 1")
        self.share = share
        self._credit = credit_ms * 1e6
        self.elapsed_ns = 0.0
        self.spent_ns = 0.0

    def earn(self, step_ns: float) -> None:
        """Account for one step of any kind."""
        self.elapsed_ns += step_ns

    def pay(self, loss_ns: float) -> bool:
        """Spend on a probe that loses `loss_ns`; False, and nothing spent, when it is too dear."""
        loss_ns = max(loss_ns, 0.0)
        if self.spent_ns + loss_ns > self._credit + self.elapsed_ns * self.share:
            return False
        self.spent_ns += loss_ns
        return True


class RoundRobin:
    """Hands out request indices in turn, so that every request is probed once a round."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, candidates: list[int], count: int) -> list[int]:
        """Up to `count` of the ascending `candidates`, from where the last call stopped."""
        later = [index for index in candidates if index >= self._next]
        chosen = (later + [index for index in candidates if index < self._next])[:count]
        if chosen:
            self._next = chosen[-1] + 1
        return chosen
