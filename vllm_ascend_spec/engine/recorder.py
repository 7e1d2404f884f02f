"""What speculation did, per request and step, seen from inside the model runner.

vLLM's own counters take a draft token that adaptive verification trimmed for a rejected one and
leave out steps without a draft, so acceptance rates and acceptance lengths derived from them are
wrong. The recorder reads the runner's own tensors right after verification: draft tokens
scheduled, draft tokens verified (what is left after trimming), draft tokens accepted, tokens
emitted, and the drafter's confidence in each draft token. It writes to no tensor of the runner.

Call `install()` before the engine is built. Steps are kept as tensors and read in blocks of
`DRAIN_INTERVAL`, so a device is waited for once a block; a step costs 8 + 8 K bytes a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm_ascend_spec.drafters.methods import Confidence
from vllm_ascend_spec.engine import patching, runner

DRAIN_INTERVAL = 8
ONLINE_ESTIMATE = "online estimate"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"


@dataclass(frozen=True)
class Step:
    """One request in one engine step.

    engine_step: counts the runner's steps from 0. prefill: the request's known tokens were not
    all computed yet. drafted, verified, accepted: draft tokens. emitted: tokens sampled, the
    bonus token included. draft_tokens and confidence: int32 and float32 [drafted].
    """

    engine_step: int
    prefill: bool
    drafted: int
    verified: int
    accepted: int
    emitted: int
    draft_tokens: np.ndarray
    confidence: np.ndarray


@dataclass
class Trace:
    """The steps of one request, in order."""

    known_tokens: int = 0
    steps: list[Step] = field(default_factory=list)

    def keep(self, tokens: int) -> list[Step]:
        """The steps that made the first `tokens` output tokens.

        The step that goes over is cut: what it sampled past the end reached nobody. Steps after
        it are dropped: with async scheduling a request runs on until the host has seen its end.
        """
        kept: list[Step] = []
        left = tokens
        for step in self.steps:
            if left <= 0:
                break
            kept.append(step if step.emitted <= left else replace(step, emitted=left))
            left -= step.emitted
        return kept


@dataclass
class Recorder:
    """Collects traces by the runner's request id.

    on_progress: called with the number of tokens that were emitted since the last call.
    """

    on_progress: Callable[[int], None] | None = None
    traces: dict[str, Trace] = field(default_factory=dict)
    confidence_source: str | None = None
    engine_steps: int = 0
    _pending: list[dict[str, Any]] = field(default_factory=list)
    _slots: Any = None  # float32 [max_num_reqs + 1, K] by request state; the last row takes padding
    _proposed_for: Any = None  # request state index of each row of the newest proposal

    def trace(self, request_id: str) -> Trace:
        """The trace of a request of the public API; the runner's ids end in a random suffix."""
        self.drain()
        matches = [t for name, t in self.traces.items() if name.rpartition("-")[0] == request_id]
        return self.traces.get(request_id) or (matches[0] if matches else Trace())

    def clear(self) -> None:
        """Forget all traces, for instance those of a warm-up."""
        self.drain()
        self.traces.clear()
        self.engine_steps = 0

    def observe_verification(self, runner: Any, batch: Any, num_sampled: Any) -> None:
        """Called after sampling and before the next proposal, when the drafts are still there."""
        self._pending.append(
            {
                "engine_step": self.engine_steps,
                "requests": list(batch.req_ids),
                "prefill": batch.is_prefilling_np.copy(),
                "prefill_len": batch.prefill_len_np.copy(),
                "drafted": _scheduled_drafts(batch),
                # Clones: the runner reuses these buffers in the next step.
                "rows": batch.cu_num_logits.clone(),
                "emitted": num_sampled.clone(),
                **self._drafts(runner, batch),
            }
        )
        self.engine_steps += 1
        self._proposed_for = batch.idx_mapping.clone()
        if len(self._pending) >= DRAIN_INTERVAL:
            self.drain()

    def observe_draft_logits(
        self, logits: Any, slots: Any, position: Any, limit: tuple[int, int]
    ) -> None:
        """Largest softmax of each row of `logits` [rows, vocabulary], kept by request state.

        slots: int [rows], -1 marks padding. position: draft position, int scalar or [rows].
        limit: (max_num_reqs, K) of the speculator.
        """
        max_num_reqs, draft_tokens = limit
        if self._slots is None:
            self._slots = logits.new_zeros((max_num_reqs + 1, draft_tokens)).float()
        confidence = logits.float().softmax(dim=-1).amax(dim=-1)
        self._slots[slots.long(), position.long()] = confidence

    def drain(self) -> None:
        """Read the pending steps; waits for the device."""
        pending, self._pending = self._pending, []
        emitted = sum(self._read(step) for step in pending)
        if self.on_progress is not None and emitted:
            self.on_progress(emitted)

    def _drafts(self, runner: Any, batch: Any) -> dict[str, Any]:
        """Draft tokens and confidences of the drafts that were just verified, batch order."""
        speculator = getattr(runner, "speculator", None)
        if speculator is None:
            return {"draft_tokens": None, "confidence": None}
        confidence = None
        direct = _direct_confidence(speculator)
        if direct is not None:
            if self._slots is None:
                shape = (runner.max_num_reqs + 1, runner.num_speculative_steps)
                self._slots = speculator.draft_token_confidence_probs.new_zeros(shape)
            if self._proposed_for is not None:
                rows = speculator.draft_token_confidence_probs[: len(self._proposed_for)]
                self._slots[self._proposed_for] = rows
        if self._slots is not None:
            self.confidence_source = direct or _logit_confidence(speculator)
            confidence = self._slots[batch.idx_mapping]
        drafts = runner.req_states.draft_tokens[batch.idx_mapping]
        return {"draft_tokens": drafts, "confidence": confidence}

    def _read(self, step: dict[str, Any]) -> int:
        emitted = step["emitted"].cpu().numpy()
        verified = np.diff(step["rows"].cpu().numpy()) - 1
        drafts = None if step["draft_tokens"] is None else step["draft_tokens"].cpu().numpy()
        confidence = None if step["confidence"] is None else step["confidence"].cpu().numpy()
        for row, request in enumerate(step["requests"]):
            drafted = int(step["drafted"][row])
            trace = self.traces.setdefault(request, Trace(int(step["prefill_len"][row])))
            if step["prefill"][row] and trace.steps:
                # After a preemption the known tokens are computed anew. Tokens sampled in a step
                # whose output the scheduler threw away are not among them.
                trace.steps = trace.keep(int(step["prefill_len"][row]) - trace.known_tokens)
            trace.steps.append(
                Step(
                    engine_step=step["engine_step"],
                    prefill=bool(step["prefill"][row]),
                    drafted=drafted,
                    verified=int(verified[row]),
                    accepted=max(int(emitted[row]) - 1, 0),
                    emitted=int(emitted[row]),
                    draft_tokens=_first(drafts, row, drafted, np.int32),
                    confidence=_first(confidence, row, drafted, np.float32),
                )
            )
        return int(emitted.sum())


