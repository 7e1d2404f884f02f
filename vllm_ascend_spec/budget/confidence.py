"""Where confidences come from, what is believed before any is seen, and what is remembered.

Every method ends in a score in [0, 1] per draft token that looks only at the draft up to that
token: trimming never looks at a token it drops, so the output distribution stays the target's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_ascend_spec.budget.calibration import OnlineCalibration
from vllm_ascend_spec.budget.survival import (
    ONE,
    SCORE_LEVELS,
    Grid,
    Ints,
    Scores,
    prefix_products,
)


def constant_acceptance(tau: float, draft_tokens: int) -> float:
    """The constant c with 1 + c + ... + c**K = tau: a mean acceptance length as one chance."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2.0
        length = sum(middle**i for i in range(draft_tokens + 1))
        low, high = (middle, high) if length < tau else (low, middle)
    return (low + high) / 2.0


MATCH_PRIOR = 4.0  # trials that a match's length is worth
MATCH_MEMORY = 64.0  # trials of a request that count; older ones fade
EVEN_REQUESTS = 16  # batch size at which newest and typical survivals weigh the same


def conditional(survival: tuple[float, ...]) -> tuple[float, ...]:
    """Survival by position -> acceptance chance given that every position before was accepted."""
    return tuple(p / q for p, q in zip(survival, (1.0, *survival), strict=False))


# Chances by position before any data, each given the positions before. Public figures: a profile
# where there is one, else the mean acceptance length at the reported K as one constant. Only where
# learning starts: the first hundred steps replace them.
COLD_STARTS: dict[str, tuple[float, ...]] = {
    "dspark": conditional((0.75, 0.61, 0.54, 0.48, 0.43, 0.39, 0.36)),
    "dflash": (constant_acceptance(3.85, 7),),
    "dflash2": (constant_acceptance(3.83, 7),),
    "mtp": (constant_acceptance(3.83, 7),),
    "eagle3": (0.70, 0.60, 0.50, 0.45, 0.42, 0.40, 0.38),
    "draft_model": (constant_acceptance(3.83, 7),),
    "ngram": (constant_acceptance(3.4, 5),),
    "suffix": (constant_acceptance(3.4, 5),),
}


def cold_start(method: str, draft_tokens: int) -> npt.NDArray[np.float64]:
    """Acceptance chances float [K] of a method; positions beyond its profile repeat the last."""
    profile = COLD_STARTS[method]
    return np.array([profile[min(i, len(profile) - 1)] for i in range(draft_tokens)])


