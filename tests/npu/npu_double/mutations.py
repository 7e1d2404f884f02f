"""Faults on purpose, applied in a child process: what the double must be able to see.

`drafts_every_other_step` is no fault: it forces what a planner does now and then.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any


def accepted_counts_stay_one() -> None:
    """The recurrent state of every verification row starts from its first column."""
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridAttnMetadata

    right = MambaHybridAttnMetadata.get_extra_attn_kwargs

    def wrong(self: Any, *args: Any, **named: Any) -> Any:
        extra = right(self, *args, **named)
        if extra.get("num_accepted_tokens") is not None:
            extra["num_accepted_tokens"] = extra["num_accepted_tokens"].fill_(1)
        return extra

    MambaHybridAttnMetadata.get_extra_attn_kwargs = wrong


def host_lengths_are_optimistic() -> None:
    """Attention takes the scheduler's count, in which every draft token was accepted."""
    from vllm_ascend.worker.v2.model_runner import NPUModelRunner

    def wrong(self: Any, scheduler_output: Any, req_ids: list[str]) -> None:
        scheduled = scheduler_output.num_scheduled_tokens
        for row, request in enumerate(req_ids):
            index = self.req_states.req_id_to_index[request]
            computed = self.req_states.num_computed_tokens_np[index]
            self.req_states.num_computed_tokens_cpu[index] = computed
            self.input_buffers.seq_lens_cpu[row] = computed + scheduled[request]

    NPUModelRunner._update_seq_lens_cpu = wrong


def without_prefilling_repair() -> None:
    """Leave vllm-ascend's build_attn_metadata as it is."""
    _leave_out("build_attn_metadata")


def without_lengths_repair() -> None:
    """Leave vllm-ascend's _ascend_update_seq_lens as it is."""
    _leave_out("_ascend_update_seq_lens")


def _leave_out(name: str) -> None:
    from vllm_ascend_spec.engine import ascend_registrations

    every = ascend_registrations.repairs

    def remaining() -> Any:
        return tuple(repair for repair in every() if not repair.qualname.endswith(name))

    ascend_registrations.repairs = remaining


def stock_operator_for_every_row() -> None:
    """Route verification rows of any length to vllm-ascend's own recurrent operator."""
    from vllm_ascend_spec.engine import ascend_gdn

    ascend_gdn.stock_operator_obstacle = lambda *_, **__: None


def rows_are_what_vllm_ascend_takes_them_for() -> None:
    """Anchor-only rows, and the requests that pad a FULL graph, count as prompt chunks."""
    from vllm_ascend_spec.engine import ascend_gdn

    ascend_gdn.with_row_kinds = lambda metadata, query_start_loc: metadata


def rows_of_the_next_request() -> None:
    """Launch each request with as many rows as the next one verifies."""
    from vllm_ascend_spec.engine import ascend_runner

    right = ascend_runner.trim

    def wrong(scheduler_output: Any, lengths: dict[str, int]) -> Any:
        kept = list(lengths.values())
        turned = dict(zip(lengths, [*kept[1:], kept[0]], strict=True))
        launched = right(scheduler_output, turned).num_scheduled_tokens
        return replace(right(scheduler_output, lengths), num_scheduled_tokens=launched)

    ascend_runner.trim = wrong


def captured_attention_is_not_updated() -> None:
    """Replay the target's graphs and leave their attention waiting."""
    from vllm_ascend.worker.v2 import aclgraph_utils

    aclgraph_utils.update_full_graph_params = lambda *_, **__: None


def captured_attention_keeps_its_lengths() -> None:
    """Update each captured attention with the lengths of its first replay."""
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl

    first: dict[tuple[int, str], Any] = {}
    right = AscendAttentionBackendImpl.update_graph_params

    def wrong(
        update_stream: Any, forward_context: Any, num_tokens: int, *rest: Any, **named: Any
    ) -> None:
        for layer, metadata in forward_context.attn_metadata.items():
            if hasattr(metadata, "seq_lens_list"):
                known = first.setdefault((num_tokens, layer), list(metadata.seq_lens_list))
                metadata.seq_lens_list = known
        right(update_stream, forward_context, num_tokens, *rest, **named)

    AscendAttentionBackendImpl.update_graph_params = staticmethod(wrong)


def drafts_every_other_step() -> None:
    """Verify all draft tokens and none in turn, so that whoever accepted some has one row next."""
    from vllm_ascend_spec.engine.ascend_adaptive import LengthPlanner

    def lengths(self: Any, slots: Any, drafted: Any, *_: Any, **__: Any) -> Any:
        self._receive(leave=self.lane.age)
        self.steps_seen = getattr(self, "steps_seen", 0) + 1
        return drafted * (self.steps_seen % 2)

    LengthPlanner.lengths = lengths


def ranks_decide_apart() -> None:
    """Every rank but the first verifies one draft token less."""
    import os

    from vllm_ascend_spec.engine.ascend_adaptive import LengthPlanner

    right = LengthPlanner.lengths

    def wrong(self: Any, *args: Any, **named: Any) -> Any:
        lengths = right(self, *args, **named)
        if os.environ["RANK"] != "0" and lengths.any():
            lengths[lengths.argmax()] -= 1
        return lengths

    LengthPlanner.lengths = wrong


def sampling_is_greedy() -> None:
    """Make the best token all but certain, whatever temperature was asked for."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    right = Sampler.apply_sampling_params

    def wrong(self: Any, *args: Any, **named: Any) -> Any:
        return right(self, *args, **named) * 100.0

    Sampler.apply_sampling_params = wrong


def every_draft_token_is_accepted() -> None:
    """Emit what was drafted, without asking how likely the target finds it."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    right = RejectionSampler._verify

    def wrong(self: Any, logits: Any, draft_logits: Any, draft_sampled: Any, pos: Any,
              cu_num_logits: Any, *rest: Any) -> Any:  # fmt: skip
        processed, sampled, count = right(
            self, logits, draft_logits, draft_sampled, pos, cu_num_logits, *rest
        )
        for row, (begin, end) in enumerate(pairwise(cu_num_logits.tolist())):
            drafted = end - begin - 1
            if drafted:
                sampled[row, :drafted] = draft_sampled[begin + 1 : end]
                sampled[row, drafted] = processed[end - 1].argmax()
                count[row] = drafted + 1
        return processed, sampled, count

    RejectionSampler._verify = wrong
