"""Faults on purpose, applied in a child process: what the engine tests must be able to see."""

from __future__ import annotations

from typing import Any


def zero_draft_rows_as_plain_decode() -> None:
    """Take a row whose drafts were all trimmed for plain decode, which reads column 0.

    The fault of public reports (vllm#39273): the state of such a row lies in the column of the
    last accepted token, and the convolution's history at the same offset.
    """
    from vllm_ascend_spec.engine import cpu_gdn

    right = cpu_gdn._verify_rows

    def wrong(layer: Any, inputs: Any, chosen: Any, metadata: Any) -> Any:
        rows = metadata.spec_query_start_loc.diff()[: metadata.num_spec_decodes]
        accepted = metadata.num_accepted_tokens
        metadata.num_accepted_tokens = accepted.clone()
        metadata.num_accepted_tokens[: len(rows)][rows == 1] = 1
        try:
            return right(layer, inputs, chosen, metadata)
        finally:
            metadata.num_accepted_tokens = accepted

    cpu_gdn._verify_rows = wrong


def upstream_gdn_operators() -> None:
    """Leave vLLM's own CPU operators for GDN in place."""
    from vllm_ascend_spec.engine import cpu_registrations

    cpu_registrations._register_gdn_layer = lambda layers: None


def replay_never_advances() -> None:
    """Accepted rows never become pending: every step starts from the prompt's state."""
    from vllm_ascend_spec.engine.replay_steps import ReplaySteps

    ReplaySteps.advance = lambda self, requests, accepted: None


def replay_keeps_rejected_rows() -> None:
    """Every row of a step becomes pending, accepted or not."""
    from vllm_ascend_spec.engine.replay_steps import ReplaySteps

    right = ReplaySteps.advance
    ReplaySteps.advance = lambda self, requests, accepted: right(self, requests, accepted + 99)


def partial_drafts_at_the_wrong_rows() -> None:
    """The drafts of a round for a part of the batch change places among its requests."""
    from vllm_ascend_spec.engine import runner

    def faulty(right: Any) -> Any:
        def make(original: Any) -> Any:
            propose = right(original)

            def wrong(self: Any, *args: Any, **named: Any) -> Any:
                partial = []
                chosen = runner._chosen
                runner._chosen = lambda *asked: partial.append(chosen(*asked)) or partial[-1]
                try:
                    drafts = propose(self, *args, **named)
                finally:
                    runner._chosen = chosen
                # -1 marks drafts that nobody made.
                rows, _ = partial[-1]
                return drafts if rows is None else drafts.flip(0).clamp(min=0)

            wrong.__module__, wrong.__qualname__ = original.__module__, original.__qualname__
            return wrong

        return make

    runner._draft_for_part = faulty(runner._draft_for_part)
    runner._recur_for_part = faulty(runner._recur_for_part)


def short_drafts_taken_for_whole() -> None:
    """What a short round leaves of an earlier one is verified as if it had been drafted."""
    from vllm_ascend_spec.engine import runner

    attach = runner.attach

    def attached(given: Any) -> None:
        attach(given)
        manager = given.adaptive_verification
        right = manager.record_confidences

        def wrong(confidence: Any, batch: Any) -> None:
            right(confidence, batch)
            manager._in_hand[manager._in_hand > 0] = manager.num_speculative_steps

        manager.record_confidences = wrong

    runner.attach = attached


def replay_never_settles() -> None:
    """A block that a verified step fills keeps the state that its page happens to hold."""
    from vllm_ascend_spec.engine.replay_align import AlignedPages

    AlignedPages.settle = lambda self, *where: None


def replay_settles_too_many_rows() -> None:
    """Rows beyond the block's end are folded into its page, too."""
    from vllm_ascend_spec.kernels import ops

    from vllm_ascend_spec.engine.replay_align import AlignedPages

    def settle(self: Any, requests: Any, accepted: Any, computed: Any, running: Any) -> None:
        pending, plan = self._cursor.pending.clone(), self._plan
        ops.plan_settles(
            self._cursor, requests, accepted, computed, running, self._block_tokens, plan
        )
        plan.entries[4] = pending[plan.entries[0].long()]
        ops.fold_pages(plan, self._pool)

    AlignedPages.settle = settle


def replay_never_moves() -> None:
    """A request's state stays in the page of the block that it has left."""
    from vllm_ascend_spec.engine.replay_align import AlignedPages

    AlignedPages.move = lambda self, *where: None
