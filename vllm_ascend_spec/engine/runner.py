"""Joins the plugin's budget to vLLM's Model Runner V2: what is replaced in it, and why.

initialize_kv_cache   vLLM's adaptive manager gives way to `BudgetManager`
add_requests          a request's sampling and its wish not to be trimmed are noted
observe_verification  the verdict is seen as soon as the target has sampled
init_cudagraph_manager  a drafter's first pass stays out of full graphs (`first_pass`)
propose               who is not worth a draft only has the drafter's cache kept
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_ascend_spec.budget.planner import Limits
from vllm_ascend_spec.engine import first_pass
from vllm_ascend_spec.engine.abilities import (
    bases,
    can_draft_part,
    can_skip,
    draft_lengths,
    method_of,
)
from vllm_ascend_spec.engine.patching import Replacement, in_place_of
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.options import CONFIG_KEY, Options

logger = logging.getLogger("vllm.ascend_spec.adaptive")

OPT_OUT_KEY = f"{CONFIG_KEY}_adaptive"

_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
_BLOCK_CLASSES = {
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
    "dflash2": "DFlash2Speculator",
}


# Called with (speculator, requests) after a block drafter has drafted. One target takes one
# replacement, so whoever wants to look as well looks from here.
draft_observers: list[Callable[[Any, int], None]] = []


def replacements() -> tuple[Replacement, ...]:
    """What every platform with vLLM's own runner needs."""
    return (
        Replacement(
            target=f"{_RUNNER}.initialize_kv_cache",
            reason="the runner takes no other adaptive manager than upstream's",
            make=_attach_after,
        ),
        Replacement(
            target=f"{_RUNNER}.add_requests",
            reason="the manager is not told how a request samples, nor of its extra_args",
            make=_describe_after,
        ),
        Replacement(
            target=f"{_RUNNER}.prepare_dummy_attn",
            reason="dummy rows have no recurrent states, and too many requests share them",
            make=_with_state_columns,
        ),
        Replacement(
            target=f"{_SPECULATORS}.speculator:DraftModelSpeculator.observe_verification",
            reason="the manager never learns what became of the drafts",
            make=_show_verdict,
        ),
        Replacement(
            target=f"{_SPECULATORS}.target_dependent_ar.speculator:"
            "TargetDependentARSpeculator.propose",
            reason="a round that does not pay drafts nothing",
            make=_recur_for_part,
        ),
        Replacement(
            target=f"{_SPECULATORS}.target_dependent_ar.speculator:"
            "TargetDependentARSpeculator.capture",
            reason="a shorter draft has graphs of its own (ascend_spec.draft_lengths)",
            make=_capture_lengths,
        ),
        Replacement(
            target=f"{_SPECULATORS}.dflash.speculator:DFlashSpeculator.capture",
            reason="a round that does not pay only stores the context, in graphs of its own",
            make=_capture_contexts,
        ),
        Replacement(
            target=f"{_SPECULATORS}.dflash.speculator:DFlashSpeculator.propose",
            reason="requests that will not be verified are not drafted for",
            make=_draft_for_part,
        ),
        *(
            Replacement(
                target=f"{_SPECULATORS}.{package}.speculator:{name}._generate_draft",
                reason="a round that does not pay only stores the context's keys and values",
                make=_unless_skipped,
            )
            for package, name in _BLOCK_CLASSES.items()
        ),
        *first_pass.replacements(),
    )


# -- joining ------------------------------------------------------------------------------------


def _attach_after(original: Any) -> Any:
    @in_place_of(original)
    def initialize_kv_cache(self: Any, *args: Any, **named: Any) -> Any:
        result = original(self, *args, **named)
        attach(self)
        return result

    return initialize_kv_cache


