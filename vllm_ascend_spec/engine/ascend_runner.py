"""vllm-ascend's Model Runner V2 with adaptive verification; importing this imports neither.

The runner's own steps stay as they are: what it is handed is trimmed, and what its drafter made of
it is copied to the host beside the copies that it makes anyway.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_ascend_spec.budget import surface as surfaces
from vllm_ascend_spec.budget.cost import CostModel
from vllm_ascend_spec.engine import ascend_confidence, ascend_lanes
from vllm_ascend_spec.engine.ascend_adaptive import DraftRound, LengthPlanner, slots_of, trim
from vllm_ascend_spec.engine.ascend_graphs import batch_of, in_prompt
from vllm_ascend_spec.engine.metrics import BudgetMetrics
from vllm_ascend_spec.engine.runner import wants_adaptive
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.graphs import acl
from vllm_ascend_spec.graphs.dispatcher import Batch
from vllm_ascend_spec.graphs.keys import GraphKey, GraphStore, Kind, Role
from vllm_ascend_spec.options import Options

logger = logging.getLogger("vllm.ascend_spec.adaptive")


def _npu() -> Any:
    """`torch.npu`, which torch itself does not declare."""
    import torch_npu

    return torch_npu.npu


def extend(upstream: Any) -> Any:
    """A runner class derived from vllm-ascend's `NPUModelRunner`."""

    class AscendSpecModelRunner(upstream):
        """vllm-ascend's runner; `length_planner` is None where every draft token is verified."""

        length_planner: LengthPlanner | None = None
        _launched: Any = None

        def initialize_kv_cache(self, kv_cache_config: Any) -> None:
            """As upstream; from here on the speculator is there to be observed."""
            super().initialize_kv_cache(kv_cache_config)
            options = Options.from_additional_config(self.vllm_config.additional_config)
            if options.adaptive:
                self.length_planner = _planner(self, options)
                self._copies = ConfidenceCopies(self)

        def add_requests(self, scheduler_output: Any) -> None:
            """As upstream; the planner forgets who had the request states before."""
            super().add_requests(scheduler_output)
            if self.length_planner is None:
                return
            for request in scheduler_output.scheduled_new_reqs:
                slot = self.req_states.req_id_to_index[request.req_id]
                sampling = request.sampling_params
                whole = _keeps_drafts_whole(request.req_id, sampling)
                self.length_planner.begin(slot, sampling.temperature, sampling.top_p, whole)

        def execute_model(self, scheduler_output: Any, *args: Any, **named: Any) -> Any:
            """As upstream, on the draft tokens that are worth verifying."""
            if self.length_planner is None or named.get("dummy_run"):
                return super().execute_model(scheduler_output, *args, **named)
            self._launched = _trimmed(self, self.length_planner, scheduler_output)
            try:
                return super().execute_model(self._launched, *args, **named)
            finally:
                self._launched = None

        @property
        def launched_batch(self) -> Batch | None:
            """The step that is being launched; None in a dummy run, which has no requests."""
            return None if self._launched is None else batch_of(self._launched, self)

        def _pad_query_start_loc_for_fia(
            self, rows: int, requests: int, real: int, starts: Any, *args: Any, **named: Any
        ) -> Any:
            """As upstream; in a graph for rows of any length, padding requests share the rest."""
            graphs = described(self)
            if not graphs or (graph := _verify_graph(rows, requests)) not in graphs:
                return super()._pad_query_start_loc_for_fia(
                    rows, requests, real, starts, *args, **named
                )
            starts[: requests + 1] = acl.padded_starts(starts[: real + 1].tolist(), graph)
            return starts, requests

        def postprocess_sampled(
            self, idx_mapping: Any, sampled: Any, num_sampled: Any, *rest: Any, **named: Any
        ) -> None:
            """As upstream; notes how many tokens each request of the step got."""
            super().postprocess_sampled(idx_mapping, sampled, num_sampled, *rest, **named)
            self._num_sampled = num_sampled

        def sample_tokens(self, grammar_output: Any) -> Any:
            """As upstream, drafting included; then the confidences go to the host."""
            state = self.execute_model_state
            output = super().sample_tokens(grammar_output)
            if self.length_planner is not None and state is not None:
                slots = state.input_batch.idx_mapping_np.astype(np.int64)
                verified = self.length_planner.verified(slots)
                self.length_planner.sent(self._copies.start(slots, verified, self._num_sampled))
            return output

    AscendSpecModelRunner.__module__ = __name__
    AscendSpecModelRunner.__qualname__ = "AscendSpecModelRunner"
    return AscendSpecModelRunner


