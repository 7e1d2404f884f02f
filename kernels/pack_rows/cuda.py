"""`pack_rows` by `csrc/cuda/pack_rows.cu`: one launch of one block.

Contract: the package's docstring.

The library has a C interface and knows nothing of torch, so one build serves every torch version.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from .. import _cuda_library
from . import Batch, PackedRows, ScoreKind, check_shapes, triton

logger = logging.getLogger(__name__)

_SCORE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_POINTERS = (
    "scores", "score_rows", "draft_counts", "caps", "base_rows", "budget_at", "requests_at",
    "draft_lengths", "query_start_loc", "cu_num_logits",
)  # fmt: skip
_COUNTS = (
    "budget", "real_requests", "requests", "positions", "start_loc_size", "logits_size",
    "bonus_tokens", "is_product",
)  # fmt: skip


class _Arguments(ctypes.Structure):
    """`pack::Arguments`."""

    _fields_ = [
        *((name, c_void_p) for name in _POINTERS),
        ("score_stride", c_int64),
        *((name, c_int32) for name in _COUNTS),
    ]


class Library:
    """The opened library."""

    def __init__(self, path: Path) -> None:
        """OSError if the file cannot be loaded, RuntimeError if its interface is another one."""
        library = ctypes.CDLL(str(path))
        if library.pack_rows_argument_bytes() != ctypes.sizeof(_Arguments):
            raise RuntimeError(f"{path} was built from other sources; build it again")
        self._launch = library.pack_rows_launch
        self._launch.argtypes = [ctypes.POINTER(_Arguments), ctypes.c_int, c_void_p]

    def launch(self, arguments: _Arguments, scores: Tensor) -> None:
        """RuntimeError with CUDA's number if the launch is refused."""
        stream = None
        if scores.device.type == "cuda":
            stream = torch.cuda.current_stream(scores.device).cuda_stream
        error = self._launch(ctypes.byref(arguments), _SCORE_TYPES[scores.dtype], stream)
        if error:
            raise RuntimeError(f"pack_rows: CUDA error {error}")


@functools.cache
def library() -> Library:
    """The library of this host; MissingLibraryError if it has none."""
    return Library(_cuda_library.library("pack_rows"))


def unavailable() -> str | None:
    """Why no call on this host can take the kernel, or None. May build the library."""
    return _cuda_library.unavailable(library)


def obstacle(scores: Tensor, integers: dict[str, Tensor | None]) -> str | None:
    """Why this kernel cannot take such a call, or None. Reads types and strides only."""
    if scores.dtype not in _SCORE_TYPES or (scores.shape[1] > 1 and scores.stride(1) != 1):
        return (
            f"scores must be float32, float16 or bfloat16 with contiguous rows, got {scores.dtype} "
            f"with strides {scores.stride()}"
        )
    for name, tensor in integers.items():
        if tensor is not None and (tensor.dtype != torch.int32 or not tensor.is_contiguous()):
            return f"{name} must be contiguous int32, got {tensor.dtype}"
    return None


@functools.cache
def _say_once(reason: str) -> None:
    logger.info("pack_rows runs as triton: %s", reason)


def pack_rows(
    scores: Tensor,
    budget: int | Tensor,
    batch: Batch,
    out: PackedRows,
    opened: Library | None = None,
    *,
    kind: ScoreKind = "confidence",
    bonus_tokens: int = 1,
) -> PackedRows:
    """As `triton.pack_rows`; device scalars and all of `batch` are int32, score rows contiguous.

    opened: None takes the library of this host, and Triton's kernel for a call that has an
    `obstacle`.

    Raises:
        ValueError: names the argument that neither kernel takes, or that `opened` does not.
        RuntimeError: CUDA refused the launch.
    """
    requests, positions = check_shapes(scores, batch, out)
    count = requests if batch.num_requests is None else batch.num_requests
    integers = {
        "score_rows": batch.score_rows,
        "draft_counts": batch.draft_counts,
        "caps": batch.caps,
        "base_rows": batch.base_rows,
        "budget": budget if isinstance(budget, Tensor) else None,
        "num_requests": count if isinstance(count, Tensor) else None,
    }
    reason = obstacle(scores, integers)
    if reason and opened is None:
        _say_once(reason)
        return triton.pack_rows(scores, budget, batch, out, kind=kind, bonus_tokens=bonus_tokens)
    if reason:
        raise ValueError(f"the CUDA kernel of pack_rows cannot run: {reason}; use triton.py")
    if requests == 0:
        for offsets in (out.query_start_loc, out.cu_num_logits):
            offsets.zero_()
        return out
    pointers = (
        scores, *integers.values(), out.draft_lengths, out.query_start_loc, out.cu_num_logits
    )  # fmt: skip
    arguments = _Arguments(
        *(None if x is None else x.data_ptr() for x in pointers),
        scores.stride(0),
        0 if isinstance(budget, Tensor) else budget,
        0 if isinstance(count, Tensor) else count,
        requests, positions, out.query_start_loc.shape[0], out.cu_num_logits.shape[0],
        bonus_tokens, kind == "confidence",
    )  # fmt: skip
    (opened or library()).launch(arguments, scores)
    return out