def attach(runner: Any) -> None:
    """Put the plugin's manager into an adaptive runner; leaves any other alone."""
    upstream = runner.adaptive_verification
    options = Options.from_additional_config(runner.vllm_config.additional_config)
    if upstream is None or options.planner == "vllm":
        return
    if getattr(upstream, "_copy_admitted_drafts_to_host", False):
        logger.warning(
            "Batch-sharded sampling reads every request's verified length on the host, which the "
            "plugin's planner never does: vLLM's own planner is kept"
        )
        return
    from vllm_ascend_spec.engine.adaptive import BudgetManager

    config = runner.vllm_config
    parallel = config.parallel_config
    depth = int(config.speculative_config.num_speculative_tokens)
    _check_size(runner.max_num_reqs, depth)
    limits = Limits(
        draft_tokens=depth,
        max_requests=runner.max_num_reqs,
        max_rows=runner.max_num_tokens,
        max_logits_rows=upstream._max_total_logits,
        max_draft_rows=options.max_draft_rows,
        depths=draft_lengths(options, runner.speculator, depth),
        drafts_subset=parallel.data_parallel_size == 1 and can_draft_part(runner.speculator),
        # Assumed costs are the same all day: nothing is gained by finding them out at once.
        probe_credit_ms=0.0 if runner.device.type == "cpu" else Limits.probe_credit_ms,
    )
    method = method_of(runner.speculator)
    manager = BudgetManager(
        upstream,
        method,
        limits,
        lockstep=parallel.tensor_parallel_size > 1,
        runner=runner,
        # Other data-parallel ranks replay the drafter's graph at the same time.
        may_skip=parallel.data_parallel_size == 1 and can_skip(runner.speculator),
        publishes=parallel.rank % parallel.tensor_parallel_size == 0,
        surface_file=Path(options.cost_surface) if options.cost_surface else None,
    )
    if runner.device.type == "cpu":
        from vllm_ascend_spec.engine.cpu_adaptive import assumed_surface

        manager.use_surface(assumed_surface(options.cpu, method, depth, limits.depths))
    runner.adaptive_verification = manager
    runner.speculator.ascend_spec_manager = manager
    if can_draft_part(runner.speculator) and "DFlashSpeculator" in bases(runner.speculator):
        from vllm_ascend_spec.engine.partial_drafts import ContextGraphs

        runner.speculator.ascend_spec_contexts = ContextGraphs(runner.speculator)
    logger.info(
        "Adaptive verification: method %s, K = %d, confidence from %s, ranking by %s",
        method,
        depth,
        _confidence_source(method, runner.speculator),
        "one kernel" if runner.device.type != "cpu" else "plain torch",
    )


def _confidence_source(method: str, speculator: Any) -> str:
    if method == "ngram":
        return "statistics of its matches"
    head = getattr(speculator, "use_confidence_head", False)
    return "its confidence head" if head else "an estimate over its softmax"


def _check_size(requests: int, draft_tokens: int) -> None:
    """UserError where the ranking kernel could not take a whole batch."""
    from vllm_ascend_spec.kernels.pack_rows import MAX_POSITIONS, MAX_REQUESTS

    if requests <= MAX_REQUESTS and draft_tokens <= MAX_POSITIONS:
        return
    raise UserError(
        f"Adaptive verification ranks up to {MAX_REQUESTS} requests x {MAX_POSITIONS} draft "
        f"tokens, and max_num_seqs x num_speculative_tokens is {requests} x {draft_tokens}. Lower "
        'them, or set ascend_spec.planner to "vllm".'
    )


def _describe_after(original: Any) -> Any:
    @in_place_of(original)
    def add_requests(self: Any, scheduler_output: Any) -> Any:
        result = original(self, scheduler_output)
        describe = getattr(self.adaptive_verification, "describe_request", None)
        if describe is not None:
            for new in scheduler_output.scheduled_new_reqs:
                if new.sampling_params is not None:
                    slot = self.req_states.req_id_to_index[new.req_id]
                    params = new.sampling_params
                    describe(slot, params.temperature, params.top_p, _wish(new.req_id, params))
        return result

    return add_requests


def _with_state_columns(original: Any) -> Any:
    @in_place_of(original)
    def prepare_dummy_attn(self: Any, input_batch: Any, valid_state_slots: bool = False) -> Any:
        block_tables, slot_mappings = original(self, input_batch, valid_state_slots)
        manager: Any = getattr(self, "adaptive_verification", None)
        if valid_state_slots and hasattr(manager, "describe_request"):
            from vllm_ascend_spec.engine import profiling

            profiling.spread_states(
                block_tables, self.num_speculative_steps + 1, self.kv_cache_config.num_blocks
            )
            if manager.probe is not None and manager.probe.concentrated:
                profiling.concentrate(
                    input_batch.query_start_loc, manager.probe.rows, manager.probe.requests
                )
        return block_tables, slot_mappings

    return prepare_dummy_attn


def _wish(request: str, params: Any) -> bool:
    try:
        return wants_adaptive(params)
    except UserError as error:
        # Raised here it would end the engine, and every other request with it.
        logger.error("Request %s: %s It is treated as adaptive.", request, error)
        return True


