"""The replay layout of a GDN layer: one committed state per slot and a ring of pending rows.

A verification step never writes a state. It appends, for each of its rows, what a rank-one update
of the state needs: the key, the update u and the log decay. Rows that were accepted are *pending*:
later steps apply them on the fly, and a flush folds them into the state.

The cursor (where pending rows begin, how many there are) is the same for all layers of a request,
so it lives once per slot; `replay_cursor.py` keeps it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NULL_SLOT = 0  # vLLM's null block: padding entries point at it
MAX_ROWS = 16  # rows of one request and step: one tile of the matrix unit


@dataclass(frozen=True)
class ReplayLayout:
    """Shapes of one layer's replay cache.

    key_heads, value_heads: HK and HV, HV a multiple of HK. key_dim, value_dim: powers of two, at
    least 16. ring_rows: W, at least twice the rows of the longest step (2K + 2), so that a step
    always fits after the flush that it causes. state_dtype: bfloat16 or float32.
    """

    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    ring_rows: int = 32
    state_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Refuse shapes that the kernels do not have."""
        if self.value_heads % self.key_heads:
            raise ValueError(f"{self.value_heads} value heads do not divide by {self.key_heads}")
        for name in ("key_dim", "value_dim"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two of at least 16, got {size}")
        if self.state_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"state_dtype must be bfloat16 or float32, got {self.state_dtype}")

    @property
    def update_dtype(self) -> torch.dtype:
        """Type of the pending updates.

        Not bfloat16 beside a bfloat16 state: the rounding of an update is the same along all of
        dk, so its error does not average out as a state's does.
        """
        return torch.float32 if self.state_dtype == torch.float32 else torch.float16

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape (without the slot axis) and dtype of each tensor of `ReplayCache`."""
        HK, HV, W = self.key_heads, self.value_heads, self.ring_rows
        return {
            "state": ((HV, self.value_dim, self.key_dim), self.state_dtype),
            "keys": ((HK, W, self.key_dim), torch.bfloat16),
            "updates": ((HV, W, self.value_dim), self.update_dtype),
            "log_decay": ((HV, W), torch.float32),
            "key_norm": ((HK, W), torch.float32),
        }

    def slot_bytes(self) -> dict[str, int]:
        """Bytes of each tensor for one slot."""
        return {
            name: int(torch.Size(shape).numel()) * dtype.itemsize
            for name, (shape, dtype) in self.shapes().items()
        }

    def row_bytes(self) -> int:
        """Bytes that one pending row costs to append, and to apply."""
        sizes = self.slot_bytes()
        return sum(size for name, size in sizes.items() if name != "state") // self.ring_rows

    def allocate(self, slots: int, device: torch.device | str) -> ReplayCache:
        """Zeroed cache of `slots` slots, slot 0 being the null block."""
        return ReplayCache(
            **{
                name: torch.zeros((slots, *shape), dtype=dtype, device=device)
                for name, (shape, dtype) in self.shapes().items()
            }
        )


@dataclass
class ReplayCache:
    """Tensors of one layer; the slot stride is free, all else is contiguous.

    state [slots, HV, dv, dk]: after the tokens that precede the pending rows.
    keys [slots, HK, W, dk] bfloat16: as given, not normalised, so that products with them are
    exact. key_norm [slots, HK, W] fp32: 1 / |k|. updates [slots, HV, W, dv]: u. log_decay
    [slots, HV, W] fp32: of the row alone; a running sum would lose the digits of later, weaker
    decays and would have to be rebased by a flush.
    """

    state: Tensor
    keys: Tensor
    updates: Tensor
    log_decay: Tensor
    key_norm: Tensor

    @property
    def layout(self) -> ReplayLayout:
        """Read back from the shapes."""
        _, HV, DV, DK = self.state.shape
        _, HK, W, _ = self.keys.shape
        return ReplayLayout(HK, HV, DK, DV, W, self.state.dtype)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order in which the kernels take them."""
        return self.state, self.keys, self.updates, self.log_decay, self.key_norm

    def check(self) -> ReplayLayout:
        """The layout, after comparing every tensor with it; ValueError names the one that differs.

        Reads no device value.
        """
        layout = self.layout
        for name, (shape, dtype) in layout.shapes().items():
            tensor: Tensor = getattr(self, name)
            if tensor.shape[1:] != shape or tensor.dtype != dtype or not tensor[0].is_contiguous():
                raise ValueError(
                    f"replay cache: {name} must be contiguous {dtype} [slots, {shape}] within a "
                    f"slot, got {tensor.dtype} {tuple(tensor.shape)}"
                )
        return layout


@dataclass
class StepCursor:
    """Of each request of one step, int32 [R] on the device.

    start: ring index of the first pending row. pending: rows accepted and not folded yet.
    flush: nonzero where this step also folds them. New rows go to (start + pending + t) mod W.
    """

    start: Tensor
    pending: Tensor
    flush: Tensor

    def narrow(self, requests: int) -> StepCursor:
        """Of the first `requests`: views."""
        return StepCursor(self.start[:requests], self.pending[:requests], self.flush[:requests])

    def pick(self, index: Tensor) -> StepCursor:
        """Copies of the entries at `index`, an int tensor on the device."""
        return StepCursor(self.start[index], self.pending[index], self.flush[index])