class ConfidenceCopies:
    """Copies to the host on a stream of their own, each round into memory of its own."""

    def __init__(self, runner: Any) -> None:
        self._device = runner.device
        self._store = ascend_confidence.ConfidenceStore(
            runner.max_num_reqs, runner.num_speculative_steps, runner.device
        )
        self.stream = _npu().Stream()
        ascend_confidence.attach(runner.speculator, self._store)

    def start(self, slots: Any, verified: Any, num_sampled: torch.Tensor) -> DraftRound:
        """Begin copying this round's confidences and the step's sampled counts."""
        main = _npu().current_stream()
        # The drafter writes the next round into the same memory, so this one is taken aside first.
        confidence, sampled = self._store.values.clone(), num_sampled.clone()
        with _npu().stream(self.stream):
            self.stream.wait_stream(main)
            host = tuple(
                torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
                for x in (confidence, sampled)
            )
            arrived = _npu().Event()
            arrived.record(self.stream)
        # Freed memory could be handed out again before the copy has read it.
        return DraftRound(slots, verified, host[1], host[0], arrived, keep=(confidence, sampled))


def _keeps_drafts_whole(request: str, sampling: Any) -> bool:
    try:
        return not wants_adaptive(sampling)
    except UserError as error:
        # Raised here it would end the engine, and every other request with it.
        logger.error("Request %s: %s It is treated as adaptive.", request, error)
        return False


def _trimmed(runner: Any, planner: LengthPlanner, scheduler_output: Any) -> Any:
    drafts = scheduler_output.scheduled_spec_decode_tokens
    requests = [request for request, tokens in drafts.items() if tokens]
    slots = slots_of(requests, runner)
    drafted = np.array([len(drafts[request]) for request in requests], dtype=np.int64)
    # A grammar's bit mask has a row for each draft token that the scheduler handed out.
    if not requests or scheduler_output.has_structured_output_requests:
        planner.launched(slots, drafted)
        return scheduler_output
    rows = scheduler_output.total_num_scheduled_tokens - int(drafted.sum())
    context = float(runner.req_states.num_computed_tokens_np[slots].mean())
    prompts = any(in_prompt(request, runner) for request in scheduler_output.num_scheduled_tokens)
    kept = planner.lengths(slots, drafted, rows, context, prompts)
    planner.launched(slots, kept)
    return trim(scheduler_output, dict(zip(requests, kept.tolist(), strict=True)))


def require_one_replica(ranks: int) -> None:
    """Refuse replicas that meet in a collective every step, as those of experts do.

    Raises:
        UserError: there are several; each would replay a graph of its own size.
    """
    if ranks > 1:
        raise UserError(
            f"ascend_spec.adaptive is true with --data-parallel-size {ranks} on a model of "
            "experts: the replicas must launch equal sizes, and each plans its own. Set it to 1, "
            "or adaptive to false."
        )


def _planner(runner: Any, options: Options) -> LengthPlanner:
    require_one_replica(runner.dp_size)
    config = runner.vllm_config
    parallel = config.parallel_config
    max_rows = config.scheduler_config.max_num_batched_tokens
    graphs = ascend_lanes.asks_for_graphs(config)
    lane = ascend_lanes.choose(ascend_lanes.probe(), graphs).lane
    cost = None
    if options.cost_surface is None:
        logger.warning(
            "Adaptive verification has no cost surface: every draft token is verified. Measure one "
            "and set ascend_spec.cost_surface"
        )
    else:
        key = surface_key(config, graph_rows(runner))
        surface = ascend_lanes.priced(surfaces.load(Path(options.cost_surface), key), lane)
        cost = CostModel(surface, runner.max_num_reqs, max_rows)
    return LengthPlanner(
        method=config.speculative_config.method,
        draft_tokens=runner.num_speculative_steps,
        max_requests=runner.max_num_reqs,
        max_rows=max_rows,
        lane=lane,
        cost=cost,
        max_draft_rows=options.max_draft_rows,
        ladder=graph_rows(runner),
        metrics=BudgetMetrics() if parallel.rank % parallel.tensor_parallel_size == 0 else None,
    )


def _verify_graph(rows: int, requests: int) -> GraphKey:
    return GraphKey(Role.TARGET, Kind.VERIFY, rows, requests)


def described(runner: Any) -> GraphStore[Any]:
    """The target's FULL graphs for rows of any length; none without such graphs."""
    found: GraphStore[Any] = getattr(runner.cudagraph_manager, "described", GraphStore())
    return found


def graph_rows(runner: Any) -> tuple[int, ...]:
    """Rows of the target's FULL graphs, ascending; capture sizes of other counts are rounded."""
    return tuple(sorted({graph.rows for graph in described(runner)}))


def surface_key(config: Any, ladder: tuple[int, ...]) -> surfaces.SurfaceKey:
    """What a cost surface must have been measured on to be used by this engine."""
    from importlib.metadata import version

    return surfaces.SurfaceKey(
        model=Path(config.model_config.model).name,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        device=_npu().get_device_name(),
        engine=f"vllm-ascend {version('vllm-ascend')}",
        method=config.speculative_config.method,
        draft_tokens=config.speculative_config.num_speculative_tokens,
        ranks=config.parallel_config.world_size,
        full_ladder=ladder,
        mixed_ladder=(),
        drafter_ladder=(),
    )
