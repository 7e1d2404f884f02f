"""Adaptive verification on vllm-ascend: the host trims each request's draft before the launch.

vLLM 0.27.1 and vllm-ascend have none. The scheduler hands every request its K draft tokens; here
the best of them over the whole batch are kept, as many as the budget planner finds worth their
time, and the step is launched as if the scheduler had given out just those. To the scheduler a
trimmed draft token looks rejected, which is what it has to do with it: nothing else changes.

Lane L0 decides with the confidences of the very drafts that it trims, and waits for the drafter
once a step; lane L1 decides with those of the round before.

Whether a sampled request's draft token is verified must not depend on which token it is, or the
tokens that come out are no longer distributed as the target's. A later draft token's confidence
depends on it, and through the budget every row does. So where anybody samples, lane L0 takes the
budget from the round before too; these drafts only rank the rows, and in a ranking a later token
never stands before an earlier one of its request.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_ascend_spec.budget import confidence
from vllm_ascend_spec.budget.controller import BudgetController
from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.planner import Limits, Plan
from vllm_ascend_spec.budget.survival import Ints, split
from vllm_ascend_spec.engine.ascend_lanes import Lane
from vllm_ascend_spec.engine.ledger import Arrival, DraftLedger
from vllm_ascend_spec.engine.metrics import BudgetMetrics
from vllm_ascend_spec.graphs import acl

logger = logging.getLogger("vllm.ascend_spec.adaptive")

FIRST = np.iinfo(np.uint16).max  # a survival that ranks before all others


@dataclasses.dataclass(frozen=True)
class DraftRound:
    """What one step showed and drafted, on its way to the host.

    slots: int [R], request states in batch order. verified: draft tokens that the step verified,
    int [R]. sampled: tokens that it emitted, on the host int [R], 0 inside a prompt. confidence:
    on the host float32 [states, K]. arrived: event after which the host tensors hold their values.
    keep: what must outlive the copies.
    """

    slots: Ints
    verified: Ints
    sampled: torch.Tensor
    confidence: torch.Tensor
    arrived: Any
    keep: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class SentRound:
    """A round on its way, who had its slots and which round of theirs it is, int [R] each.

    planned: the plan of the step before it and the requests that it planned for, if any.
    """

    drafts: DraftRound
    tenants: Ints
    makes: Ints
    planned: tuple[Plan, int] | None


class LengthPlanner:
    """Decides how many draft tokens of each request a step verifies.

    method: the drafting method's name, for what is believed before any data. cost: None keeps
    every draft token, as far as max_draft_rows of a step go. ladder: rows of the target's captured
    graphs, ascending. metrics: where the totals are published, on one rank.
    """

    def __init__(
        self,
        *,
        method: str,
        draft_tokens: int,
        max_requests: int,
        max_rows: int,
        lane: Lane,
        cost: CostModel | None,
        max_draft_rows: int | None = None,
        ladder: Sequence[int] = (),
        metrics: BudgetMetrics | None = None,
    ) -> None:
        # vLLM's speculators draft for the whole batch or not at all.
        limits = Limits(
            draft_tokens,
            max_requests,
            max_rows,
            max_draft_rows=max_draft_rows,
            drafts_subset=False,
        )
        acceptance = confidence.cold_start(method, draft_tokens)
        self.controller = BudgetController(limits, cost, acceptance)
        self.ledger = DraftLedger(self.controller, max_requests, draft_tokens)
        self.lane, self.ladder, self.max_requests = lane, ladder, max_requests
        self.draft_tokens = draft_tokens
        self.last_plan: Plan | None = None
        self.metrics = metrics
        self._planned: tuple[Plan, int] | None = None  # of the step in flight, and its requests
        self._rounds: list[SentRound] = []
        self._verified = np.zeros(max_requests, dtype=np.int64)
        self._made = np.zeros(max_requests, dtype=np.int64)
        self._samples = np.zeros(max_requests, dtype=np.bool_)
        self._whole = np.zeros(max_requests, dtype=np.bool_)

    def begin(self, slot: int, temperature: float, top_p: float, whole: bool = False) -> None:
        """A new request takes the request state `slot`; whole: its drafts are not to be trimmed."""
        self.ledger.begin(slot, temperature, top_p)
        self._samples[slot] = temperature > 0
        self._whole[slot] = whole

    def lengths(
        self, slots: Ints, drafted: Ints, rows: int, context: float, in_prompt: bool = False
    ) -> Ints:
        """Draft tokens to verify, int [R], of the `drafted` ones in hand, int [R].

        rows: rows of the launch without any draft token. context: mean tokens of a request.
        in_prompt: whether prompt tokens are among the rows, so that no FULL graph runs them.
        """
        anyone_samples = bool(self._samples[slots].any())
        self._receive(leave=1 if anyone_samples else self.lane.age)
        may_draft = np.ones(len(slots), dtype=np.bool_)
        kind = self.lane.step_kind(in_prompt)
        plan = self.controller.plan(slots, drafted, may_draft, rows, len(slots), context, kind)
        self.last_plan, self._planned = plan, (plan, len(slots))
        self._receive(leave=self.lane.age)
        whole = self._whole[slots]
        least, most = int(drafted[whole].sum()), int(drafted.sum())
        budget = min(max(plan.draft_rows, least), most)
        if not in_prompt and rows == len(slots):
            filled = acl.rows_with_a_graph(rows + budget, rows, self.ladder, self.max_requests)
            budget = max(filled - rows, least)
        survival = self.controller.memory.newest[slots]
        survival[whole] = FIRST
        return split(survival, drafted, budget).astype(np.int64)

    def launched(self, slots: Ints, verified: Ints) -> None:
        """The step about to run verifies so many draft tokens; int [R] each."""
        self._verified[:] = 0
        self._verified[slots] = verified

    def verified(self, slots: Ints) -> Ints:
        """Draft tokens that the step in flight verifies, int [R]."""
        return self._verified[slots]

    def sent(self, drafts: DraftRound) -> None:
        """A drafting round was launched, and its copies to the host with it."""
        self._made[drafts.slots] += 1
        tenants, makes = self.ledger.tenants(drafts.slots), self._made[drafts.slots]
        planned, self._planned = self._planned, None
        self._rounds.append(SentRound(drafts, tenants, makes, planned))

    def _receive(self, leave: int) -> None:
        """Read the rounds that were sent, the `leave` newest excepted."""
        ready = max(len(self._rounds) - leave, 0)
        for sent in self._rounds[:ready]:
            sent.drafts.arrived.synchronize()
            self._learn(sent)
        del self._rounds[:ready]

    def _learn(self, sent: SentRound) -> None:
        drafts = sent.drafts
        emitted = self.ledger.learn(
            Arrival(
                slots=drafts.slots,
                tenants=sent.tenants,
                judges=sent.makes - 1,
                makes=sent.makes,
                sampled=drafts.sampled.numpy().astype(np.int64),
                verified=drafts.verified,
                confidence=drafts.confidence.numpy()[drafts.slots],
                drafted=np.ones(len(drafts.slots), dtype=np.bool_),
            )
        )
        if sent.planned is None:
            return
        plan, requests = sent.planned
        # No step is timed while serving: ranks that trust their own clocks would part.
        self.controller.observe_step(plan, requests, emitted, real_ms=None)
        if self.metrics is not None:
            self.metrics.step(self.controller, plan)


def trim(scheduler_output: Any, lengths: dict[str, int]) -> Any:
    """A copy of the scheduler's output with `lengths` draft tokens for the named requests."""
    scheduled = dict(scheduler_output.num_scheduled_tokens)
    drafts = dict(scheduler_output.scheduled_spec_decode_tokens)
    for request, kept in lengths.items():
        scheduled[request] -= len(drafts[request]) - kept
        drafts[request] = drafts[request][:kept]
    return dataclasses.replace(
        scheduler_output,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=drafts,
    )


def slots_of(request_ids: Sequence[str], runner: Any) -> Ints:
    """Request states of the requests, int [R]."""
    states: npt.NDArray[np.int64] = np.array(
        [runner.req_states.req_id_to_index[request] for request in request_ids], dtype=np.int64
    )
    return states
