"""Engines that share a device take turns with their caches, through the allocator of sleep mode.

Such an engine is built with `enable_cumem_allocator`. Weights and graphs stay, so that a turn costs
no time; what a cache held is lost. A cache that is taken again is zeroed, as a new one is: masked
positions may be read, and nothing there may be NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ascend_spec.engine.patching import Replacement, declare

CACHE = "kv_cache"  # vLLM's tag for it
_installed = False


def install(wait_for_turn: Callable[[], None]) -> None:
    """Have engines of this process call `wait_for_turn` before they allocate their caches."""
    global _installed
    _installed = True

    def waiting(original: Any) -> Any:
        def initialize_from_config(self: Any, *args: Any, **named: Any) -> Any:
            wait_for_turn()
            return original(self, *args, **named)

        return initialize_from_config

    declare(
        Replacement(
            target="vllm.v1.worker.gpu_worker:Worker.initialize_from_config",
            reason="benchmark: engines on one device allocate their caches in turn",
            make=waiting,
        )
    )


def give_back() -> None:
    """Return the cache's memory to the device, if this engine takes turns."""
    if _installed:
        _allocator().discard(CACHE)


def take() -> None:
    """Have the cache's memory again, all zeros, if this engine takes turns."""
    if not _installed:
        return
    import torch
    from vllm.device_allocator import cumem

    allocator = _allocator()
    allocator.wake_up([CACHE])
    for address, allocation in allocator.pointer_to_data.items():
        if allocation.tag == CACHE:
            cumem.libcudart.cudaMemset(address, 0, allocation.handle[1])
    torch.cuda.synchronize()


def _allocator() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()
