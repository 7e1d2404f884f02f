"""Adaptive verification on the CPU engine: upstream's manager, costs from an option.

A CPU has no graph replays to time, and the time of an interpreted step says nothing about a
device. The cost curves are therefore an assumption that the user can change
(`ascend_spec.cpu.verify_cost_ms`), and the log says so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm_ascend_spec.budget.surface import (
    DrafterPoint,
    StepKind,
    Surface,
    SurfaceKey,
    TargetPoint,
)
from vllm_ascend_spec.options import CpuOptions, Options

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

logger = logging.getLogger("vllm.ascend_spec.adaptive")


def create_manager(
    *,
    enable_adaptive_verification: bool,
    attn_groups: Any,
    req_states: Any,
    query_start_loc: Any,
    num_bonus_tokens: int,
    max_total_logits: int,
    vllm_config: Any,
    target_layer_names: set[str] | None = None,
    additional_attn_cg_support: Any = None,
) -> AdaptiveVerificationManager | None:
    """The manager of an adaptive engine, or None; arguments as upstream's factory takes them.

    Raises:
        UserError: an attention backend plans its work from the host's query lengths, which
            adaptive verification changes on the device.
    """
    if not enable_adaptive_verification:
        return None
    from vllm.v1.worker.gpu.attn_utils import get_query_lens_mismatch_unsupported_backend
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as upstream

    backend = get_query_lens_mismatch_unsupported_backend(
        attn_groups, checked_layer_names=target_layer_names
    )
    if backend is not None:
        from vllm_ascend_spec.errors import UserError

        raise UserError(
            f"Adaptive verification changes query lengths on the device, and the {backend} backend "
            "plans from the host's. Choose another attention backend, or set "
            "enable_adaptive_verification to false in --speculative-config."
        )
    manager = upstream.AdaptiveVerificationManager(
        req_states, query_start_loc, num_bonus_tokens, max_total_logits=max_total_logits
    )
    cpu = Options.from_additional_config(vllm_config.additional_config).cpu
    manager.cost_tables = upstream.build_cost_tables_from_curves(
        cpu.draft_cost_ms,
        cpu.verify_cost_ms,
        req_states.max_num_reqs,
        req_states.max_num_batched_tokens,
    )
    logger.warning(
        "Adaptive verification on a CPU plans with assumed step costs, not measured ones: verify "
        "%s ms, draft %s ms (ascend_spec.cpu.verify_cost_ms, draft_cost_ms)",
        cpu.verify_cost_ms,
        cpu.draft_cost_ms,
    )
    return manager


def assumed_surface(
    cpu: CpuOptions, method: str, draft_tokens: int, lengths: tuple[int, ...] = ()
) -> Surface:
    """The options' cost curves as a surface: mixed steps cost what full ones cost.

    lengths: draft lengths at which the drafter may be run; a shorter draft costs its share.
    """
    ladder = tuple(rows for rows, _ in cpu.verify_cost_ms)
    widest, dearest = cpu.verify_cost_ms[-1]
    before, cheaper = cpu.verify_cost_ms[-2]
    slope = (dearest - cheaper) / (widest - before)
    points = [
        TargetPoint(kind=kind, rows=rows, requests=1, context=1, ms=ms)
        for kind in (StepKind.FULL, StepKind.MIXED)
        for rows, ms in cpu.verify_cost_ms
    ]
    points += [
        TargetPoint(kind=StepKind.EAGER, rows=rows, requests=1, context=1, ms=ms)
        for rows, ms in (
            (widest, dearest),
            (2 * widest, max(dearest + slope * widest, dearest)),
        )
    ]
    return Surface(
        key=SurfaceKey(
            model="assumed",
            dtype="any",
            device="cpu",
            engine="assumed",
            method=method,
            draft_tokens=draft_tokens,
            full_ladder=ladder,
            mixed_ladder=ladder,
            drafter_ladder=(),
        ),
        target=tuple(points),
        drafter=tuple(
            DrafterPoint(requests=requests, depth=length, context=1, ms=ms * length / draft_tokens)
            for requests, ms in cpu.draft_cost_ms
            for length in lengths or (draft_tokens,)
        ),
    )
