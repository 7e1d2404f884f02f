"""Faults of sampled verification, put in on purpose: the chi-square test must see them."""

from __future__ import annotations

from typing import Any

from vllm_ascend_spec.engine.patching import on_import

_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
_RUNNER = "vllm.v1.worker.gpu.model_runner"


def bonus_from_the_row_before() -> None:
    """Sample the token after a wholly accepted draft from the logits of the row before."""

    def wrap(module: Any) -> None:
        right = module.rejection_sample

        def wrong(
            logits: Any, drafts: Any, sampled: Any, cu_num_logits: Any, *rest: Any, **more: Any
        ):
            starts, ends = cu_num_logits[:-1].long(), cu_num_logits[1:].long() - 1
            shifted = logits.clone()
            shifted[ends] = logits[(ends - 1).maximum(starts)]
            return right(shifted, drafts, sampled, cu_num_logits, *rest, **more)

        module.rejection_sample = wrong

    on_import(_SAMPLER, wrap)


def trimmed_as_rejected() -> None:
    """Leave the trimmed draft token out of what the token in its place is sampled from."""
    runners: list[Any] = []

    def remember(module: Any) -> None:
        sample = module.GPUModelRunner.sample

        def remembered(self: Any, *args: Any) -> Any:
            runners[:] = [self]
            return sample(self, *args)

        module.GPUModelRunner.sample = remembered

    def wrap(module: Any) -> None:
        right = module.rejection_sample

        def wrong(
            logits: Any, drafts: Any, sampled: Any, cu_num_logits: Any, pos: Any, slots: Any,
            *rest: Any, **more: Any,
        ) -> Any:  # fmt: skip
            proposed = runners[0].req_states.draft_tokens[slots.long()]
            verified = cu_num_logits.diff().long() - 1
            trimmed = (verified < proposed.shape[1]).nonzero()[:, 0]
            changed = logits.clone()
            lost = proposed[trimmed, verified[trimmed]].clamp(min=0)
            changed[cu_num_logits[1:].long()[trimmed] - 1, lost] = float("-inf")
            return right(changed, drafts, sampled, cu_num_logits, pos, slots, *rest, **more)

        module.rejection_sample = wrong

    on_import(_RUNNER, remember)
    on_import(_SAMPLER, wrap)


def nan_confidences() -> None:
    """Every third request's drafts come with a confidence that is no number."""

    def wrap(module: Any) -> None:
        record = module.BudgetManager.record_confidences

        def spoilt(self: Any, confidence: Any, batch: Any) -> None:
            changed = confidence.clone()
            changed[: batch.num_reqs][batch.idx_mapping[: batch.num_reqs] % 3 == 0] = float("nan")
            record(self, changed, batch)

        module.BudgetManager.record_confidences = spoilt

    on_import("vllm_ascend_spec.engine.adaptive", wrap)


def small_logits_chunks() -> None:
    """At most 100 rows of logits at once, where a step of 64 requests may have 320."""

    def wrap(module: Any) -> None:
        module.get_max_chunk_logits = lambda vocab_size: 100

    on_import(_RUNNER, wrap)
    on_import(_SAMPLER, wrap)
