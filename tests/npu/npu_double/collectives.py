"""HCCL between the processes of a double: gloo over the host memory that stands for the device's.

torch_npu's own process group would call a library that returns success and moves nothing. This one
takes the same place in torch.distributed, so vLLM's and vllm-ascend's communicators run as ever;
a collective inside a captured graph is on its tape and meets the other ranks at every replay.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .device import host_alias
from .graphs import Graphs

PATIENCE = timedelta(minutes=2)  # with ranks that never come


def install(graphs: Graphs) -> None:
    """Take torch_npu's place behind the backend's name; torch_npu must have been imported."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> HostGroup:
        return HostGroup(store, rank, size, timeout, graphs)

    dist.Backend._plugins["HCCL"] = dist.Backend._BackendPlugin(create, False)


class HostGroup(dist.ProcessGroup):
    """A process group for tensors in device memory."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, graphs: Graphs
    ) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, min(timeout, PATIENCE))
        self._graphs = graphs

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._run(lambda: self._gloo.allreduce(_host(tensors), options))

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._run(lambda: self._gloo.broadcast(_host(tensors), options))

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None
    ) -> Any:
        return self._run(lambda: self._gloo.allgather(_host(outputs), _host(inputs), options))

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        parts = [list(host_alias(output).chunk(self.size()))]
        return self._run(lambda: self._gloo.allgather(parts, [host_alias(given)]))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        return self._run(lambda: self._gloo.gather(_host(outputs), _host(inputs), options))

    def barrier(self, options: Any = None) -> Any:
        return self._gloo.barrier()

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        return "hccl"

    def _run(self, collective: Callable[[], Any]) -> Any:
        work = collective()
        work.wait()
        if self._graphs.capturing:
            self._graphs.note(lambda: collective().wait())
        return work


def _host(tensors: Any) -> Any:
    if isinstance(tensors, list | tuple):
        return [_host(tensor) for tensor in tensors]
    return host_alias(tensors)
