"""Verification in the replay layout by `csrc/cuda/gdn_verify.cu`. Contract: `replay.py`.

The library has a C interface and knows nothing of torch, so one build serves every torch version.
It takes d = 128, at most 8 rows a step and rings of at most 32 rows; `obstacle` says what else
keeps a call from it, and the Triton kernel of `replay.py` then serves the call.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import _cuda_library
from .._launch import device_cores
from . import replay
from .layout import ReplayCache, StepCursor
from .rows import checked_rows

logger = logging.getLogger(__name__)

DIM, MAX_ROWS, MAX_RING = 128, 8, 32
# Timed on an H200 with 32 heads: a warp a head takes less at 32 requests of 1 row (level in fp32),
# at 64 of 8 rows 2 % less in bf16 and 19 % more in fp32, at 256 of 8 rows 8 and 35 % more.
WAVES = {torch.bfloat16: 2, torch.float32: 1}
_POINTERS = (
    "q", "k", "v", "a", "b", "A_log", "dt_bias", "query_start_loc", "slots", "start", "pending",
    "flush", "state", "keys", "updates", "log_decay", "key_norm", "out",
)  # fmt: skip
_STRIDES = (
    "q_row", "k_row", "v_row", "gate_row", "out_row", "state_slot", "key_slot", "update_slot",
    "decay_slot", "norm_slot",
)  # fmt: skip
_COUNTS = ("requests", "value_heads", "group", "ring_rows", "dt_bias_is_bf16")


class _Arguments(ctypes.Structure):
    """`gdn::Arguments`."""

    _fields_ = [
        *((name, c_void_p) for name in _POINTERS),
        *((name, c_int64) for name in _STRIDES),
        *((name, c_int32) for name in _COUNTS),
        ("scale", c_float),
    ]


@dataclass(frozen=True)
class Variant:
    """A compiled launch cut: its number in the library, what it is, and the state's type.

    heads: value heads that one multiprocessor has in work at once.
    """

    number: int
    name: str
    state_dtype: torch.dtype
    heads: int


class Library:
    """The opened library, and its launch cuts."""

    def __init__(self, path: Path) -> None:
        """OSError if the file cannot be loaded, RuntimeError if its interface is another one."""
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.gdn_verify_variant_name.restype = ctypes.c_char_p
        self._library.gdn_verify_error.restype = ctypes.c_char_p
        self._library.gdn_verify_launch.argtypes = [
            ctypes.POINTER(_Arguments), ctypes.c_int, c_void_p,
        ]  # fmt: skip
        if self._library.gdn_verify_argument_bytes() != ctypes.sizeof(_Arguments):
            raise RuntimeError(f"{path} was built from other sources; build it again")
        self.variants = [self._variant(i) for i in range(self._library.gdn_verify_variant_count())]

    def _variant(self, number: int) -> Variant:
        wide = self._library.gdn_verify_variant_is_fp32(number)
        return Variant(
            number, self._library.gdn_verify_variant_name(number).decode(),
            torch.float32 if wide else torch.bfloat16,
            self._library.gdn_verify_variant_heads(number),
        )  # fmt: skip

    def pick(self, state_dtype: torch.dtype, heads: int, multiprocessors: int) -> Variant:
        """The launch cut for so many value heads (requests times HV).

        What fits the device at once (WAVES times) goes to warps that take a whole head: there are
        no later blocks whose copies could hide behind it.
        """
        many, few, *_ = (v for v in self.variants if v.state_dtype == state_dtype)
        waves = WAVES[state_dtype]
        return few if heads <= waves * few.heads * multiprocessors else many

    def launch(self, arguments: _Arguments, variant: Variant, device: torch.device) -> None:
        """RuntimeError with CUDA's words if the launch is refused."""
        on_gpu = device.type == "cuda"
        error = self._library.gdn_verify_launch(
            ctypes.byref(arguments), variant.number,
            torch.cuda.current_stream(device).cuda_stream if on_gpu else None,
        )  # fmt: skip
        if error:
            raise RuntimeError(
                f"gdn_verify, {variant.name}: {self._library.gdn_verify_error(error).decode()}"
            )


