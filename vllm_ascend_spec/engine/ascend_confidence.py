"""Confidence of each draft token on vLLM 0.27.1, which keeps none: largest softmax of its logits.

The speculators compute logits inside their sampling functions. While one of those runs, the draft
model is seen through a tap that keeps what the logits are made of.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class ConfidenceStore:
    """float32 [max_requests + 1, K] on the device, by request state; the last row takes padding."""

    def __init__(self, max_requests: int, draft_tokens: int, device: torch.device) -> None:
        import torch

        self.values = torch.zeros(max_requests + 1, draft_tokens, device=device)

    def write(self, logits: torch.Tensor, slots: torch.Tensor, position: Any) -> None:
        """logits [rows, vocabulary]; slots int [rows], -1 for padding; position int or [rows]."""
        from vllm_ascend_spec.kernels import ops

        confidence, _ = ops.max_softmax(logits)
        self.values[slots.long(), position] = confidence


class _Tap:
    """A model whose named methods are called as ever, and what they return is kept."""

    def __init__(self, model: Any, *names: str) -> None:
        self._model = model
        self._names = names
        self.seen: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._model, name)
        if name not in self._names:
            return method

        def kept(*args: Any, **named: Any) -> torch.Tensor:
            result = method(*args, **named)
            self.seen[name].append(result)
            return result

        return kept


def attach(speculator: Any, store: ConfidenceStore) -> None:
    """Let `speculator` write the confidence of everything that it drafts into `store`."""
    speculator.ascend_spec_confidence = store


def observed_sample_draft(original: Any) -> Any:
    """`DraftModelSpeculator.sample_draft`: one draft token a row (MTP, EAGLE-3) or K (DFlash)."""

    @functools.wraps(original)
    def sample_draft(self: Any, hidden_states: Any, positions: Any, idx_mapping: Any,
                     temperature: Any, seeds: Any, draft_step: Any, draft_logits: Any,
                     ) -> Any:  # fmt: skip
        arguments = (hidden_states, positions, idx_mapping, temperature, seeds, draft_step)
        store = getattr(self, "ascend_spec_confidence", None)
        if store is None:
            return original(self, *arguments, draft_logits)
        model, tap = self.model, _Tap(self.model, "compute_logits")
        self.model = tap
        try:
            tokens = original(self, *arguments, draft_logits)
        finally:
            self.model = model
        (logits,) = tap.seen["compute_logits"]
        store.write(logits, idx_mapping, draft_step.long())
        return tokens

    return sample_draft


def observed_sample_sequential(original: Any) -> Any:
    """`DSparkSpeculator._sample_sequential`: K tokens a request in turn, logits plus a bias."""

    @functools.wraps(original)
    def _sample_sequential(self: Any, num_reqs: int, head_hidden: Any) -> None:
        store = getattr(self, "ascend_spec_confidence", None)
        if store is None:
            original(self, num_reqs, head_hidden)
            return
        model, tap = self.model, _Tap(self.model, "compute_draft_logits", "markov_bias")
        self.model = tap
        try:
            original(self, num_reqs, head_hidden)
        finally:
            self.model = model
        (base,) = tap.seen["compute_draft_logits"]
        draft_tokens = self.num_speculative_steps
        base = base.view(num_reqs, draft_tokens, -1)
        slots = self.sample_idx_mapping[: num_reqs * draft_tokens].view(num_reqs, draft_tokens)
        for position, bias in enumerate(tap.seen["markov_bias"]):
            store.write(base[:, position] + bias, slots[:, position], position)

    return _sample_sequential
