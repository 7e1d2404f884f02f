"""Confidence for vLLM's n-gram speculator, which gives none: from what it matched.

The speculator copies the tokens after the longest earlier occurrence of the tail, and repeats the
last token where nothing matches. A copied token's score is `budget.confidence.match_scores`: the
length of the match at first, then how often copied tokens of this request were accepted. A
repeated token scores 0, so a request without a match verifies nothing. The score looks at the text
so far alone, and the draft is a function of it: trimming by it leaves the output's distribution.
"""

from __future__ import annotations

from typing import Any

from vllm_ascend_spec.engine.patching import Replacement, in_place_of

_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.ngram.speculator:NgramGPUSpeculator"

_declared = False


def replacements() -> tuple[Replacement, ...]:
    """What lets the adaptive runner take this speculator for one with confidences."""
    global _declared
    _declared = True
    return (
        Replacement(
            target=f"{_SPECULATOR}.__init__",
            reason="the runner asks the speculator whether it verifies adaptively",
            make=_with_confidences,
        ),
        Replacement(
            target=f"{_SPECULATOR}.propose",
            reason="the match is known here alone",
            make=_score_matches,
        ),
    )


def declared() -> bool:
    """Whether this process has asked for the replacements: without them nothing is adaptive."""
    return _declared


def _with_confidences(original: Any) -> Any:
    @in_place_of(original)
    def initialise(self: Any, vllm_config: Any, device: Any, req_states: Any) -> None:
        from vllm_ascend_spec.engine.ngram_matches import MatchStatistics, torch

        original(self, vllm_config, device, req_states)
        self.enable_adaptive_verification = bool(
            vllm_config.speculative_config.enable_adaptive_verification
        )
        if not self.enable_adaptive_verification:
            return
        shape = (self.max_num_reqs, self.num_speculative_steps)
        self.draft_token_confidence_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.ascend_spec_matches = MatchStatistics(*shape, device)

    return initialise


def _score_matches(original: Any) -> Any:
    @in_place_of(original)
    def propose(self: Any, input_batch: Any, *args: Any, **named: Any) -> Any:
        if not self.enable_adaptive_verification or named.get("dummy_run"):
            return original(self, input_batch, *args, **named)
        from vllm.utils.torch_utils import async_tensor_h2d

        from vllm_ascend_spec.engine.ngram_matches import newest_matches

        emitted = args[4]  # as in BaseSpeculator.propose: num_sampled
        manager = getattr(self, "ascend_spec_manager", None)
        if manager is not None:
            manager.observe_verdict(emitted)
        requests = input_batch.num_reqs
        slots = input_batch.idx_mapping[:requests].long()
        matches = self.ascend_spec_matches
        prefilling = input_batch.is_prefilling_np[:requests]
        if prefilling.any():
            begun = input_batch.idx_mapping_np[:requests][prefilling].astype("int64")
            matches.forget(async_tensor_h2d(begun, device=self.device))
        verified = input_batch.cu_num_logits[: requests + 1].diff() - 1
        matches.judge(slots, verified, emitted[:requests])
        drafts = original(self, input_batch, *args, **named)
        length, available = newest_matches(self, requests, slots)
        self.draft_token_confidence_probs[:requests] = matches.scores(slots, length, available)
        return drafts

    return propose
