"""The indexing of vllm-ascend's stock recurrent operator on a CPU, with right arithmetic.

Which core takes which head of which request, which entries of the flat slot list it reads and
writes, and where it returns: after the AscendC kernel of vllm-ascend 182b75e
(csrc/attention/recurrent_gated_delta_rule). The arithmetic is the oracle's, one head at a time, so
a difference from the oracle is a difference in indexing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from vllm_ascend_spec.kernels.gdn_verify.naive import gdn_verify
from vllm_ascend_spec.kernels.gdn_verify.stock import MOST_ROWS


@dataclass(frozen=True)
class Rows:
    """Arguments of `gdn_verify`, with lengths [R] in place of query start locations."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    states: Tensor
    lengths: list[int]
    table: Tensor
    accepted: list[int]

    def oracle(self) -> tuple[Tensor, Tensor]:
        """Output and states as they should be."""
        states = self.states.clone()
        starts = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
        accepted = torch.tensor(self.accepted, dtype=torch.int32)
        tokens = self.q, self.k, self.v, self.log_decay, self.beta
        return gdn_verify(*tokens, states, starts, self.table, accepted), states


@dataclass
class Answer:
    """out: NaN where nothing was written. read: start slot of (request, head). returned: cores."""

    out: Tensor
    states: Tensor
    read: dict[tuple[int, int], int] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)


def stock_operator(rows: Rows, flat: Tensor, cores: int) -> Answer:
    """Run the operator on `flat`, its list of one slot per token."""
    answer = Answer(torch.full_like(rows.v, torch.nan), rows.states.clone())
    for core in range(cores):
        if not _run_core(rows, flat, core, cores, answer):
            answer.returned.append(core)
    return answer


def _run_core(rows: Rows, flat: Tensor, core: int, cores: int, answer: Answer) -> bool:
    """Whether the core came to its end; it returns at the first request that it cannot take."""
    first = 0
    shares = _shares(rows, cores)
    for request, length in enumerate(rows.lengths):
        if length <= 0:
            continue
        if length > MOST_ROWS or first + length > len(rows.v):
            return False
        heads = [head for head in range(rows.v.shape[1]) if next(shares) == core]
        accepted = rows.accepted[request]
        if heads and not 1 <= accepted <= length:
            return False
        for head in heads:
            slots = flat[first : first + length]
            answer.read[request, head] = int(slots[accepted - 1])
            _run_head(rows, slots, first, accepted, head, answer)
        first += length
    return True


def _shares(rows: Rows, cores: int) -> Iterator[int]:
    """The core of each (request, head) in turn: the next one once a core has its share of rows."""
    total = sum(rows.lengths) * rows.v.shape[1]
    share, core, load = -(-total // cores), 0, 0
    for length in (n for n in rows.lengths if n > 0):
        for _ in range(rows.v.shape[1]):
            yield core
            load += length
            if load >= share:
                core, load = core + 1, 0


def _run_head(
    rows: Rows, slots: Tensor, first: int, accepted: int, head: int, answer: Answer
) -> None:
    span, own = slice(first, first + len(slots)), slice(head, head + 1)
    group = head // (rows.v.shape[1] // rows.q.shape[1])
    shared = slice(group, group + 1)
    answer.out[span, own] = gdn_verify(
        rows.q[span, shared], rows.k[span, shared], rows.v[span, own],
        rows.log_decay[span, own], rows.beta[span, own], answer.states[:, own],
        torch.tensor([0, len(slots)], dtype=torch.int32), slots[None],
        torch.tensor([accepted], dtype=torch.int32),
    )  # fmt: skip
