"""Confidence and argmax of each row of logits, in one pass: a drafter's score without a head.

Contract of every implementation (`naive`, `triton`), for logits z of a row and temperature t:

- confidence = max softmax(z / t) = 1 / sum_v exp((z_v - max z) / t), in fp32; token = argmax z.
- Ties go to the lower id. -inf entries are masked out.
- A row with a NaN or +inf, or with nothing but -inf, has confidence 0 and still a valid token.
- Vocabulary shards (tensor parallel) give partials, which any number of ranks combine after one
  gather: partial = fp32 [3, N] of (max, sum of exp((z - max) / t), token id). Ids are exact in fp32
  up to MAX_VOCABULARY.
- d2t, for a cut draft vocabulary, holds offsets: target id = draft id + d2t[draft id] (EAGLE-3's
  checkpoint convention, arXiv 2503.01840).
"""

from __future__ import annotations

import torch

MAX_VOCABULARY = 1 << 24
# Below every logit that counts: finite, also over a temperature, so that "nothing seen yet" minus
# itself is not NaN.
FLOOR = -1.0e30


def check_d2t(d2t: torch.Tensor | None, draft_vocabulary: int, target_vocabulary: int) -> None:
    """Refuse a missing or impossible d2t table. At load time only: it reads the table."""
    if d2t is None:
        if draft_vocabulary != target_vocabulary:
            raise ValueError(
                f"d2t is missing: the drafter has {draft_vocabulary} tokens and the target "
                f"{target_vocabulary}, so its ids are not the target's"
            )
        return
    if d2t.shape != (draft_vocabulary,):
        raise ValueError(f"d2t must be [{draft_vocabulary}], got {tuple(d2t.shape)}")
    ids = d2t.cpu().long() + torch.arange(draft_vocabulary)
    bad = torch.nonzero((ids < 0) | (ids >= target_vocabulary)).flatten()
    if bad.numel():
        draft_id = int(bad[0])
        raise ValueError(
            f"d2t[{draft_id}] = {int(d2t[draft_id])} maps draft id {draft_id} to "
            f"{int(ids[draft_id])}, outside the target's {target_vocabulary} tokens "
            "(entries are offsets, not ids)"
        )


def check_logits(logits: torch.Tensor, temperature: torch.Tensor | None) -> tuple[int, int]:
    """(N, V) of logits whose rows are contiguous; ValueError otherwise. Reads no device value."""
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be [N, V] with contiguous rows, got {tuple(logits.shape)} with strides "
            f"{logits.stride()}"
        )
    rows, vocabulary = logits.shape
    if vocabulary > MAX_VOCABULARY:
        raise ValueError(f"logits: at most {MAX_VOCABULARY} tokens, got {vocabulary}")
    if temperature is not None and temperature.shape != (rows,):
        raise ValueError(f"temperature must be [{rows}], got {tuple(temperature.shape)}")
    return rows, vocabulary
