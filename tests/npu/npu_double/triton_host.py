"""Triton kernels of vLLM, vllm-ascend and the plugin on the double: upstream Triton's interpreter.

Its semantics are upstream's, not triton-ascend's; whether a kernel lowers for Ascend is what
tests/npu/test_lowering.py checks.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from .graphs import Graphs

CORES = {"num_aicore": 20, "num_vectorcore": 40}


def install(graphs: Graphs) -> None:
    """Call before vLLM is imported, with TRITON_INTERPRET=1 in the environment.

    graphs: gets the launches of a capture, to replay them.
    """
    # vllm_ascend puts empty modules in place of these where nobody has imported them, and the
    # interpreter needs the real ones.
    import triton.experimental.gluon
    import triton.experimental.gluon.language  # noqa: F401
    from interpreter import mend_interpreter
    from triton.backends import backends
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    for name in ("create_masked_load", "create_masked_store"):
        setattr(InterpreterBuilder, name, _with_boolean_mask(getattr(InterpreterBuilder, name)))
    # Device memory is host memory: pointers are usable as they are.
    GridExecutor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    GridExecutor._restore_args_dev = lambda self, *_: None
    launch = GridExecutor.__call__

    def kept(self: Any, *args: Any, **named: Any) -> None:
        launch(self, *args, **named)
        graphs.note(lambda: launch(self, *args, **named))

    GridExecutor.__call__ = kept
    mend_interpreter()
    _set_driver()
    _offer_ascend_extensions()


def _with_boolean_mask(original: Any) -> Any:
    """Compiled kernels take integer masks; the interpreter does not."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def with_boolean_mask(self: Any, *args: Any) -> Any:
        masks = [
            TensorHandle(arg.data.astype(bool), tl.int1) if position == mask_position else arg
            for position, arg in enumerate(args)
        ]
        return original(self, *masks)

    mask_position = 1 if original.__name__ == "create_masked_load" else 2
    return with_boolean_mask


def _set_driver() -> None:
    import torch
    import triton

    target = SimpleNamespace(backend="npu", arch="Ascend910B3", warp_size=0)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            utils=SimpleNamespace(get_device_properties=lambda device: CORES),
            get_current_device=lambda: 0,
            get_current_target=lambda: target,
            get_current_stream=lambda device=0: 0,
            get_active_torch_device=lambda: torch.device("npu", 0),
            get_device_interface=lambda: torch.npu,
        )
    )


def _offer_ascend_extensions() -> None:
    """`triton.language.extra.cann`: triton-ascend's additions to the language, in NumPy."""
    import triton.language.extra

    cann = ModuleType("triton.language.extra.cann")
    cann.__path__ = []
    cann.extension = ModuleType(f"{cann.__name__}.extension")
    cann.libdevice = ModuleType(f"{cann.__name__}.libdevice")
    cann.libdevice.isnan = lambda x: x != x
    for function in (insert_slice, extract_slice, get_element):
        setattr(cann.extension, function.__name__, function)
    cann.extension.compile_hint = lambda *_, **__: None
    for module in (cann, cann.extension, cann.libdevice):
        sys.modules[module.__name__] = module
    triton.language.extra.cann = cann


def insert_slice(full: Any, part: Any, offsets: Any, sizes: Any, strides: Any, **_: Any) -> Any:
    """`full` with `part` at the offsets."""
    values = full.handle.data.copy()
    values[_slices(offsets, sizes, strides)] = part.handle.data
    return _block(values, full.dtype)


def extract_slice(full: Any, offsets: Any, sizes: Any, strides: Any, **_: Any) -> Any:
    """The part of `full` at the offsets."""
    return _block(full.handle.data[_slices(offsets, sizes, strides)].copy(), full.dtype)


def get_element(source: Any, indices: Any, **_: Any) -> Any:
    """One element as a scalar."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    element = source.handle.data[tuple(_integers(indices))]
    scalar = source.dtype.scalar
    return tl.core.tensor(TensorHandle(np.array([element]), scalar), scalar)


def _block(values: np.ndarray, dtype: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    block = tl.core.block_type(dtype.scalar, list(values.shape))
    return tl.core.tensor(TensorHandle(values, dtype.scalar), block)


def _slices(offsets: Any, sizes: Any, strides: Any) -> tuple[slice, ...]:
    triples = zip(_integers(offsets), _integers(sizes), _integers(strides), strict=True)
    return tuple(slice(start, start + size * step, step) for start, size, step in triples)


def _integers(values: Any) -> list[int]:
    """Whole numbers, constants or interpreted scalars."""
    return [
        int(value.handle.data.item())
        if hasattr(value, "handle")
        else int(getattr(value, "value", value))
        for value in values
    ]