def _scheduled_drafts(batch: Any) -> np.ndarray:
    if batch.num_draft_tokens_per_req is None:
        return np.zeros(batch.num_reqs, dtype=np.int32)
    return batch.num_draft_tokens_per_req.copy()


def _first(values: np.ndarray | None, row: int, count: int, dtype: Any) -> np.ndarray:
    if values is None:
        return np.empty(0, dtype=dtype)
    return values[row, :count].astype(dtype)


def _direct_confidence(speculator: Any) -> str | None:
    """Where the speculator itself writes its confidences, if it does."""
    if getattr(speculator, "use_confidence_head", False):
        return Confidence.HEAD.value
    if getattr(speculator, "acceptance_estimator", None) is not None:
        return ONLINE_ESTIMATE
    return None


def _logit_confidence(speculator: Any) -> str:
    scored = hasattr(speculator, "candidate_sampler")
    return (Confidence.SELECTOR if scored else Confidence.MAX_SOFTMAX).value


_active: Recorder | None = None


def install(recorder: Recorder) -> Recorder:
    """Make `recorder` the observer of this process, in place of any earlier one."""
    global _active
    patching.declare(*REPLACEMENTS)
    if _observe_selector not in runner.draft_observers:
        runner.draft_observers.append(_observe_selector)
    _active = recorder
    return recorder


def uninstall() -> None:
    """Stop observing; the declared hooks stay and do nothing."""
    global _active
    _active = None


def _observed_sample(original: Any) -> Any:
    def sample(self: Any, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        output, num_sampled, num_rejected = original(
            self, hidden_states, input_batch, grammar_output
        )
        if _active is not None:
            _active.observe_verification(self, input_batch, num_sampled)
        return output, num_sampled, num_rejected

    return sample


def _observed_logits(original: Any) -> Any:
    def _maybe_predict_acceptance(self: Any, logits: Any, idx_mapping: Any, step: Any) -> None:
        original(self, logits, idx_mapping, step)
        if _active is not None and _direct_confidence(self) is None:
            limit = (self.max_num_reqs, self.num_speculative_steps)
            _active.observe_draft_logits(logits, idx_mapping, step, limit)

    return _maybe_predict_acceptance


def _confidence_head_always_on(original: Any) -> Any:
    def load_draft_model(self: Any, target_model: Any, target_attn_layer_names: Any) -> Any:
        model = original(self, target_model, target_attn_layer_names)
        if _active is not None and model.model.confidence_head is not None:
            self.use_confidence_head = True
        return model

    return load_draft_model


def _observe_selector(speculator: Any, num_reqs: int) -> None:
    """DFlash 2 passes its selector's scores on under adaptive verification only."""
    sampler = getattr(speculator, "candidate_sampler", None)
    if _active is None or sampler is None or speculator.enable_adaptive_verification:
        return
    rows = num_reqs * speculator.num_speculative_steps
    speculator._maybe_predict_acceptance(
        sampler.scores[:num_reqs].flatten(0, 1),
        speculator.sample_idx_mapping[:rows],
        speculator.sample_col[:rows],
    )


REPLACEMENTS = (
    patching.Replacement(
        target=f"{_RUNNER}:GPUModelRunner.sample",
        reason="the runner reports no verified lengths; read them after sampling",
        make=_observed_sample,
    ),
    patching.Replacement(
        target=f"{_SPECULATORS}.speculator:DraftModelSpeculator._maybe_predict_acceptance",
        reason="draft logits are not kept; read the largest softmax while they are there",
        make=_observed_logits,
    ),
    patching.Replacement(
        target=f"{_SPECULATORS}.dspark.speculator:DSparkSpeculator.load_draft_model",
        reason="the confidence head only runs under adaptive verification; observe it always",
        make=_confidence_head_always_on,
    ),
)
