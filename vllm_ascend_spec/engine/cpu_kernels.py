"""NumPy twins of the kernels that cost most under Triton's interpreter.

They move bytes and look tables up, so a few memory copies replace thousands of interpreted
programs (measured on the hybrid test model with prefix caching: 74 % of a step). What decides
tokens, the rejection sampler and the drafting kernels, stays interpreted: running upstream's
kernels is what the CPU engine is for. Registered through vLLM's kernel dispatcher; each twin takes
its kernel's arguments by position.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

_registered = False


def register() -> None:
    """Register the twins with vLLM's kernel dispatcher; later calls change nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels(
        {
            "vllm.v1.worker.mamba_utils.postprocess_mamba_fused_kernel": postprocess_mamba,
            "vllm.v1.worker.mamba_utils.precopy_mamba_align_fused_kernel": precopy_mamba,
            "vllm.v1.worker.gpu.block_table._gather_block_tables_kernel": gather_block_tables,
            "vllm.v1.worker.gpu.block_table._compute_slot_mappings_kernel": compute_slot_mappings,
            "vllm.v1.worker.utils._zero_kv_blocks_kernel": zero_kv_blocks,
        }
    )


def gather_block_tables(
    batch_to_request: Tensor,
    source_pointers: Tensor,
    target_pointers: Tensor,
    strides: Tensor,
    num_blocks: Tensor,
    _num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Copy each request's block-table row into batch order; rows past `num_reqs` become zero.

    The kernel's grid tells how many rows are padded; here it is every row that a table of
    `num_blocks.shape[1]` requests has left.
    """
    requests = batch_to_request[:num_reqs].tolist()
    for group, width in enumerate(strides.tolist()):
        rows = num_blocks.shape[1]
        source = _int32_table(source_pointers[group], rows, width)
        target = _int32_table(target_pointers[group], rows, width)
        counts = num_blocks[group].tolist()
        for row, request in enumerate(requests):
            target[row, : counts[request]] = source[request, : counts[request]]
        target[num_reqs:] = 0


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    table_pointers: Tensor,
    table_strides: Tensor,
    block_sizes: Tensor,
    mapping_enabled: Tensor,
    _dcp_sharded: Tensor,
    slot_mappings: Tensor,
    _slot_mappings_stride: int,
    _cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Slot of every token of the batch in every cache group; [groups, max_num_tokens].

    A dummy request (index -1) owns no blocks, and the tokens after the last request are padding:
    both get PAD_ID.
    """
    if CP_SIZE != 1:
        raise NotImplementedError("context parallelism does not run on the CPU engine")
    requests = idx_mapping.numpy()
    starts = query_start_loc.numpy()[: len(requests) + 1]
    first, last = int(starts[0]), int(starts[-1])
    owner = np.repeat(requests, np.diff(starts))
    where = positions.numpy()[first:last].astype(np.int64)
    for group, block_size in enumerate(block_sizes.tolist()):
        row = slot_mappings[group].numpy()
        row[last:max_num_tokens] = PAD_ID
        if not bool(mapping_enabled[group]):
            row[first:last] = PAD_ID
            continue
        width = int(table_strides[group])
        table = _int32_table(table_pointers[group], int(owner.max(initial=0)) + 1, width)
        blocks = table[np.maximum(owner, 0), where // block_size].astype(np.int64)
        slots = blocks * block_size + where % block_size
        row[first:last] = np.where(owner >= 0, slots, PAD_ID)


def zero_kv_blocks(
    addresses: Tensor, strides: Tensor, page_sizes: Tensor, block_ids: Tensor, BLOCK_SIZE: int
) -> None:
    """Clear the blocks in every segment; strides and page sizes count int32 elements."""
    segments = zip(addresses.tolist(), strides.tolist(), page_sizes.tolist(), strict=True)
    for address, stride, page_size in segments:
        for block in block_ids.tolist():
            ctypes.memset(address + 4 * block * stride, 0, 4 * page_size)


@dataclass(frozen=True)
class StateCopies:
    """Where the recurrent states of all layers lie; argument names as in upstream's kernels.

    A state of width 0 is recurrent (one slot a column); any other is a convolution window of that
    many tokens (one slot for all columns).
    """

    table_pointers: Tensor
    table_stride: int
    base_addresses: Tensor
    block_strides: Tensor
    element_sizes: Tensor
    inner_sizes: Tensor
    conv_widths: Tensor
    groups: Tensor
    dim_row_counts: Tensor
    dim_row_strides: Tensor
    dim_first: bool

    def copy(self, request: int, source: int, target: int, token_bias: int) -> None:
        """Move a request's state after `token_bias + 1` rows of column `source` to `target`."""
        tables = [
            _int32_table(pointer, request + 1, self.table_stride)[request]
            for pointer in self.table_pointers
        ]
        for state, (address, stride, element, inner, width, group) in enumerate(self._states()):
            table = tables[group]
            to = address + int(table[target]) * stride
            if width == 0:
                origin = address + int(table[source + token_bias]) * stride
                ctypes.memmove(to, origin, inner * element)
                continue
            origin = address + int(table[source]) * stride
            if not self.dim_first:
                token = inner * element
                ctypes.memmove(to, origin + token_bias * token, (width - token_bias) * token)
                continue
            row_stride = int(self.dim_row_strides[state])
            for row in range(int(self.dim_row_counts[state])):
                ctypes.memmove(
                    to + row * row_stride,
                    origin + row * row_stride + token_bias * element,
                    (width - token_bias) * element,
                )

    def _states(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        columns = (
            self.base_addresses,
            self.block_strides,
            self.element_sizes,
            self.inner_sizes,
            self.conv_widths,
            self.groups,
        )
        return zip(*(column.tolist() for column in columns), strict=True)


def precopy_mamba(
    state_idx: Tensor, source_columns: Tensor, token_biases: Tensor, *layout: Any, **named: Any
) -> None:
    """Before a step: a request that enters a new block takes its state along."""
    copies, idx_mapping, num_reqs = _unpack(layout, named)
    for request in _requests(idx_mapping, num_reqs):
        source, target = int(source_columns[request]), int(state_idx[request])
        if 0 <= source != target:
            copies.copy(request, source, target, int(token_biases[request]))


def postprocess_mamba(
    num_accepted: Tensor,
    state_idx: Tensor,
    num_scheduled: Tensor | None,
    num_computed: Tensor,
    num_draft: Tensor | None,
    *layout: Any,
    block_size: int,
    PRECOMPUTED_NEW_COMPUTED: bool = False,
    **named: Any,
) -> None:
    """After a step: keep the state at a block boundary that the accepted tokens went past."""
    *layout_head, num_accepted_out, idx_mapping, num_reqs = layout
    copies, _, _ = _unpack((*layout_head, idx_mapping, num_reqs), named)
    for request in _requests(idx_mapping, num_reqs):
        accepted = int(num_accepted[request])
        if PRECOMPUTED_NEW_COMPUTED:
            computed = int(num_computed[request])
            running = computed - accepted + 1
        else:
            assert num_scheduled is not None and num_draft is not None
            running = int(num_computed[request] + num_scheduled[request] - num_draft[request])
            computed = running + accepted - 1
        boundary = computed // block_size * block_size
        if boundary < running:
            continue
        source, target, bias = (
            int(state_idx[request]),
            boundary // block_size - 1,
            boundary - running,
        )
        if source == target:
            num_accepted_out[request] = 1
            if bias == 0:
                continue
        copies.copy(request, source, target, bias)


def _unpack(layout: Any, named: dict[str, Any]) -> tuple[StateCopies, Tensor | None, int]:
    *tables, idx_mapping, num_reqs = layout
    fields = [*tables, bool(named["CONV_STATE_DIM_FIRST"])]
    return StateCopies(*fields), idx_mapping, num_reqs


def _requests(idx_mapping: Tensor | None, num_reqs: int) -> list[int]:
    if idx_mapping is None:
        return list(range(num_reqs))
    return [request for request in idx_mapping[:num_reqs].tolist() if request >= 0]


def _int32_table(pointer: Tensor, rows: int, width: int) -> np.ndarray:
    """View of a row-major int32 table by its address."""
    address = ctypes.cast(int(pointer), ctypes.POINTER(ctypes.c_int32))
    return np.ctypeslib.as_array(address, shape=(rows, width))
