"""A step of the replay layout as a captured graph has it, with random rows for any batch."""

from __future__ import annotations

from collections.abc import Callable

import gdn_schedule as schedule
import torch

from kernels.gdn_verify.layout import ReplayLayout, StepCursor

DIM = 128


class UpperBound:
    """Tensors of a captured step: entries behind the batch have no rows and the null slot."""

    def __init__(
        self, dtype: torch.dtype, entries: int, device: torch.device, slots: int = 5
    ) -> None:
        random = torch.Generator().manual_seed(7)
        normal = lambda *size: torch.randn(*size, generator=random)  # noqa: E731
        layout = ReplayLayout(2, 4, DIM, DIM, 24, dtype)
        self.cache = layout.allocate(slots, device)
        for tensor in self.cache.tensors():
            tensor.copy_(normal(*tensor.shape) * 0.3)
        self.cache.log_decay.neg_().clamp_(max=0)
        self.cache.key_norm.copy_(self.cache.keys.float().pow(2).sum(-1).rsqrt())
        tokens = 8 * 80  # as many, and so the same ones, whatever the entries
        packed = normal(tokens, (2 + 2 + 4) * DIM).bfloat16().to(device)
        q, k, v = packed.split([2 * DIM, 2 * DIM, 4 * DIM], 1)
        gates = normal(tokens, 8).bfloat16().to(device)
        self.rows = (
            q.unflatten(1, (2, DIM)), k.unflatten(1, (2, DIM)), v.unflatten(1, (4, DIM)),
            gates[:, :4], gates[:, 4:], normal(4).to(device), normal(4).to(device),
        )  # fmt: skip
        integers = lambda *size: torch.zeros(size, dtype=torch.int32, device=device)  # noqa: E731
        self.query_start_loc, self.slots = integers(entries + 1), integers(entries)
        self.step = StepCursor(integers(entries), integers(entries), integers(entries))
        self.out = torch.empty(tokens, 4, DIM, dtype=torch.bfloat16, device=device)

    def fill(self, lengths: list[int], slots: list[int], pending: int = 5) -> None:
        """A batch; what lies behind it repeats the last start and has the null slot."""
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self.query_start_loc.fill_(int(starts[-1]))
        self.query_start_loc[: len(starts)] = starts
        self.slots.zero_()
        self.slots[: len(slots)] = torch.tensor(slots)
        self.step.start.fill_(21)
        self.step.pending.fill_(pending)
        self.step.flush.copy_(self.slots % 2)
        self.out.fill_(schedule.POISON)

    def run(self, kernel: Callable[..., torch.Tensor]) -> None:
        arguments = (*self.rows, self.query_start_loc, self.slots, self.step, self.cache, self.out)
        kernel(*arguments, 8)

    def found(self) -> list[torch.Tensor]:
        return [x.clone() for x in (*self.cache.tensors(), self.out)]


def compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Tensors of a longer and a shorter run: the rows that both have are equal, others poison."""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[: len(other)], other)
        assert bool((one[len(other) :] == schedule.POISON).all())
