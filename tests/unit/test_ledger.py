"""What the host learns from arrivals, and whose it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vllm_ascend_spec.budget.confidence import cold_start
from vllm_ascend_spec.budget.controller import BudgetController
from vllm_ascend_spec.budget.planner import Limits
from vllm_ascend_spec.engine.ledger import Arrival, DraftLedger

DEPTH = 3


@pytest.fixture
def ledger() -> DraftLedger:
    limits = Limits(draft_tokens=DEPTH, max_requests=4, max_rows=64)
    controller = BudgetController(limits, None, cold_start("dspark", DEPTH))
    ledger = DraftLedger(controller, 4, DEPTH)
    for slot in range(4):
        ledger.begin(slot)
    return ledger


def arrival(
    ledger: DraftLedger,
    slots: list[int],
    sampled: list[int],
    verified: list[int],
    *,
    makes: int,
    drafted: bool = True,
) -> Arrival:
    """The step that judged round `makes` - 1 and made round `makes`."""
    at = np.array(slots)
    return Arrival(
        slots=at,
        tenants=ledger.tenants(at),
        judges=np.full(len(slots), makes - 1),
        makes=np.full(len(slots), makes),
        sampled=np.array(sampled),
        verified=np.array(verified),
        confidence=np.full((len(slots), DEPTH), 0.5, dtype=np.float32),
        drafted=np.full(len(slots), drafted),
    )


def test_a_round_is_graded_by_the_next_arrival(ledger: DraftLedger):
    assert ledger.learn(arrival(ledger, [2, 0], [1, 1], [0, 0], makes=1)) == 2
    assert ledger.learn(arrival(ledger, [0, 2], [3, 1], [2, 3], makes=2)) == 4
    counters = ledger.controller.counters
    assert (counters.drafted, counters.verified, counters.accepted) == (6, 5, 2)


def test_what_a_former_tenant_drafted_is_not_the_new_one_s(ledger: DraftLedger):
    first = arrival(ledger, [1], [1], [0], makes=1)
    second = arrival(ledger, [1], [2], [3], makes=2)
    ledger.learn(first)
    ledger.begin(1)
    ledger.learn(second)
    assert ledger.controller.counters.verified == 0
    ledger.learn(arrival(ledger, [1], [1], [0], makes=3))
    ledger.learn(arrival(ledger, [1], [4], [3], makes=4))
    assert ledger.controller.counters.verified == 3


def test_undrafted_rounds_are_not_graded(ledger: DraftLedger):
    ledger.learn(arrival(ledger, [0], [1], [0], makes=1, drafted=False))
    ledger.learn(arrival(ledger, [0], [2], [1], makes=2))
    assert ledger.controller.counters.verified == 0


def test_after_a_lost_step_nothing_is_graded_by_the_wrong_drafts(ledger: DraftLedger):
    ledger.learn(arrival(ledger, [0], [1], [0], makes=1))
    ledger.learn(arrival(ledger, [0], [2], [1], makes=3))  # the one that made round 2 was lost
    assert ledger.controller.counters.verified == 0
    ledger.learn(arrival(ledger, [0], [2], [1], makes=4))
    assert ledger.controller.counters.verified == 1


def test_rows_inside_a_prompt_draft_nothing_that_counts(ledger: DraftLedger):
    ledger.learn(arrival(ledger, [3], [0], [0], makes=1))
    ledger.learn(arrival(ledger, [3], [1], [0], makes=2))
    ledger.learn(arrival(ledger, [3], [1], [2], makes=3))
    assert ledger.controller.counters.drafted == DEPTH


def test_a_short_round_counts_what_was_drafted(ledger: DraftLedger):
    short = replace(arrival(ledger, [0, 1], [1, 1], [0, 0], makes=1), length=2)
    ledger.learn(short)
    ledger.learn(arrival(ledger, [0, 1], [3, 1], [2, 2], makes=2))
    counters = ledger.controller.counters
    assert (counters.drafted, counters.verified, counters.accepted) == (4, 4, 2)


def test_what_a_short_round_left_out_keeps_its_chances(ledger: DraftLedger):
    ledger.learn(arrival(ledger, [0], [1], [0], makes=1))
    before = ledger.controller.memory.newest[0].copy()
    given = arrival(ledger, [0], [2], [1], makes=2)
    given.confidence[:, 1:] = 0.0
    ledger.learn(replace(given, length=1))
    assert ledger.controller.memory.newest[0].tolist() == before.tolist()
