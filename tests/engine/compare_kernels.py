"""Run vLLM's kernels interpreted and as twins on the same random inputs; print what came out.

A process of its own: Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_ascend_spec.engine import cpu

cpu.enable()

import vllm.v1.worker.cpu.shm  # noqa: E402, F401  (makes CUDA calls of the runner no-ops)
from vllm.v1.worker import mamba_utils, utils  # noqa: E402
from vllm.v1.worker.gpu import block_table  # noqa: E402

from vllm_ascend_spec.engine import cpu_kernels  # noqa: E402

GROUPS, REQUESTS, BLOCKS, BLOCK_SIZE = 2, 5, 12, 4
TOKENS, MAX_TOKENS = 11, 20
ROUNDS = 8

Tensors = dict[str, Tensor]
Build = Callable[[torch.Generator], tuple[tuple[int, ...], Callable[[Tensors], list[Any]], Tensors]]


def integers(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def addresses(*tensors: Tensor) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def gather(generator: torch.Generator) -> Any:
    made = {
        "source0": integers(generator, 1, 99, REQUESTS, BLOCKS),
        "source1": integers(generator, 1, 99, REQUESTS, 3),
        "target0": torch.full((REQUESTS, BLOCKS), 7, dtype=torch.int32),
        "target1": torch.full((REQUESTS, 3), 7, dtype=torch.int32),
        "counts": integers(generator, 0, 4, GROUPS, REQUESTS),
    }
    order = torch.randperm(REQUESTS, generator=generator)[:3].int()

    def arguments(t: Tensors) -> list[Any]:
        return [
            order,
            addresses(t["source0"], t["source1"]),
            addresses(t["target0"], t["target1"]),
            torch.tensor([BLOCKS, 3]),
            t["counts"],
            t["counts"].stride(0),
            len(order),
        ]

    return (GROUPS, REQUESTS), arguments, made, {"BLOCK_SIZE": 1024}


def slots(generator: torch.Generator) -> Any:
    made = {
        "table0": integers(generator, 1, 99, REQUESTS, BLOCKS),
        "table1": integers(generator, 1, 99, REQUESTS, BLOCKS),
        "slots": torch.full((GROUPS, MAX_TOKENS), 5, dtype=torch.int64),
    }
    requests = torch.tensor([3, -1, 0], dtype=torch.int32)
    starts = torch.tensor([0, 4, 4 + int(integers(generator, 0, 3, 1)), TOKENS], dtype=torch.int32)
    positions = integers(generator, 0, BLOCK_SIZE * BLOCKS // 2, MAX_TOKENS).long()
    enabled = torch.tensor([True, bool(integers(generator, 0, 2, 1))])

    def arguments(t: Tensors) -> list[Any]:
        return [
            MAX_TOKENS,
            requests,
            starts,
            positions,
            addresses(t["table0"], t["table1"]),
            torch.tensor([BLOCKS, BLOCKS]),
            torch.tensor([BLOCK_SIZE, 2 * BLOCK_SIZE], dtype=torch.int32),
            enabled,
            torch.tensor([False, False]),
            t["slots"],
            t["slots"].stride(0),
            0,
        ]

    named = {"CP_SIZE": 1, "CP_INTERLEAVE": 1, "PAD_ID": -1, "TRITON_BLOCK_SIZE": 1024}
    return (GROUPS, len(requests) + 1), arguments, made, named


def zero(generator: torch.Generator) -> Any:
    made = {
        "pool0": integers(generator, 1, 99, BLOCKS, 40),
        "pool1": integers(generator, 1, 99, BLOCKS, 24),
    }
    blocks = torch.randperm(BLOCKS, generator=generator)[:4]

    def arguments(t: Tensors) -> list[Any]:
        # The kernel clears whole chunks, so page sizes are multiples of its chunk.
        pools = addresses(t["pool0"], t["pool1"])
        return [pools, torch.tensor([40, 24]), torch.tensor([32, 16]), blocks]

    return (len(blocks), 2, 2), arguments, made, {"BLOCK_SIZE": 16}


def mamba_pools(generator: torch.Generator) -> Tensors:
    return {
        "table": torch.stack(
            [torch.randperm(BLOCKS, generator=generator).int() for _ in range(REQUESTS)]
        ),
        "conv": integers(generator, 0, 2**15, BLOCKS, 6, 8).to(torch.int16),
        "state": integers(generator, 0, 2**30, BLOCKS, 2, 16),
    }


def mamba_layout(t: Tensors, dim_first: bool) -> list[Any]:
    """A window of 6 entries of 8 channels, or of 8 rows with 6 entries each where `dim_first`."""
    width, rows = (6, 0) if not dim_first else (6, 8)
    return [
        addresses(t["table"]),
        BLOCKS,
        torch.tensor([t["conv"].data_ptr(), t["state"].data_ptr()]),
        torch.tensor([48 * 2, 32 * 4]),
        torch.tensor([2, 4], dtype=torch.int32),
        torch.tensor([1 if dim_first else 8, 32]),
        torch.tensor([width, 0], dtype=torch.int32),
        torch.tensor([0, 0], dtype=torch.int32),
        torch.tensor([rows, 0], dtype=torch.int32),
        torch.tensor([12, 0]),
    ]


def precopy(generator: torch.Generator) -> Any:
    dim_first = bool(integers(generator, 0, 2, 1))
    target = integers(generator, 0, 4, REQUESTS)
    source = integers(generator, -1, 4, REQUESTS)
    bias = integers(generator, 0, 4, REQUESTS)
    batch = torch.tensor([4, -1, 0, 2], dtype=torch.int32)

    def arguments(t: Tensors) -> list[Any]:
        return [target, source, bias, *mamba_layout(t, dim_first), batch, len(batch)]

    named = {
        "COPY_BLOCK_SIZE": 16,
        "CONV_STATE_DIM_FIRST": dim_first,
        "HAS_IDX_MAPPING": True,
        "TEMPORAL_TILES": 2,
    }
    return (len(batch), 2, 2), arguments, mamba_pools(generator), named


def postprocess(generator: torch.Generator) -> Any:
    dim_first = bool(integers(generator, 0, 2, 1))
    made = {**mamba_pools(generator), "accepted": integers(generator, 1, 5, REQUESTS)}
    computed = integers(generator, 4, 20, REQUESTS)
    current = (computed - 1) // BLOCK_SIZE
    snapshot = made["accepted"].clone()
    batch = torch.tensor([4, -1, 0, 2, 1], dtype=torch.int32)

    def arguments(t: Tensors) -> list[Any]:
        layout = mamba_layout(t, dim_first)
        head = [snapshot, current, None, computed, None]
        return [*head, *layout, t["accepted"], batch, len(batch)]

    named = {
        "block_size": BLOCK_SIZE,
        "COPY_BLOCK_SIZE": 16,
        "CONV_STATE_DIM_FIRST": dim_first,
        "HAS_IDX_MAPPING": True,
        "PRECOMPUTED_NEW_COMPUTED": True,
        "TEMPORAL_TILES": 2,
    }
    return (len(batch), 2, 2), arguments, made, named


CASES: dict[str, tuple[Any, Any, Callable[[torch.Generator], Any]]] = {
    "gather_block_tables": (
        block_table._gather_block_tables_kernel,
        cpu_kernels.gather_block_tables,
        gather,
    ),
    "compute_slot_mappings": (
        block_table._compute_slot_mappings_kernel,
        cpu_kernels.compute_slot_mappings,
        slots,
    ),
    "zero_kv_blocks": (utils._zero_kv_blocks_kernel, cpu_kernels.zero_kv_blocks, zero),
    "precopy_mamba": (
        mamba_utils.precopy_mamba_align_fused_kernel,
        cpu_kernels.precopy_mamba,
        precopy,
    ),
    "postprocess_mamba": (
        mamba_utils.postprocess_mamba_fused_kernel,
        cpu_kernels.postprocess_mamba,
        postprocess,
    ),
}


def compare(name: str) -> str:
    kernel, twin, build = CASES[name]
    changed = False
    for seed in range(ROUNDS):
        grid, arguments, made, named = build(torch.Generator().manual_seed(seed))
        interpreted = {key: value.clone() for key, value in made.items()}
        twinned = {key: value.clone() for key, value in made.items()}
        kernel[grid](*arguments(interpreted), **named)
        twin(*arguments(twinned), **named)
        wrong = [key for key in made if not torch.equal(interpreted[key], twinned[key])]
        if wrong:
            return f"round {seed}: {', '.join(wrong)} differ"
        changed |= any(not torch.equal(made[key], twinned[key]) for key in made)
    return "equal" if changed else "no round changed anything"


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        print(f"{chosen}: {compare(chosen)}", flush=True)
