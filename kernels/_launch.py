"""Launch sizes that hold on CUDA and Ascend."""

from __future__ import annotations

import functools

import torch

MAX_GRID = 65535  # Ascend's limit on a launch; kernels stride over their work, so CUDA may keep it


@functools.lru_cache
def device_cores(device: torch.device) -> int:
    """Units that run programs side by side: SMs on CUDA, vector cores on Ascend."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "npu":
        from triton.runtime import driver

        properties = driver.active.utils.get_device_properties(device.index or 0)
        return int(properties["num_vectorcore"])
    return 2  # the interpreter: more than one, so that striding over the work is exercised


def grid(work: int, device: torch.device) -> tuple[int]:
    """1-D grid for `work` items of a kernel that strides over them.

    CUDA's scheduler balances one program an item; on Ascend a program costs a launch of its core.
    """
    limit = MAX_GRID if device.type == "cuda" else device_cores(device)
    return (max(1, min(work, limit)),)
