"""Verification in the replay layout by `csrc/cuda/gdn_verify.cu`. Contract: `replay.py`.

The library has a C interface and knows nothing of torch, so one build serves every torch version.
It takes d = 128, at most 8 rows a step and rings of at most 32 rows; `obstacle` says what else
keeps a call from it, and `replay.py` then has the Triton kernel.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .layout import ReplayCache, StepCursor
from .triton import check_rows

DIM, MAX_ROWS, MAX_RING = 128, 8, 32
_FILE = "libgdn_verify.so"
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
    """A compiled launch cut: its number in the library, what it is, and the state's type."""

    number: int
    name: str
    state_dtype: torch.dtype


class Library:
    """The opened library, and its launch cuts."""

    def __init__(self, path: Path) -> None:
        """OSError if the file cannot be loaded, RuntimeError if its interface is another one."""
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.gdn_verify_variant_name.restype = ctypes.c_char_p
        self._library.gdn_verify_error.restype = ctypes.c_char_p
        self._library.gdn_verify_launch.argtypes = [
            ctypes.POINTER(_Arguments), ctypes.c_int, ctypes.c_int, c_void_p,
        ]  # fmt: skip
        if self._library.gdn_verify_argument_bytes() != ctypes.sizeof(_Arguments):
            raise RuntimeError(f"{path} was built from other sources; build it again")
        self.variants = [
            Variant(i, self._library.gdn_verify_variant_name(i).decode(), self._state_dtype(i))
            for i in range(self._library.gdn_verify_variant_count())
        ]

    def _state_dtype(self, variant: int) -> torch.dtype:
        wide = self._library.gdn_verify_variant_is_fp32(variant)
        return torch.float32 if wide else torch.bfloat16

    def default(self, state_dtype: torch.dtype) -> Variant:
        """The first of the dtype: the list is in the order of preference."""
        return next(v for v in self.variants if v.state_dtype == state_dtype)

    def launch(self, arguments: _Arguments, variant: Variant, device: torch.device) -> None:
        """RuntimeError with CUDA's words if the launch is refused."""
        on_gpu = device.type == "cuda"
        error = self._library.gdn_verify_launch(
            ctypes.byref(arguments), variant.number, _multiprocessors(device) if on_gpu else 1,
            torch.cuda.current_stream(device).cuda_stream if on_gpu else None,
        )  # fmt: skip
        if error:
            raise RuntimeError(
                f"gdn_verify, {variant.name}: {self._library.gdn_verify_error(error).decode()}"
            )


@functools.cache
def library() -> Library | None:
    """The library that was built with the package, or None."""
    import vllm_ascend_spec

    for folder in vllm_ascend_spec.__path__:
        if (Path(folder) / _FILE).exists():
            return Library(Path(folder) / _FILE)
    return None


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def obstacle(cache: ReplayCache, out: Tensor, a: Tensor, max_rows: int) -> str | None:
    """Why this kernel cannot take such a call, or None. Reads shapes and dtypes only."""
    layout = cache.layout
    if (layout.key_dim, layout.value_dim) != (DIM, DIM):
        return f"head dimensions are {layout.key_dim} and {layout.value_dim}, not {DIM}"
    if max_rows > MAX_ROWS or layout.ring_rows > MAX_RING:
        return (
            f"{max_rows} rows a step and a ring of {layout.ring_rows}, more than {MAX_ROWS} and "
            f"{MAX_RING}"
        )
    if out.dtype != torch.bfloat16 or a.dtype != torch.bfloat16:
        return f"outputs are {out.dtype} and gates {a.dtype}, not bfloat16"
    strided = (*cache.tensors(), out)
    if any(x.stride(0) * x.element_size() % 16 for x in strided if x.shape[-1] == DIM):
        return "rows or slots do not begin at multiples of 16 bytes"
    return None


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
    out: Tensor,
    max_rows: int,
    scale: float,
    opened: Library,
    variant: Variant | None = None,
) -> Tensor:
    """As `replay.replay_verify`, with everything bfloat16 but A_log (fp32) and dt_bias (either).

    Raises:
        ValueError: shapes, dtypes or strides that the kernel does not take.
        RuntimeError: CUDA refused the launch.
    """
    layout = cache.check()
    check_rows(q, k, v, a, b)
    reason = obstacle(cache, out, a, max_rows)
    if reason:
        raise ValueError(f"the CUDA kernel of gdn_verify cannot run: {reason}; use replay.py")
    if any(x.stride(0) % 8 or x.data_ptr() % 16 for x in (q, k, v, out)):
        raise ValueError("rows of q, k, v and out must begin at multiples of 16 bytes")
    if A_log.dtype != torch.float32 or dt_bias.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"A_log must be float32 and dt_bias float32 or bfloat16, got {A_log.dtype} and "
            f"{dt_bias.dtype}"
        )
    variant = variant or opened.default(layout.state_dtype)
    if variant.state_dtype != layout.state_dtype:
        raise ValueError(f"{variant.name} is for {variant.state_dtype}, not {layout.state_dtype}")
    if slots.shape[0] == 0:
        return out
    tensors = (
        q, k, v, a, b, A_log, dt_bias, query_start_loc, slots, step.start, step.pending, step.flush,
        *cache.tensors(), out,
    )  # fmt: skip
    arguments = _Arguments(
        *(x.data_ptr() for x in tensors),
        *(x.stride(0) for x in (q, k, v, a, out, *cache.tensors())),
        slots.shape[0], layout.value_heads, layout.value_heads // layout.key_heads,
        layout.ring_rows, dt_bias.dtype == torch.bfloat16, scale,
    )  # fmt: skip
    opened.launch(arguments, variant, q.device)
    return out
