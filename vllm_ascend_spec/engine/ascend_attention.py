"""Arguments of `torch_npu.npu_fused_infer_attention_score` in TND layout, checked before the call.

The operator's own wrapper accepts lengths that do not add up, a float block table and a head count
that divides nothing; CANN then fails inside the step (error 561002) or reads foreign cache. Here
each argument is checked on the host, from sizes that the host knows, without a device wait.

Meaning of the lengths, after vllm-ascend 182b75e (attention/attention_v1.py): query ends are
cumulative without a leading 0, and the last one is the number of query rows, padding included; KV
lengths are per request with a block table, cumulative without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

MASK_SIZE = 2048  # the compressed causal mask, whatever the lengths
BLOCK_SIZE = 128  # tokens a block: what vllm-ascend's attention backend declares
NO_LIMIT = 2**31 - 1
MASK_DTYPES = (torch.int8, torch.uint8, torch.bool)


class SparseMode(IntEnum):
    """Which keys a query sees."""

    ALL = 0  # drafters that fill a block at once
    CAUSAL = 3  # aligned at the last token of queries and keys
    BAND = 4  # sliding window


class AttentionArgumentError(ValueError):
    """An argument that the operator would take and answer wrong, or fail on inside the step."""


def fused_infer_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_ends: Sequence[int],
    kv_lengths: Sequence[int],
    kv_heads: int,
    scale: float,
    sparse_mode: SparseMode,
    block_table: Tensor | None = None,
    mask: Tensor | None = None,
    window: int | None = None,
) -> dict[str, Any]:
    """Keyword arguments of the call.

    Args:
        query: [T, heads, D], bfloat16 or float16.
        key, value: caches [blocks, 128, kv_heads, D] or [blocks, 128, kv_heads * D] with a block
            table, else [S, kv_heads, D]; the query's dtype and device.
        query_ends: [R] on the host, cumulative; the last one is T. A padding request may be empty.
        kv_lengths: [R] on the host: tokens each request attends to, its own rows included, or 0
            for padding; without a block table cumulative, and the last one is S.
        block_table: [R or more, columns] int32.
        mask: [2048, 2048] int8, uint8 or bool, 1 above the diagonal; for CAUSAL and BAND only.
        window: tokens before its own that a query sees, for BAND only.

    Raises:
        AttentionArgumentError: names the argument and what it has to be.
    """
    _check_query(query, kv_heads, scale)
    ends = _host_list("query_ends", query_ends)
    lengths = _host_list("kv_lengths", kv_lengths)
    _check_query_ends(ends, query.shape[0])
    if len(lengths) != len(ends):
        _refuse("kv_lengths", f"has {len(lengths)} requests, query_ends has {len(ends)}")
    if block_table is None:
        _check_rows(query, key, value, kv_heads)
        _check_cumulative_kv(lengths, key.shape[0])
        block_size = 0
    else:
        key, value = (
            _flat_cache(name, cache, query, kv_heads)
            for name, cache in (("key", key), ("value", value))
        )
        if key.shape != value.shape:
            _refuse("value", f"has shape {list(value.shape)}, key {list(key.shape)}")
        block_size = key.shape[1]
        _check_block_table(block_table, query, len(ends))
        _check_kv_lengths(lengths, ends, block_table.shape[1] * block_size)
    _check_mask(sparse_mode, mask, window, query)
    return {
        "query": query, "key": key, "value": value, "atten_mask": mask,
        "block_table": block_table, "block_size": block_size, "input_layout": "TND",
        "actual_seq_lengths": ends, "actual_seq_lengths_kv": lengths,
        "num_heads": query.shape[1], "num_key_value_heads": kv_heads, "scale": float(scale),
        "sparse_mode": int(sparse_mode), "pre_tokens": NO_LIMIT if window is None else window,
        "next_tokens": NO_LIMIT if window is None else 0,
    }  # fmt: skip


def check_call(arguments: dict[str, Any]) -> None:
    """Check the keyword arguments of somebody else's call in TND layout, as if built here.

    Raises:
        AttentionArgumentError: names the argument and what it has to be.
    """
    if arguments.get("input_layout") != "TND":
        _refuse("input_layout", f"is {arguments.get('input_layout')}; only TND is checked")
    query = arguments["query"]
    if arguments.get("num_heads") != query.shape[1]:
        _refuse("num_heads", f"is {arguments.get('num_heads')}, query has {query.shape[1]} heads")
    mode = arguments.get("sparse_mode", SparseMode.ALL)
    fused_infer_arguments(
        query, arguments["key"], arguments["value"],
        query_ends=arguments["actual_seq_lengths"], kv_lengths=arguments["actual_seq_lengths_kv"],
        kv_heads=arguments["num_key_value_heads"], scale=arguments["scale"], sparse_mode=mode,
        block_table=arguments.get("block_table"), mask=arguments.get("atten_mask"),
        window=arguments.get("pre_tokens") if mode == SparseMode.BAND else None,
    )  # fmt: skip


def with_lengths(
    arguments: dict[str, Any], query_ends: Sequence[int], kv_lengths: Sequence[int]
) -> dict[str, Any]:
    """The arguments of a captured call with the lengths of another step: what a task update takes.

    Rows, requests and tensors stay those of the capture.

    Raises:
        AttentionArgumentError: the lengths do not fit what was captured.
    """
    captured = len(arguments["actual_seq_lengths"])
    ends, lengths = _host_list("query_ends", query_ends), _host_list("kv_lengths", kv_lengths)
    for name, given in (("query_ends", ends), ("kv_lengths", lengths)):
        if len(given) != captured:
            _refuse(name, f"has {len(given)} requests, the graph was captured with {captured}")
    _check_query_ends(ends, arguments["query"].shape[0])
    table = arguments["block_table"]
    if table is None:
        _check_cumulative_kv(lengths, arguments["key"].shape[0])
    else:
        _check_kv_lengths(lengths, ends, table.shape[1] * arguments["block_size"])
    return arguments | {"actual_seq_lengths": ends, "actual_seq_lengths_kv": lengths}


def _refuse(argument: str, problem: str) -> NoReturn:
    raise AttentionArgumentError(f"fused_infer_attention: {argument} {problem}")


def _host_list(name: str, lengths: Sequence[int]) -> list[int]:
    if isinstance(lengths, Tensor):
        _refuse(name, "is a tensor: the operator takes host integers, and copying would wait")
    if not lengths:
        _refuse(name, "is empty: one entry a request is needed")
    for length in lengths:
        if isinstance(length, bool) or not hasattr(length, "__index__"):
            _refuse(name, f"holds {length!r}, which is no integer")
    return [int(length) for length in lengths]


def _check_query(query: Tensor, kv_heads: int, scale: float) -> None:
    if query.dim() != 3:
        _refuse("query", f"has {query.dim()} dimensions; TND layout is [tokens, heads, head size]")
    if query.dtype not in (torch.bfloat16, torch.float16):
        _refuse("query", f"is {query.dtype}; the operator takes bfloat16 or float16")
    if kv_heads < 1 or query.shape[1] % kv_heads:
        _refuse("kv_heads", f"is {kv_heads}, which does not divide {query.shape[1]} query heads")
    if not (math.isfinite(scale) and scale > 0):
        _refuse("scale", f"is {scale}; a positive number is needed")


def _check_query_ends(ends: list[int], rows: int) -> None:
    if any(last < first for first, last in pairwise([0, *ends])):
        _refuse("query_ends", f"{ends} falls: it is cumulative and has no leading 0")
    if ends[-1] != rows:
        _refuse(
            "query_ends",
            f"ends at {ends[-1]}, query has {rows} rows; rows of padding need a padding request",
        )


def _check_kv_lengths(lengths: list[int], ends: list[int], capacity: int) -> None:
    for request, (length, (first, last)) in enumerate(
        zip(lengths, pairwise([0, *ends]), strict=True)
    ):
        # vllm-ascend lets the padding of a captured launch attend to nothing.
        if length != 0 and length < last - first:
            _refuse(
                "kv_lengths",
                f"gives request {request} {length} tokens, it has {last - first} query rows; its "
                "own rows count, and only padding may have 0",
            )
        if length > capacity:
            _refuse(
                "kv_lengths",
                f"gives request {request} {length} tokens, its row of the block table holds "
                f"{capacity}; with a block table lengths are per request, not cumulative",
            )


def _check_cumulative_kv(lengths: list[int], rows: int) -> None:
    if any(last < first for first, last in pairwise([0, *lengths])) or lengths[-1] != rows:
        _refuse(
            "kv_lengths",
            f"{lengths} must rise to the {rows} rows of key: cumulative without a block table",
        )


def _check_rows(query: Tensor, key: Tensor, value: Tensor, kv_heads: int) -> None:
    for name, rows in (("key", key), ("value", value)):
        _check_like(name, rows, query)
        if rows.dim() != 3 or rows.shape[1:] != (kv_heads, query.shape[2]):
            expected = f"[tokens, {kv_heads}, {query.shape[2]}]"
            _refuse(name, f"has shape {list(rows.shape)}; without a block table it is {expected}")
    if key.shape != value.shape:
        _refuse("value", f"has {value.shape[0]} rows, key {key.shape[0]}")


def _flat_cache(name: str, cache: Tensor, query: Tensor, kv_heads: int) -> Tensor:
    """The cache as [blocks, block size, kv_heads * D], without a copy."""
    _check_like(name, cache, query)
    size = query.shape[2]
    if cache.dim() == 4 and tuple(cache.shape[2:]) == (kv_heads, size):
        try:
            cache = cache.view(*cache.shape[:2], kv_heads * size)
        except RuntimeError:
            _refuse(name, "has heads that are not contiguous inside a token")
    if cache.dim() != 3 or cache.shape[2] != kv_heads * size:
        _refuse(
            name,
            f"has shape {list(cache.shape)}; a paged cache is [blocks, {BLOCK_SIZE}, {kv_heads}, "
            f"{size}] or [blocks, {BLOCK_SIZE}, {kv_heads * size}]",
        )
    if cache.shape[1] != BLOCK_SIZE:
        _refuse(name, f"has blocks of {cache.shape[1]} tokens; set block_size to {BLOCK_SIZE}")
    return cache


def _check_like(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.dtype != query.dtype:
        _refuse(name, f"is {tensor.dtype}, query is {query.dtype}")
    if tensor.device != query.device:
        _refuse(name, f"is on {tensor.device}, query on {query.device}")


def _check_block_table(table: Tensor, query: Tensor, requests: int) -> None:
    if table.dtype != torch.int32:
        _refuse("block_table", f"is {table.dtype}; it has to be int32")
    if table.device != query.device:
        _refuse("block_table", f"is on {table.device}, query on {query.device}")
    if table.dim() != 2 or table.shape[0] < requests or not table.shape[1]:
        _refuse(
            "block_table", f"has shape {list(table.shape)}; it needs a row for {requests} requests"
        )


def _check_mask(mode: SparseMode, mask: Tensor | None, window: int | None, query: Tensor) -> None:
    if mode not in tuple(SparseMode):
        known = ", ".join(f"{m.value} ({m.name})" for m in SparseMode)
        _refuse("sparse_mode", f"is {mode}; used are {known}")
    if (window is not None) != (mode == SparseMode.BAND):
        _refuse(
            "window",
            f"is {window} in sparse mode {int(mode)}: it belongs to BAND, and BAND needs it",
        )
    if window is not None and window < 1:
        _refuse("window", f"is {window}; it has to be 1 or more")
    if mode == SparseMode.ALL:
        if mask is not None:
            _refuse(
                "mask", "is given, and mode ALL would apply it: it hides the block's later rows"
            )
        return
    if mask is None:
        _refuse("mask", f"is missing: sparse mode {int(mode)} masks by it")
    elif tuple(mask.shape) != (MASK_SIZE, MASK_SIZE) or mask.dtype not in MASK_DTYPES:
        _refuse(
            "mask", f"is {mask.dtype} {list(mask.shape)}; it is [{MASK_SIZE}, {MASK_SIZE}] int8"
        )
    elif mask.device != query.device:
        _refuse("mask", f"is on {mask.device}, query on {query.device}")
