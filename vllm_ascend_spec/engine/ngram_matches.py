"""Match statistics of n-gram drafts by request slot, on the device (`budget.confidence`)."""

from __future__ import annotations

from typing import Any

import torch

from vllm_ascend_spec.budget.confidence import MATCH_MEMORY, MATCH_PRIOR


class MatchStatistics:
    """By request slot, on the device: copied tokens in hand, verified before, accepted before."""

    def __init__(self, max_requests: int, draft_tokens: int, device: torch.device) -> None:
        self._position = torch.arange(draft_tokens, device=device)
        self._known = torch.zeros(3, max_requests, dtype=torch.float32, device=device)
        self.copied, self.trials, self.agreements = self._known

    def forget(self, slots: torch.Tensor) -> None:
        """The requests in these slots start anew; slots: int64 [R]."""
        # `x[slots] = 0.0` would copy the number from the host, and wait for the device.
        self._known.index_fill_(1, slots, 0.0)

    def judge(self, slots: torch.Tensor, verified: torch.Tensor, emitted: torch.Tensor) -> None:
        """What became of the copied tokens in hand; int [R] each, emitted 0 inside a prompt."""
        copied = self.copied[slots]
        accepted = torch.minimum((emitted - 1).clamp(min=0).float(), copied)
        # Trials end with the first rejected token: what follows is censored.
        tried = torch.minimum(torch.minimum(verified.float(), copied), accepted + 1)
        trials = self.trials[slots] + torch.where(emitted > 0, tried, 0.0)
        fade = MATCH_MEMORY / trials.clamp(min=MATCH_MEMORY)
        self.trials[slots] = trials * fade
        self.agreements[slots] = (self.agreements[slots] + accepted) * fade

    def scores(
        self, slots: torch.Tensor, length: torch.Tensor, available: torch.Tensor
    ) -> torch.Tensor:
        """Raw scores float32 [R, K]; length: tokens matched [R]; available: tokens copied [R]."""
        self.copied[slots] = available.clamp(max=len(self._position)).float()
        start = length / (length + 1.0)
        score = (self.agreements[slots] + MATCH_PRIOR * start) / (self.trials[slots] + MATCH_PRIOR)
        return torch.where(self._position < available[:, None], score[:, None], 0.0)


def newest_matches(
    speculator: Any, requests: int, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens matched and tokens after the match, int64 [R]; 0 where nothing matched.

    The scan leaves length * (max_model_len + 1) + place + 1 of the best match of each block.
    """
    best = speculator.scratch[:requests].amax(dim=1)
    stride = speculator.max_model_len + 1
    found = best > 0
    length = torch.where(found, (best - 1) // stride, 0)
    place = torch.where(found, (best - 1) % stride, 0)
    known = speculator.req_states.total_len.gpu[slots].long()
    return length, torch.where(found, known - place - length, 0).clamp(min=0)
