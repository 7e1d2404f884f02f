"""Adaptive verification with the plugin's planner, in the place of vLLM's manager.

vLLM's step is kept: the host fixes the total, the device decides which rows those are. Taken from
the planner: the total, priced over (rows, requests, context, step kind) with the LM head; whether
to draft at all; a calibration that learns while serving. Taken from the plugin's kernels: the
ranking, on an integer grid, in one launch. And nothing on the step's way waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as upstream_module
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from vllm_ascend_spec.budget.confidence import cold_start
from vllm_ascend_spec.budget.controller import BudgetController
from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.budget.planner import Limits, Plan
from vllm_ascend_spec.budget.surface import StepKind, Surface
from vllm_ascend_spec.budget.survival import Ints
from vllm_ascend_spec.engine import profiling
from vllm_ascend_spec.engine.arrivals import ArrivalRing, InFlight
from vllm_ascend_spec.engine.calibrations import CalibrationStore
from vllm_ascend_spec.engine.chances import DeviceTables
from vllm_ascend_spec.engine.ledger import Arrival, Bools, DraftLedger
from vllm_ascend_spec.engine.metrics import BudgetMetrics
from vllm_ascend_spec.engine.planned import Planned, account
from vllm_ascend_spec.engine.step_clock import StepClock
from vllm_ascend_spec.kernels import ops
from vllm_ascend_spec.kernels.pack_rows import Batch, PackedRows
from vllm_ascend_spec.kernels.record_round import Verdict

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

logger = logging.getLogger("vllm.ascend_spec.adaptive")

_RETURNS_ADMITTED_COUNTS = hasattr(upstream_module, "AdmittedDraftCounts")  # vLLM 0.33


class BudgetManager(AdaptiveVerificationManager):
    """vLLM's manager with another budget; one a runner. See the module's text."""

    def __init__(
        self,
        upstream: AdaptiveVerificationManager,
        method: str,
        limits: Limits,
        *,
        lockstep: bool,
        may_skip: bool,
        runner: Any,
        publishes: bool = True,
        surface_file: Path | None = None,
    ) -> None:
        """Takes the place of `upstream`, whose checks of the model have passed.

        lockstep: several ranks must decide alike, so no rank may know more than another.
        may_skip: a round that does not pay need not draft. runner: vLLM's, for measuring costs.
        publishes: this rank keeps the metrics. surface_file: costs measured before, instead.
        """
        states = upstream.req_states
        super().__init__(
            states,
            upstream.query_start_loc,
            upstream.num_bonus_tokens,
            upstream._max_total_logits,
        )
        depth, device = self.num_speculative_steps, states.device
        self.limits, self.may_skip, self._runner = limits, may_skip, runner
        self._surface_file = surface_file
        acceptance = cold_start(method, depth)
        self._store = None if runner is None else CalibrationStore.of(runner, method, publishes)
        learnt = None if self._store is None else self._store.start()
        self.controller = BudgetController(limits, None, acceptance, learnt)
        if self._store is not None:
            self._store.follow(self.controller.calibration)
        self.ledger = DraftLedger(self.controller, states.max_num_reqs, depth)
        self.ring = ArrivalRing(states.max_num_reqs, depth, device, lockstep)
        self.clock = StepClock(enabled=device.type == "cuda" and not lockstep)
        self.metrics: BudgetMetrics | None = BudgetMetrics() if publishes else None
        self.surface: Surface | None = None
        self.last_plan: Plan | None = None
        self._planned: Planned | None = None
        self._rounds = np.zeros(states.max_num_reqs, dtype=np.int64)
        self._in_hand = np.full(states.max_num_reqs, depth)
        self._opted_out = np.zeros(states.max_num_reqs, dtype=np.bool_)
        self._samples = np.zeros(states.max_num_reqs, dtype=np.bool_)
        self._ladder: list[int] = []
        self._probes: list[profiling.Probe] = []
        self.probe: profiling.Probe | None = None  # the dummy step that is being timed
        self._tables = DeviceTables(states.max_num_reqs, device)
        self._layout = torch.zeros(2 * states.max_num_reqs, dtype=torch.int32, device=device)
        self._laid_out: list[int] = []
        self._sampled: torch.Tensor | None = None
        self._verified: torch.Tensor | None = None
        self._packed = PackedRows(
            torch.zeros(states.max_num_reqs, dtype=torch.int32, device=device),
            self.query_start_loc,
            self._cu_num_logits,
        )

    def use_surface(self, surface: Surface) -> None:
        """Plan with these step costs from now on."""
        self.surface = surface
        cost = CostModel(surface, self.limits.max_requests, self.limits.max_rows)
        self.controller.cost = cost
        self.controller.planner = type(self.controller.planner)(self.limits, cost)

    # -- requests ---------------------------------------------------------------------------

    def add_request(self, req_idx: int) -> None:
        """A new request takes the slot."""
        self._confidence_probs[req_idx].fill_(1.0)
        self.ledger.begin(req_idx)
        self._in_hand[req_idx] = self.num_speculative_steps
        self._opted_out[req_idx] = False
        self._tables.describe(req_idx, 0, False)

    def describe_request(
        self, req_idx: int, temperature: float, top_p: float, adaptive: bool
    ) -> None:
        """How the request that just took the slot samples, and whether it may be trimmed."""
        self.controller.begin(req_idx, temperature, top_p)
        self._opted_out[req_idx] = not adaptive
        self._samples[req_idx] = temperature > 0
        kind = int(self.controller.memory.classes(np.array([req_idx]))[0])
        self._tables.describe(req_idx, kind, not adaptive)

    # -- step costs -------------------------------------------------------------------------

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, Any]]:
        """Arguments of the dummy runs that measure the cost surface; one sample each."""
        depth, states = self.num_speculative_steps, self.req_states
        self._ladder = list(capture_sizes)
        if self._surface_file is not None:
            return
        self._probes = list(
            profiling.probes(
                self._ladder,
                depth,
                states.max_num_reqs,
                states.max_num_batched_tokens,
                states.max_model_len,
                self.limits.depths[:-1],
            )
        )
        steps = getattr(self._runner.model_state, "ascend_spec_steps", None)
        if steps is not None:  # between two flushes, as in the middle of an answer
            steps.pretend(profiling.PENDING_ROWS)
        for probe in self._probes:
            self.probe = probe
            yield probe.arguments(depth)
        self.probe = None
        if steps is not None:
            steps.pretend(0)

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """Build the surface from those samples; the first rank's clock decides for all."""
        surface = None
        if get_tp_group().is_first_rank:
            surface = (
                profiling.measured_surface(self._runner, self._ladder, self._probes, samples)
                if self._surface_file is None
                else profiling.load_surface(self._runner, self._ladder, self._surface_file)
            )
        self.use_surface(get_tp_group().broadcast_object(surface, src=0))

    # -- a step, in the order in which the runner calls -----------------------------------------

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Rows of the step: the planner's total. Reads what has landed; waits for nothing."""
        req_ids = list(num_tokens_per_req)
        slots = self._slots(req_ids)
        self._read_arrivals(self._must_not_know(slots))
        scheduled = np.array([len(draft_tokens.get(r, ())) for r in req_ids], dtype=np.int64)
        base = np.fromiter(num_tokens_per_req.values(), np.int64, len(req_ids)) - scheduled
        # Of a round that was skipped or short, what is missing are placeholders.
        in_hand = np.minimum(scheduled, self._in_hand[slots])
        base_rows = int(base.sum())
        planned = self._plan(req_ids, slots, in_hand, base, base_rows)
        self._planned, self.last_plan = planned, planned.plan
        # Read by upstream's `compact_batch`, which asks for the total alone.
        unread: dict[str, int] = {}
        self._batch_budget = (unread, unread, planned.budget)
        return base_rows + planned.budget

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """Which rows those are, on the device, from the confidences of these very drafts.

        Logits offsets int32 [R + 1], query start locations, draft rows; since vLLM 0.33 also the
        admitted counts on the host, which only batch-sharded sampling asks for (see `attach`).
        """
        planned = self._planned
        assert planned is not None
        requests = len(req_ids)
        budget = planned.budget
        rows = [planned.base[r] for r in req_ids] + [planned.drafts[r] for r in req_ids]
        layout = self._layout[: 2 * requests]
        if rows != self._laid_out:  # while the same requests decode, the device has them already
            async_tensor_h2d(np.array(rows, np.int32), out=layout)
            self._laid_out = rows
        batch = Batch(layout[:requests], layout[requests:], score_rows=idx_mapping.to(torch.int32))
        ops.pack_rows(
            self._confidence_probs, budget, batch, self._packed, bonus_tokens=self.num_bonus_tokens
        )
        self._verified = self._packed.draft_lengths[:requests]
        self.clock.start()
        answer = (self._cu_num_logits[: requests + 1], self.query_start_loc, budget)
        return (*answer, None) if _RETURNS_ADMITTED_COUNTS else answer

    def observe_verdict(self, num_sampled: torch.Tensor) -> None:
        """The target is done: int32 [R] tokens emitted, on the device."""
        self._sampled = num_sampled
        self.clock.target_done()

    def drafted_rows(self, slots: Ints) -> Ints | None:
        """Batch rows to draft for after this step, given by their slots; None for all of them."""
        chosen = self._drafted(slots, self._planned)
        return None if chosen.all() else np.flatnonzero(chosen)

    def draft_length(self) -> int | None:
        """Tokens to draft after this step; None for all K."""
        planned = self._planned
        if planned is None or planned.length == self.num_speculative_steps:
            return None
        return planned.length

    def _drafted(self, slots: Ints, planned: Planned | None) -> Bools:
        if not self.may_skip or planned is None:
            return np.ones(len(slots), dtype=np.bool_)
        return planned.draft_next[slots]

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: InputBatch) -> None:
        """The step is over: keep its confidences for the ranking, start their way to the host."""
        requests = input_batch.num_reqs
        planned, self._planned = self._planned, None
        verified, self._verified = self._verified, None
        sampled, self._sampled = self._sampled, None
        slots = np.asarray(input_batch.idx_mapping_np[:requests], dtype=np.int64)
        drafted = self._drafted(slots, planned)
        length = self.num_speculative_steps if planned is None else planned.length
        self._in_hand[slots] = drafted * length
        judges = self._rounds[slots]
        makes = self._rounds[slots] = judges + 1
        figures = None if sampled is None else self.ring.stage()
        # A request that opted out ranks before all others: the rows added for it are its own.
        ops.record_round(
            confidence_probs[:requests],
            input_batch.idx_mapping,
            self._tables.follow(self.controller.calibration),
            self._confidence_probs,
            figures,
            None if sampled is None else Verdict(verified, sampled[:requests]),
        )
        ticks = self.clock.finish(alike=planned is not None and planned.kind is StepKind.FULL)
        if figures is None:
            return
        self.ring.send(
            InFlight(
                slots=slots,
                tenants=self.ledger.tenants(slots),
                judges=judges,
                makes=makes,
                drafted=drafted,
                length=length,
                context=(planned, ticks, int(np.count_nonzero(drafted))),
            )
        )

    # -- the planner ------------------------------------------------------------------------

    def _plan(
        self, req_ids: list[str], slots: Ints, in_hand: Ints, base: Ints, base_rows: int
    ) -> Planned:
        computed = self.req_states.num_computed_tokens_np[slots]
        samples = computed + base >= self.req_states.prefill_len.np[slots]
        sampling = int(np.count_nonzero(samples))
        context = int(computed.sum()) / len(req_ids)
        # No request has less than one row.
        decoding = sampling == len(req_ids) == base_rows
        kind = StepKind.FULL if decoding else StepKind.MIXED
        plan = self.controller.plan(slots, in_hand, samples, base_rows, sampling, context, kind)
        # Rejection sampling takes the logits of a trimmed batch in one piece.
        room = self._max_total_logits - len(req_ids) * self.num_bonus_tokens
        opted_out = self._opted_out[slots]
        whole = int(in_hand @ (opted_out | self.controller.memory.unknown[slots]))
        draft_next = np.zeros(self.req_states.max_num_reqs, dtype=np.bool_)
        # A request that opted out is drafted for whatever the plan says.
        draft_next[slots] = plan.draft_next | opted_out
        if not self.limits.drafts_subset and (draft_next.any() or not sampling):
            draft_next[slots] = True
        return Planned(
            plan=plan,
            budget=min(max(plan.draft_rows, whole), int(in_hand.sum()), max(room, 0)),
            kind=kind,
            requests=len(req_ids),
            sampling=sampling,
            context=context,
            drafts=dict(zip(req_ids, in_hand.tolist(), strict=True)),
            base=dict(zip(req_ids, base.tolist(), strict=True)),
            draft_next=draft_next,
            # A request that opted out has whole drafts, and one length is for all.
            length=self.num_speculative_steps if opted_out.any() else plan.depth,
        )

    def _slots(self, req_ids: list[str]) -> Ints:
        index = self.req_states.req_id_to_index
        return np.array([index[req_id] for req_id in req_ids], dtype=np.int64)

    def _must_not_know(self, slots: Ints) -> int:
        """How many of the newest rounds the plan must not look at.

        Where draft tokens are drawn, whether one is verified must not depend on which token it is,
        or what comes out is no longer distributed as the target's. The confidences of the tokens
        after it depend on it, and through the total so would every row.
        """
        speculator = getattr(self._runner, "speculator", None)
        drawn = getattr(speculator, "draft_logits", None) is not None
        return int(drawn and bool(self._samples[slots].any()))

    def _read_arrivals(self, unread: int) -> None:
        depth = self.num_speculative_steps
        for landed in self.ring.landed(unread):
            figures = landed.figures
            verified, sampled = figures[:, depth:].astype(np.int64).T
            emitted = self.ledger.learn(
                Arrival(
                    slots=landed.step.slots,
                    tenants=landed.step.tenants,
                    judges=landed.step.judges,
                    makes=landed.step.makes,
                    sampled=sampled,
                    verified=verified,
                    confidence=figures[:, :depth],
                    drafted=landed.step.drafted,
                    length=landed.step.length,
                )
            )
            planned, ticks, drafted = landed.step.context
            if planned is not None:
                account(self.controller, planned, ticks, emitted, drafted)
        if self.metrics is not None:
            self.metrics.step(self.controller, self.last_plan)
        if self._store is not None:
            self._store.step(self.controller.calibration)