def wants_adaptive(sampling_params: Any) -> bool:
    """`extra_args={"ascend_spec_adaptive": false}` keeps a request's drafts whole.

    Over HTTP that is `"vllm_xargs": {"ascend_spec_adaptive": 0}`.

    Raises:
        UserError: a value that is neither true nor false.
    """
    given = (sampling_params.extra_args or {}).get(OPT_OUT_KEY, True)
    if given not in (True, False):  # 0 and 1 equal them
        raise UserError(
            f"SamplingParams.extra_args[{OPT_OUT_KEY!r}] must be true or false, got {given!r}."
        )
    return bool(given)


# -- the verdict, and rounds that are skipped ---------------------------------------------------


def _show_verdict(original: Any) -> Any:
    @in_place_of(original)
    def observe_verification(
        self: Any, idx_mapping: Any, num_sampled: Any, num_rejected: Any
    ) -> None:
        original(self, idx_mapping, num_sampled, num_rejected)
        manager = getattr(self, "ascend_spec_manager", None)
        if manager is not None:
            manager.observe_verdict(num_sampled)

    return observe_verification


def _chosen(speculator: Any, given: dict[str, Any]) -> tuple[Any, int | None]:
    """Batch rows that a round drafts for, int [n], and tokens each; None for all of them."""
    manager = getattr(speculator, "ascend_spec_manager", None)
    if manager is None:
        return None, None
    if given.get("dummy_run"):
        return None, None if manager.probe is None else manager.probe.length
    return manager.drafted_rows(_slots(given["input_batch"])), manager.draft_length()


def _slots(batch: Any) -> Any:
    import numpy as np

    return np.asarray(batch.idx_mapping_np[: batch.num_reqs], dtype=np.int64)


def _proposing(original: Any, draft_part: Callable[..., Any]) -> Any:
    """`propose` that asks `draft_part` where some requests, or some of the tokens, are left out."""
    names = list(inspect.signature(original).parameters)[1:]

    @in_place_of(original)
    def propose(self: Any, *args: Any, **named: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | named
        chosen, length = _chosen(self, given)
        if chosen is None and length is None:
            return original(self, **given)
        return draft_part(original, self, given, chosen, length)

    return propose


def _recur_for_part(original: Any) -> Any:
    def draft_part(
        original: Any, speculator: Any, given: dict[str, Any], chosen: Any, length: int | None
    ) -> Any:
        length = length or int(speculator.num_speculative_steps)
        if chosen is None:
            drafts = original(speculator, **given | {"num_speculative_tokens": length})
            # What lies there is of an earlier round.
            speculator.draft_token_confidence_probs[: len(drafts), length:].zero_()
            return drafts
        if chosen.size == 0:
            return original(speculator, **given | {"num_speculative_tokens": 0})
        from vllm_ascend_spec.engine.partial_recursion import draft_on

        original(speculator, **given | {"num_speculative_tokens": 1})
        return draft_on(speculator, given, chosen, length)

    return _proposing(original, draft_part)


def _draft_for_part(original: Any) -> Any:
    def draft_part(
        original: Any, speculator: Any, given: dict[str, Any], chosen: Any, length: int | None
    ) -> Any:
        assert length is None, "a block is drafted whole"
        if can_draft_part(speculator):
            from vllm_ascend_spec.engine.partial_drafts import Round, draft

            return draft(speculator, speculator.ascend_spec_contexts, Round.of(given), chosen)
        speculator.ascend_spec_skips = True
        try:  # vLLM 0.33 knows rounds without drafts
            return original(speculator, **given | {"num_speculative_tokens": 0})
        finally:
            speculator.ascend_spec_skips = False

    return _proposing(original, draft_part)


def _capture_lengths(original: Any) -> Any:
    @in_place_of(original)
    def capture(self: Any) -> None:
        manager = getattr(self, "ascend_spec_manager", None)
        if manager is not None and manager.limits.depths and self.supports_decode_metadata_update:
            from vllm_ascend_spec.engine.partial_recursion import capture_lengths

            capture_lengths(self.decode_cudagraph_manager, manager.limits.depths)
        original(self)

    return capture


def _capture_contexts(original: Any) -> Any:
    @in_place_of(original)
    def capture(self: Any) -> None:
        original(self)
        if getattr(self, "ascend_spec_manager", None) is not None and can_draft_part(self):
            self.ascend_spec_contexts.capture()

    return capture


def _unless_skipped(original: Any) -> Any:
    @in_place_of(original)
    def generate_draft(self: Any, *args: Any, **named: Any) -> None:
        if getattr(self, "ascend_spec_skips", False):
            return
        original(self, *args, **named)
        for observe in draft_observers:
            observe(self, args[0] if args else named["num_reqs"])

    return generate_draft
