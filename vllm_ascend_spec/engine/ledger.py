"""What is known on the host of every request's drafts, between a drafting round and its verdict.

A round's confidences and the verdict on the round before it arrive together, one or two steps
after they were made. By then a request may have left and another one taken its slot, so every
entry remembers whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_ascend_spec.budget.controller import BudgetController, Drafts
from vllm_ascend_spec.budget.survival import Ints

Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Arrival:
    """One step as it reached the host, in batch order.

    slots: int [R], request slots. tenants: int [R], who had each slot. judges, makes: int [R],
    numbers of the drafting rounds that the step judged and made. sampled: int [R], tokens emitted,
    0 inside a prompt. verified: int [R], draft tokens verified. confidence: float [R, K] of the
    drafts made after the step. drafted: bool [R], for whom any were made. length: how many each,
    K if None.
    """

    slots: Ints
    tenants: Ints
    judges: Ints
    makes: Ints
    sampled: Ints
    verified: Ints
    confidence: npt.NDArray[np.float32]
    drafted: Bools
    length: int | None = None

    def only(self, mask: Bools) -> Arrival:
        """The requests that `mask`, bool [R], names; itself where those are all."""
        if mask.all():
            return self
        rows: dict[str, Any] = {
            name: value[mask]
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), np.ndarray)
        }
        return replace(self, **rows)


class DraftLedger:
    """Feeds a `BudgetController` with arrivals, in the order of their steps."""

    def __init__(self, controller: BudgetController, max_requests: int, draft_tokens: int) -> None:
        self.controller = controller
        self.draft_tokens = draft_tokens
        self._tenants = np.zeros(max_requests, dtype=np.int64)
        # The drafts that each slot has in hand, as they were recorded; round 0 is none.
        self._round = np.zeros(max_requests, dtype=np.int64)
        self._length = np.zeros(max_requests, dtype=np.int64)
        self._scores = np.zeros((max_requests, draft_tokens), dtype=np.uint16)
        self._survival = np.zeros((max_requests, draft_tokens), dtype=np.uint16)
        self._valid = np.ones(max_requests, dtype=np.bool_)

    def begin(self, slot: int, temperature: float = 0.0, top_p: float = 1.0) -> None:
        """A new request takes the slot."""
        self.controller.begin(slot, temperature, top_p)
        self._tenants[slot] += 1
        self._round[slot] = 0

    def tenants(self, slots: Ints) -> Ints:
        """Who has the slots now, int [R]; compared with an arrival's when that is read."""
        return self._tenants[slots]

    def learn(self, arrival: Arrival) -> int:
        """The verdict on the drafts before, then the new drafts. Returns the tokens emitted."""
        present = arrival.only(self._tenants[arrival.slots] == arrival.tenants)
        self._grade(present)
        self._record(present)
        return int(arrival.sampled.sum())

    def _grade(self, arrival: Arrival) -> None:
        # A step that never arrived leaves a gap, and what follows it judges other drafts.
        held = self._round[arrival.slots]
        judged = (held == arrival.judges) & (held > 0)
        judged &= (arrival.verified > 0) & (arrival.sampled > 0)
        if not judged.any():
            return
        arrival = arrival.only(judged)
        slots, verified = arrival.slots, arrival.verified
        classes = self.controller.memory.classes(slots)
        before = Drafts(
            slots, classes, self._scores[slots], self._survival[slots], self._valid[slots]
        )
        accepted = np.minimum(arrival.sampled - 1, verified)
        self.controller.observe(before, self._length[slots], verified, accepted)

    def _record(self, arrival: Arrival) -> None:
        slots = arrival.slots
        if not slots.size:
            return
        # Inside a prompt a drafter runs for its cache alone, and its drafts are never verified.
        made = (arrival.sampled > 0) & arrival.drafted
        length = self.draft_tokens if arrival.length is None else arrival.length
        drafted = made * length
        new = self.controller.record(slots, arrival.confidence, drafted, length)
        self._length[slots] = drafted
        self._round[slots] = made * arrival.makes
        self._scores[slots], self._survival[slots] = new.scores, new.survival
        self._valid[slots] = True if new.valid is None else new.valid
