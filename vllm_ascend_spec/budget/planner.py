"""How many draft rows to verify this step, and what to draft for the next.

Maximise `G(n) / C(n)` over the whole array of n: `G(n)` = tokens that the batch emits if its n best
draft rows are verified = requests that sample + the n largest survivals; `C(n)` = time of the step.
`C` is a staircase, so the first descent is not the best and a greedy stop is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from zlib import crc32

import numpy as np
import numpy.typing as npt

from vllm_ascend_spec.budget.cost import UNPRICED, CostModel
from vllm_ascend_spec.budget.probe import ProbeAccount, RoundRobin
from vllm_ascend_spec.budget.surface import StepKind
from vllm_ascend_spec.budget.survival import ONE, Exact, Grid, Ints, Ranking


class Reason(str, Enum):
    """Why a plan is what it is."""

    BEST = "most tokens per time"
    NO_DRAFT = "drafting does not pay"
    PROBE = "probe: is drafting worth it again?"
    EXPLORE = "probe: verify rows that are usually trimmed"
    NO_SURFACE = "no cost surface: fixed draft length"
    UNPRICED = "no price for this step: fixed draft length"


@dataclass(frozen=True)
class Limits:
    """max_logits_rows: rows whose logits fit in memory at once; max_draft_rows: the user's own.

    depths: draft lengths the drafter can be run at, ascending. drafts_subset: whether the drafter
    can leave requests out; if not, it drafts for all or for none.
    """

    draft_tokens: int
    max_requests: int
    max_rows: int
    max_logits_rows: int | None = None
    max_draft_rows: int | None = None
    depths: tuple[int, ...] = ()
    drafts_subset: bool = True
    probe_share: float = 0.004
    probe_credit_ms: float = 25.0
    probe_requests: int = 16


@dataclass(frozen=True)
class StepBatch:
    """What the host knows before the step; requests in batch order.

    survival: uint16 [R, K], newest survivals on the grid (confidences one or two steps old).
    typical: uint16 [R, K], running mean of the same. drafted: int [R], draft tokens in hand: 0 for
    prefill, opted-out and undrafted requests, less than K where a grammar or a lookup ends early.
    may_draft: bool [R], False for opted-out requests and those that will not decode next step.
    rows: rows of the launch without draft rows. sampling: requests that emit a token.
    context: mean context in tokens.
    """

    kind: StepKind
    survival: Grid
    typical: Grid
    drafted: Ints
    may_draft: npt.NDArray[np.bool_]
    rows: int
    sampling: int
    context: float


@dataclass(frozen=True)
class Plan:
    """draft_rows: verified this step. draft_next: bool [R], drafted after it, `depth` tokens."""

    draft_rows: int
    rows: int
    draft_next: npt.NDArray[np.bool_]
    depth: int
    expected_tokens: float
    expected_ms: float | None
    reason: Reason

    def digest(self) -> int:
        """32 bits that differ when a decision does: ranks compare it before a collective."""
        head = f"{self.draft_rows},{self.rows},{self.depth},".encode()
        return crc32(head + np.packbits(self.draft_next).tobytes())


@dataclass(slots=True, eq=False)  # not frozen: that triples the time to make one
class Drafting:
    """One way to draft: which requests, how deep, and the best it comes to."""

    member: npt.NDArray[np.bool_]
    count: int
    depth: int
    drafter_ns: float
    rate: float
    marginal: float  # survival of the last row worth verifying


def pays(survival: float, tokens: float, cost: float, extra_cost: float) -> bool:
    """The threshold rule `p_{k+1} > G dC / C`: one more position lowers the time per token.

    Equivalent to `(C + dC) / (G + p) < C / G`. Documentation and oracle: on a staircase it is a
    local condition, so the planner looks at the whole array instead.
    """
    return survival > tokens * extra_cost / cost


def best_count(tokens: Exact, cost: Exact) -> int:
    """argmax tokens[n] / cost[n] over the whole array, the smallest n of equals.

    Both hold integers exactly, so the correctly rounded quotients are the same on every machine.
    """
    return int((tokens / cost).argmax())


class Planner:
    """Plans one step after another. Equal inputs in equal order give equal plans on every rank."""

    def __init__(self, limits: Limits, cost: CostModel | None) -> None:
        self.limits = limits
        self.cost = cost
        self._max_rows = min(limits.max_rows, cost.max_rows if cost else limits.max_rows)
        self.ranking = Ranking(limits.max_requests, limits.draft_tokens)
        depths = limits.depths or (limits.draft_tokens,)
        self._depths = tuple(sorted({min(d, limits.draft_tokens) for d in depths}))
        self._depth = self._depths[-1]
        self._turn = 0
        self._ones = np.ones(limits.draft_tokens, dtype=np.float32)
        self._indices = np.arange(limits.max_requests)
        self._entry: tuple[float, float] | None = None
        self._draft_probes = ProbeAccount(limits.probe_share, limits.probe_credit_ms)
        self._verify_probes = ProbeAccount(limits.probe_share, limits.probe_credit_ms)
        self._round = RoundRobin()

    def plan(self, batch: StepBatch) -> Plan:
        """The decision. Needs no device and waits for nothing."""
        if self.cost is None:
            return self._fixed(batch, Reason.NO_SURFACE)
        everyone = int(np.count_nonzero(batch.may_draft))
        reach = np.where(batch.may_draft, self.limits.draft_tokens, batch.drafted)
        values, slots = self.ranking.order(batch.survival, reach)
        # What drafting is worth is decided on decode steps: a prefill beside them is no reason.
        decode = self._price(batch, StepKind.FULL, batch.sampling, batch.sampling, values.size)
        if decode[0] >= UNPRICED:
            return self._fixed(batch, Reason.UNPRICED)
        none = self._none(batch, decode, everyone)
        options = [
            self._evaluate(batch, values, slots, decode, *candidate)
            for candidate in self._candidates(batch, everyone)
        ]
        best = max([none, *options], key=_rate)
        self._remember(max(options, key=_rate, default=none))
        price = decode
        if batch.kind is not StepKind.FULL or batch.rows != batch.sampling:
            price = self._price(batch, batch.kind, batch.rows, reach.size, values.size)
        in_hand = self._select(values, slots, batch.drafted, int(batch.drafted.sum()))
        return self._verify(batch, in_hand[: price.size - 1], price, decode, best, everyone)

    def _evaluate(
        self,
        batch: StepBatch,
        values: Ints,
        slots: npt.NDArray[np.intp],
        price: Exact,
        member: npt.NDArray[np.bool_],
        count: int,
        depth: int,
    ) -> Drafting:
        """The best rate of drafting `depth` tokens for the members and verifying the best rows."""
        chosen = self._select(values, slots, member * depth, count * depth)[: price.size - 1]
        drafter_ns = self._drafter_ns(count, depth, batch.context)
        if count < np.count_nonzero(batch.may_draft):
            drafter_ns += self._model.drafter.idle_ns
        if not chosen.size:
            return Drafting(member, count, depth, drafter_ns, -1.0, 0.0)
        tokens = chosen.cumsum().astype(np.float64)
        tokens += batch.sampling * ONE
        cost = self._step(batch, price[1 : chosen.size + 1], drafter_ns)
        n = best_count(tokens, cost)
        rate = tokens.item(n) / cost.item(n)
        return Drafting(member, count, depth, drafter_ns, rate, float(chosen.item(n)))

    def _verify(
        self,
        batch: StepBatch,
        in_hand: Ints,
        price: Exact,
        decode: Exact,
        best: Drafting,
        everyone: int,
    ) -> Plan:
        """Rows to verify of the drafts in hand, each worth its tokens less its time at the rate."""
        tokens = np.zeros(in_hand.size + 1)
        tokens[1:] = in_hand.cumsum()
        cost = self._step(batch, price[: tokens.size], best.drafter_ns)
        n = int((tokens - best.rate * cost).argmax())
        n, explored = self._explore(n, tokens, cost, best.rate)
        member, depth, probe_ns = self._probe(batch, decode, best, everyone - best.count)
        step_ns = cost.item(n) + probe_ns
        self._draft_probes.earn(step_ns)
        self._verify_probes.earn(step_ns)
        if explored or probe_ns:
            reason = Reason.EXPLORE if explored else Reason.PROBE
        else:
            reason = Reason.BEST if n or best.count else Reason.NO_DRAFT
        return Plan(
            draft_rows=n,
            rows=batch.rows + n,
            draft_next=member,
            depth=depth,
            expected_tokens=batch.sampling + tokens.item(n) / ONE,
            expected_ms=step_ns / 1e6,
            reason=reason,
        )

    def _select(self, values: Ints, slots: npt.NDArray[np.intp], counts: Ints, total: int) -> Ints:
        """The ranked survivals of each request's first counts[r] draft rows, `total` in all."""
        if total == values.size:
            return values
        return values.compress(self.ranking.table(counts).take(slots))

    def _none(self, batch: StepBatch, price: Exact, everyone: int) -> Drafting:
        """Not drafting: every request emits one token a step."""
        idle = self._model.drafter.idle_ns
        rate = batch.sampling * ONE / self._step(batch, price[:1], idle).item(0)
        if not self._drafter_ns(everyone, self._depth, batch.context):
            # A drafter that costs nothing (lookup) is never worth switching off.
            return Drafting(batch.may_draft, everyone, self._depth, 0.0, rate, 0.0)
        return Drafting(np.zeros_like(batch.may_draft), 0, self._depth, idle, rate, 0.0)

    def _candidates(
        self, batch: StepBatch, everyone: int
    ) -> list[tuple[npt.NDArray[np.bool_], int, int]]:
        """Ways to draft that are worth pricing exactly this step: (members, their count, depth)."""
        if not everyone:
            return []
        candidates = [(batch.may_draft, everyone, self._depth)]
        if self._entry is not None and self.limits.drafts_subset:
            member, count = self._worth_drafting(batch, everyone, *self._entry)
            if 0 < count < everyone:
                candidates.append((member, count, self._depth))
        if len(self._depths) > 1:  # one other depth a step: all are seen within a few steps
            others = [depth for depth in self._depths if depth != self._depth]
            self._turn = (self._turn + 1) % len(others)
            candidates.append((batch.may_draft, everyone, others[self._turn]))
        return candidates

    def _worth_drafting(
        self, batch: StepBatch, everyone: int, marginal: float, rate: float
    ) -> tuple[npt.NDArray[np.bool_], int]:
        """Requests whose typical rows, above the marginal one, are worth their drafting."""
        price = self._model.drafter.prices(self._depth, batch.context)
        typical = batch.typical[:, : self._depth].astype(np.float32)
        np.maximum(typical, np.float32(marginal), out=typical)
        # Sums of a few grid values: exact in float32, so their order does not matter.
        surplus = (typical @ self._ones[: self._depth]).astype(np.int64)
        surplus -= int(marginal) * self._depth
        surplus *= batch.may_draft
        worthy = int(np.count_nonzero(surplus > rate * price.item(everyone) / everyone))
        if worthy in (0, everyone):
            return batch.may_draft, worthy
        # Up to the edge of the drafter's graph, more requests cost nothing.
        edge = int((price[: everyone + 1] == price.item(worthy)).nonzero()[0].item(-1))
        ranked = (surplus << 16) - self._indices[: surplus.size]  # ties by request index
        ranked.sort()
        member = np.zeros_like(batch.may_draft)
        member[-ranked[ranked.size - edge :] & 0xFFFF] = True
        member &= batch.may_draft
        return member, int(np.count_nonzero(member))

    def _remember(self, best: Drafting) -> None:
        if best.count:
            self._depth = best.depth
            self._entry = (best.marginal, best.rate)

    def _explore(self, n: int, tokens: Exact, cost: Exact, rate: float) -> tuple[int, bool]:
        """Now and then everything in hand is verified: what is trimmed teaches nothing."""
        everything = tokens.size - 1
        if n == everything or rate <= 0:
            return n, False
        worth = (tokens.item(everything) - tokens.item(n)) / rate
        loss = cost.item(everything) - cost.item(n) - worth
        return (everything, True) if self._verify_probes.pay(loss) else (n, False)

    def _probe(
        self, batch: StepBatch, decode: Exact, best: Drafting, idle: int
    ) -> tuple[npt.NDArray[np.bool_], int, float]:
        """Now and then drafts are deeper, or made for a few of the requests that are left out.

        Returns members, depth and the drafter's additional time in ns, 0 for no probe.
        """
        deepest = self._depths[-1]
        if best.count and best.depth < deepest:
            deeper = self._drafter_ns(best.count, deepest, batch.context) - best.drafter_ns
            if self._draft_probes.pay(deeper):
                return best.member, deepest, deeper
        subset = self.limits.drafts_subset
        if not idle or (best.count and not subset):
            return best.member, best.depth, 0.0
        count = min(self.limits.probe_requests, idle) if subset else idle
        price = self._model.drafter.prices(best.depth, batch.context)
        extra = price.item(best.count + count) - price.item(best.count)
        # Where nothing is drafted, verifying the probe is part of its price.
        rows = 0 if best.count else min(count * best.depth, decode.size - 1)
        if not self._draft_probes.pay(extra + decode.item(rows) - decode.item(0)):
            return best.member, best.depth, 0.0
        member = best.member.copy()
        left_out = np.flatnonzero(batch.may_draft & ~best.member).tolist()
        member[self._round.take(left_out, count)] = True
        return member, best.depth, extra

    def _fixed(self, batch: StepBatch, reason: Reason) -> Plan:
        """Without a price: the drafts in hand, as far as the limits go."""
        in_hand = int(np.minimum(batch.drafted, self.limits.draft_tokens).sum())
        n = min(in_hand, self._most(batch.rows, batch.sampling))
        tokens, _ = self.ranking.order(batch.survival, batch.drafted)
        expected = batch.sampling + float(tokens[:n].sum()) / ONE
        depth = self._depths[-1]
        return Plan(n, batch.rows + n, batch.may_draft, depth, expected, None, reason)

    def _most(self, rows: int, sampling: int) -> int:
        limits = self.limits
        most = self._max_rows - rows
        if limits.max_logits_rows is not None:
            most = min(most, limits.max_logits_rows - sampling)
        if limits.max_draft_rows is not None:
            most = min(most, limits.max_draft_rows)
        return max(most, 0)

    def _price(
        self, batch: StepBatch, kind: StepKind, rows: int, requests: int, count: int
    ) -> Exact:
        count = min(count, self._most(rows, batch.sampling))
        return self._model.verify(kind, rows, batch.sampling, count, requests, batch.context)

    def _step(self, batch: StepBatch, device: Exact, drafter_ns: float) -> Exact:
        return self._model.step(device, drafter_ns, batch.may_draft.size)

    def _drafter_ns(self, count: int, depth: int, context: float) -> float:
        return self._model.drafter.prices(depth, context).item(count)

    @property
    def _model(self) -> CostModel:
        assert self.cost is not None
        return self.cost


def _rate(drafting: Drafting) -> float:
    return drafting.rate