@functools.cache
def library() -> Library:
    """The library of this host; MissingLibraryError if it has none."""
    return Library(_cuda_library.library("gdn_verify"))


def unavailable() -> str | None:
    """Why no call on this host can take the kernel, or None. May build the library."""
    return _cuda_library.unavailable(library)


def obstacle(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    head: tuple[Tensor, Tensor],
    cache: ReplayCache,
    out: Tensor,
    max_rows: int,
) -> str | None:
    """Why this kernel cannot take such a call, or None. Reads shapes, dtypes and addresses only.

    rows: q, k, v, a. head: A_log, dt_bias.
    """
    layout = cache.layout
    if (layout.key_dim, layout.value_dim) != (DIM, DIM):
        return f"head dimensions are {layout.key_dim} and {layout.value_dim}, not {DIM}"
    if max_rows > MAX_ROWS or layout.ring_rows > MAX_RING:
        return (
            f"{max_rows} rows a step and a ring of {layout.ring_rows}, more than {MAX_ROWS} and "
            f"{MAX_RING}"
        )
    if any(x.dtype != torch.bfloat16 for x in (*rows, out)):
        return f"rows are {[str(x.dtype) for x in rows]} and outputs {out.dtype}, not bfloat16"
    A_log, dt_bias = head
    if A_log.dtype != torch.float32 or dt_bias.dtype not in (torch.float32, torch.bfloat16):
        return f"A_log is {A_log.dtype} and dt_bias {dt_bias.dtype}, not float32"
    wide = (*rows[:3], out, *(x for x in cache.tensors() if x.shape[-1] == DIM))
    if any(x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16 for x in wide):
        return "rows or slots do not begin at multiples of 16 bytes"
    return None


@functools.cache
def _say_once(reason: str) -> None:
    logger.info("replay_verify runs as triton: %s", reason)


def replay_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    step: StepCursor,
    cache: ReplayCache,
    out: Tensor | None = None,
    max_rows: int = MAX_ROWS,
    scale: float | None = None,
    opened: Library | None = None,
    variant: Variant | None = None,
) -> Tensor:
    """As `replay.replay_verify`, with everything bfloat16 but A_log (fp32) and dt_bias (either).

    Args:
        opened: None takes the library of this host, and Triton's kernel for a call that has an
            `obstacle`. variant: a launch cut of it; None picks by the number of heads.

    Raises:
        ValueError: shapes, dtypes or strides that neither kernel takes, or that `opened` does not.
        RuntimeError: CUDA refused the launch.
    """
    layout = cache.check()
    out, row_strides = checked_rows(q, k, v, a, b, out)
    reason = obstacle((q, k, v, a), (A_log, dt_bias), cache, out, max_rows)
    if reason and opened is None:
        _say_once(reason)
        return replay.replay_verify(
            q, k, v, a, b, A_log, dt_bias, query_start_loc, slots, step, cache, out, max_rows, scale
        )
    if reason:
        raise ValueError(f"the CUDA kernel of gdn_verify cannot run: {reason}; use replay.py")
    replay.check_ring(layout.ring_rows, max_rows)
    requests = slots.shape[0]
    if requests == 0 or v.shape[0] == 0:
        return out
    opened = opened or library()
    variant = variant or opened.pick(
        layout.state_dtype, requests * layout.value_heads,
        device_cores(q.device) if q.device.type == "cuda" else 1,
    )  # fmt: skip
    if variant.state_dtype != layout.state_dtype:
        raise ValueError(f"{variant.name} is for {variant.state_dtype}, not {layout.state_dtype}")
    tensors = (
        q, k, v, a, b, A_log, dt_bias, query_start_loc, slots, step.start, step.pending, step.flush,
        *cache.tensors(), out,
    )  # fmt: skip
    arguments = _Arguments(
        *(x.data_ptr() for x in tensors),
        *row_strides, *(x.stride(0) for x in cache.tensors()),
        requests, layout.value_heads, layout.value_heads // layout.key_heads, layout.ring_rows,
        dt_bias.dtype == torch.bfloat16, layout.key_dim**-0.5 if scale is None else scale,
    )  # fmt: skip
    opened.launch(arguments, variant, q.device)
    return out