def match_scores(
    match_length: npt.ArrayLike, agreements: npt.ArrayLike, trials: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """n-gram match statistics [R] -> raw score [R] of each token copied from the match.

    match_length: tokens of the tail that were found earlier, 0 for no match. trials, agreements:
    how many tokens copied from matches were verified in this request, and how many of them were
    accepted. Starts at m / (m + 1) with the weight of `MATCH_PRIOR` trials; calibration learns the
    rest.
    """
    length = np.asarray(match_length, dtype=np.float64)
    start = length / (length + 1.0)
    hits, tries = np.asarray(agreements, np.float64), np.asarray(trials, np.float64)
    score = (hits + MATCH_PRIOR * start) / (tries + MATCH_PRIOR)
    return np.where(length > 0, score, 0.0)


class MatchStatistics:
    """Per request slot: tokens verified and accepted from n-gram matches; old ones fade."""

    def __init__(self, max_requests: int, memory: float = MATCH_MEMORY) -> None:
        self._memory = memory
        self.agreements, self.trials = np.zeros((2, max_requests))

    def begin(self, slot: int) -> None:
        """A new request takes the slot."""
        self.agreements[slot] = self.trials[slot] = 0.0

    def observe(self, slots: Ints, verified: Ints, accepted: Ints) -> None:
        """int [R] each. Trials end with the first rejected token: what follows is censored."""
        self.trials[slots] += np.minimum(verified, accepted + 1)
        self.agreements[slots] += accepted
        fade = self._memory / np.maximum(self.trials[slots], self._memory)
        self.trials[slots] *= fade
        self.agreements[slots] *= fade

    def scores(self, slots: Ints, match_length: Ints, draft_tokens: int) -> npt.NDArray[np.float64]:
        """Raw scores [R, K]: the same chance for every token of the match, given the one before."""
        scores = match_scores(match_length, self.agreements[slots], self.trials[slots])
        return np.repeat(scores[:, None], draft_tokens, axis=1)


class RequestMemory:
    """What is known of the drafts of each request slot, as scores and as survivals.

    `newest` [slots, K] decides how many rows pay in this batch; `typical` [slots, K], the running
    mean, decides whether drafting a request pays, for the next draft is a new draw and not the last
    one over again. A request that is not drafted drifts from its newest survivals to its mean. A
    request without history takes a draft that some other request made lately: a batch of unknown
    requests must look as uneven as real ones are, or picking the best rows seems worthless.
    """

    def __init__(
        self,
        max_requests: int,
        calibration: OnlineCalibration,
        acceptance: npt.NDArray[np.float64],
        recent: int = 256,
    ) -> None:
        """acceptance: chance of each position given those before it, before any data, float [K]."""
        scores = np.rint(acceptance * (SCORE_LEVELS - 1)).astype(np.uint16)
        self._calibration = calibration
        self._scores = np.repeat(scores[None], max_requests, axis=0)
        self._classes = np.zeros(max_requests, dtype=np.int64)
        self._recent = np.repeat(scores[None], recent, axis=0)
        self._write = self._read = 0
        self._plain = self._survival(slice(None))
        self.newest: Grid = self._plain.copy()
        self.typical: Grid = self._plain.copy()
        self._population = self._plain[0].astype(np.int32)
        self._seen = np.zeros(max_requests, dtype=np.int32)
        # Slots whose newest draft came with a NaN or out-of-range confidence.
        self.unknown = np.zeros(max_requests, dtype=np.bool_)
        self._version = calibration.version

    def begin(self, slot: int, sampling: int = 0) -> None:
        """A new request takes the slot; sampling: its class (`calibration.sampling_class`)."""
        self._scores[slot] = self._recent[self._read]
        self._read = (self._read + 1) % self._recent.shape[0]
        self._classes[slot] = sampling
        self._seen[slot] = 0
        self.unknown[slot] = False
        self._plain[slot] = self.newest[slot] = self._survival(slice(slot, slot + 1))[0]
        self.typical[slot] = self._population

    def record(
        self,
        slots: Ints,
        scores: Scores,
        drafted: npt.NDArray[np.bool_],
        depth: int,
        valid: npt.NDArray[np.bool_] | None = None,
    ) -> Grid:
        """scores [R, K], valid up to `depth`, of the requests that were `drafted`, bool [R].

        valid: bool [R], whose confidences are numbers. The draft of any other is to be verified
        whole: it ranks before all others, and what is known of its request stays as it was.
        Returns the survivals [R, K] of the recorded drafts, 0 for the others.
        """
        if self._version != self._calibration.version:
            self._recalibrate()
        self.unknown[slots] = False
        if valid is not None and not valid.all():
            lost = slots[drafted & ~valid]
            survival = self.record(slots, scores, drafted & valid, depth)
            self.unknown[lost] = True
            self.newest[lost] = ONE - 1 - np.arange(self.newest.shape[1])
            return survival
        if drafted.all():
            return self._record(slots, scores, depth)
        idle = slots[~drafted]
        newest = self.newest[idle].astype(np.int32)
        self.newest[idle] = newest + ((self.typical[idle] - newest) >> 2)
        survival = np.zeros_like(scores)
        if idle.size < slots.size:
            survival[drafted] = self._record(slots[drafted], scores[drafted], depth)
        return survival

    def _record(self, slots: Ints, scores: Scores, depth: int) -> Grid:
        # Positions that were not drafted keep their old chances, under the new prefix.
        self._scores[slots, :depth] = scores[:, :depth]
        survival = self._survival(slots)
        self._plain[slots] = self.newest[slots] = survival
        typical = self.typical[slots].astype(np.int32)
        # 1/2, 1/3, ... 1/16: a plain mean at first, a running one later.
        seen = self._seen[slots]
        typical += (survival - typical) // (seen + 2)[:, None]
        self.typical[slots] = typical
        self._seen[slots] = np.minimum(seen + 1, 14)
        few = slots[:16]
        room = (self._write + np.arange(few.size)) % self._recent.shape[0]
        self._recent[room] = self._scores[few]
        self._write = (self._write + few.size) % self._recent.shape[0]
        mean = survival.sum(axis=0, dtype=np.int64) // slots.size
        self._population += (mean - self._population).astype(np.int32) >> 5
        return survival

    def expected(self, slots: Ints) -> Grid:
        """Survivals [R, K] to plan with: between the newest and the typical ones.

        The drafts to come are new draws. In a large batch the newest stand for them, unevenness
        included; in a small one a single draw is mostly luck, and the mean tells more.
        """
        requests = slots.shape[0]
        newest: Grid = self.newest[slots]
        lost = self.unknown[slots]
        if lost.any():
            newest[lost] = self.typical[slots[lost]]
        if requests >= 8 * EVEN_REQUESTS:
            return newest
        weight = 256 * requests // (requests + EVEN_REQUESTS)
        blend = newest.astype(np.int32) * weight
        blend += self.typical[slots].astype(np.int32) * (256 - weight)
        blend >>= 8
        mixed: Grid = blend.astype(np.uint16)
        return mixed

    def classes(self, slots: Ints) -> Ints:
        """Sampling classes of the requests, int [R]."""
        return self._classes[slots]

    def _survival(self, slots: Ints | slice) -> Grid:
        chances = self._calibration.apply(self._scores[slots], self._classes[slots])
        return prefix_products(chances)

    def _recalibrate(self) -> None:
        """A new calibration changes what old scores mean, above all for those not drafted now."""
        self._version = self._calibration.version
        before, self._plain = self._plain, self._survival(slice(None))
        ratio = self._plain / np.maximum(before, 1)
        for survival in (self.newest, self.typical):
            np.minimum(np.rint(survival * ratio), ONE - 1, out=survival, casting="unsafe")
        self._population = self.typical.mean(axis=0).astype(np.int32)
