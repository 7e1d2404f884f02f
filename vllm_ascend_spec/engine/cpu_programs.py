"""Runs a Triton kernel's programs all at once in NumPy, from the kernel's own source.

Triton's interpreter runs one program after another: a step of 128 requests costs seconds. Here the
kernel's function is called once, with values that carry every program (`cpu_language`). Where
programs part at a branch, each side is run on its own from the start; stores wait until all sides
are through, so nothing is stored twice. A kernel that uses more of Triton
than is covered is left to Triton's interpreter, for good. Drawn draft tokens need a function of
CUDA's library that the interpreter does not have, so they run here alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_ascend_spec.engine.cpu_language import (
    Array,
    DivergedError,
    Memory,
    Pointer,
    UnsupportedError,
    Value,
    _round_to_bfloat,
    as_value,
    pair,
)

logger = logging.getLogger("vllm.ascend_spec.cpu")

# How a kernel's programs run: ONE_BY_ONE leaves them to Triton's interpreter, for comparison.
VARIABLE = "VLLM_ASCEND_SPEC_CPU_PROGRAMS"
ONE_BY_ONE = "one_by_one"

left_out: dict[Any, str] = {}  # kernels that Triton's interpreter keeps, with the reason


@dataclass
class _Store:
    memory: Memory
    places: Array
    values: Array


@dataclass
class _Launch:
    """The programs that run now. ids: int64 [programs, 3]; grid: programs along each axis."""

    ids: Array
    grid: tuple[int, int, int]
    stores: list[_Store] = field(default_factory=list)


class _Language:
    """Stands in for `triton.language` in a kernel's globals."""

    def __init__(self, launch: _Launch) -> None:
        self._launch = launch

    def __getattr__(self, name: str) -> Any:
        import triton.language as tl

        found = getattr(tl, name)
        if isinstance(found, tl.dtype) or found is tl.pointer_type:
            return found
        if hasattr(found, "fn") and hasattr(found, "arg_names"):
            return _device_function(found, self._launch)
        raise UnsupportedError(f"tl.{name}")

    # -- programs and ranges --

    def program_id(self, axis: int) -> Value:
        return Value(self._launch.ids[:, int(axis)].astype(np.int32)[:, None])

    def num_programs(self, axis: int) -> Value:
        return as_value(int(self._launch.grid[int(axis)]))

    def arange(self, start: Any, end: Any) -> Value:
        return Value(np.arange(int(start), int(end), dtype=np.int32)[None])

    @staticmethod
    def static_range(*limits: Any, **_named: Any) -> range:
        return range(*(int(limit) for limit in limits))

    range = static_range

    @staticmethod
    def to_tensor(value: Any) -> Value:
        return as_value(value)

    @staticmethod
    def add(x: Any, y: Any, **_overflow: Any) -> Any:
        return x + y

    @staticmethod
    def mul(x: Any, y: Any, **_overflow: Any) -> Any:
        return x * y

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value

    @staticmethod
    def static_assert(condition: Any, _message: str = "") -> None:
        assert condition

    @staticmethod
    def debug_barrier() -> None:
        return None

    @staticmethod
    def multiple_of(value: Any, _count: Any) -> Any:
        return value

    # -- memory --

    def load(self, pointer: Any, mask: Any = None, other: Any = None, **_hints: Any) -> Value:
        if not isinstance(pointer, Pointer):
            raise UnsupportedError("a pointer out of memory")
        held = np.ones((1, 1), np.bool_) if mask is None else as_value(mask).data
        offset, held = np.broadcast_arrays(pointer.offset, held)
        memory = pointer.memory
        place = np.where(held, offset, 0)
        if place.size and (place.min() < 0 or place.max() >= memory.flat.size):
            raise UnsupportedError("an address outside its storage")
        values = self._current(memory, offset[held])[place]
        if memory.bfloat:
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if not held.all():
            fill = 0 if other is None else as_value(other).data
            values = np.where(held, values, np.asarray(fill).astype(values.dtype))
        return Value(np.asarray(values), memory.bfloat)

    def store(self, pointer: Any, value: Any, mask: Any = None, **_hints: Any) -> None:
        if not isinstance(pointer, Pointer):
            raise UnsupportedError("a pointer out of memory")
        memory, data = pointer.memory, as_value(value).data
        held = np.ones((1, 1), np.bool_) if mask is None else as_value(mask).data
        rows = np.empty((self._launch.ids.shape[0], 1))
        offset, data, held, _ = np.broadcast_arrays(pointer.offset, data, held, rows)
        places = offset[held]
        if places.size and (places.min() < 0 or places.max() >= memory.flat.size):
            raise UnsupportedError("an address outside its storage")
        if memory.bfloat:
            rounded = _round_to_bfloat(data[held].astype(np.float32))
            stored = (rounded.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        else:
            with np.errstate(all="ignore"):
                stored = data[held].astype(memory.flat.dtype)
        self._launch.stores.append(_Store(memory, places, stored))

    def _current(self, memory: Memory, places: Array) -> Array:
        """The memory as these programs see it: with what they have stored at those places."""
        flat = memory.flat
        for store in self._launch.stores:
            if store.memory.key != memory.key:
                continue
            here = memory.first + places * flat.itemsize
            there = store.memory.first + store.places * store.memory.flat.itemsize
            if not np.intersect1d(here, there).size:
                continue
            if store.memory.first != memory.first or store.values.dtype != flat.dtype:
                raise UnsupportedError("a load of what was stored through another pointer")
            flat = flat.copy() if flat is memory.flat else flat
            flat[store.places] = store.values
        return flat

    # -- element by element --

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Value:
        a, b = pair(x, y)
        return Value(np.where(as_value(condition).data, a, b))

    @staticmethod
    def maximum(x: Any, y: Any, **_nan: Any) -> Value:
        return Value(np.asarray(np.fmax(*pair(x, y))))

    @staticmethod
    def minimum(x: Any, y: Any, **_nan: Any) -> Value:
        return Value(np.asarray(np.fmin(*pair(x, y))))

    @staticmethod
    def cdiv(x: Any, y: Any) -> Any:
        return (x + y - 1) // y

    @staticmethod
    def cast(x: Any, dtype: Any, **_rounding: Any) -> Value:
        return as_value(x).to(dtype)

    @staticmethod
    def zeros(shape: Any, dtype: Any) -> Value:
        return _filled(shape, 0, dtype)

    @staticmethod
    def full(shape: Any, value: Any, dtype: Any) -> Value:
        return _filled(shape, value, dtype)

    @staticmethod
    def zeros_like(x: Value) -> Value:
        return Value(np.zeros_like(x.data))

    @staticmethod
    def umulhi(x: Value, y: Any) -> Value:
        a, b = pair(x, y)
        if a.dtype != np.uint32:
            raise UnsupportedError("umulhi of other than uint32")
        return Value(((a.astype(np.uint64) * b) >> np.uint64(32)).astype(np.uint32))

    # -- along the block --

    def max(self, x: Value, axis: Any = None, return_indices: bool = False, **_ties: Any) -> Any:
        if not return_indices:
            return Value(np.fmax.reduce(x.data, axis=1, keepdims=True))
        place = self.argmax(x, axis)
        return Value(np.take_along_axis(x.data, place.data.astype(np.int64), 1)), place

    def min(self, x: Value, axis: Any = None, return_indices: bool = False, **_ties: Any) -> Value:
        if return_indices:
            raise UnsupportedError("tl.min with indices")
        return Value(np.fmin.reduce(x.data, axis=1, keepdims=True))

    @staticmethod
    def argmax(x: Value, axis: Any = None, **_ties: Any) -> Value:
        if _has_nan(x.data):
            raise UnsupportedError("argmax of NaN")
        return Value(x.data.argmax(axis=1)[:, None].astype(np.int32))

    @staticmethod
    def sum(x: Value, axis: Any = None, **_type: Any) -> Value:
        data = x.data.astype(np.int32) if x.data.dtype == np.bool_ else x.data
        return Value(np.asarray(data.sum(axis=1, keepdims=True, dtype=data.dtype)))

    @staticmethod
    def cumsum(x: Value, axis: Any = None, **_order: Any) -> Value:
        return Value(np.cumsum(x.data, axis=1, dtype=x.data.dtype))


def _unary(name: str) -> Any:
    function = getattr(np, name)

    def operation(x: Any, **_mode: Any) -> Value:
        with np.errstate(all="ignore"):
            return Value(function(as_value(x).data))

    return staticmethod(operation)


for _name in ("exp", "log", "exp2", "log2", "sqrt", "abs", "floor", "log1p"):
    setattr(_Language, _name, _unary(_name))


def _has_nan(data: Array) -> bool:
    return data.dtype.kind == "f" and bool(np.isnan(data).any())


def _filled(shape: Any, value: Any, dtype: Any) -> Value:
    sizes = [int(size) for size in shape] if isinstance(shape, (tuple, list)) else [int(shape)]
    if len(sizes) > 1:
        raise UnsupportedError("blocks of two dimensions")
    data = np.empty((1, sizes[0] if sizes else 1), np.float64)
    data[:] = as_value(value).data
    return Value(data).to(dtype)


def _device_function(function: Any, launch: _Launch) -> Any:
    """A kernel's function that runs for the launch's programs."""
    source = function.fn
    names = {name: _global(source.__globals__[name], launch) for name in _names_of(source)}
    names["__builtins__"] = __builtins__
    made = types.FunctionType(
        source.__code__, names, source.__name__, source.__defaults__, source.__closure__
    )
    made.__kwdefaults__ = source.__kwdefaults__
    return made


def _names_of(source: Any) -> list[str]:
    return [name for name in _code_names(source.__code__) if name in source.__globals__]


@functools.cache
def _code_names(code: types.CodeType) -> tuple[str, ...]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return (*code.co_names, *(name for c in inner for name in _code_names(c)))


def _global(found: Any, launch: _Launch) -> Any:
    import triton
    import triton.language as tl

    if found is tl or found is triton or getattr(found, "__name__", "") in _LANGUAGES:
        return _Language(launch)
    if hasattr(found, "fn") and hasattr(found, "arg_names"):
        return _device_function(found, launch)
    return found.value if isinstance(found, tl.constexpr) else found


_LANGUAGES = (
    "triton.language",
    "triton.language.core",
    "triton.language.math",
    "triton.language.extra.libdevice",
    "triton.language.extra.cuda.libdevice",
)


@functools.cache
def _signature(source: Any) -> tuple[inspect.Signature, frozenset[str]]:
    signature = inspect.signature(source)
    constants = {
        name
        for name, parameter in signature.parameters.items()
        if "constexpr" in str(parameter.annotation)
    }
    return signature, frozenset(constants)


def run(function: Any, grid: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Launch a kernel; UnsupportedError, with nothing stored, where it is not covered."""
    signature, constants = _signature(function.fn)
    given = {k: v for k, v in named.items() if k in signature.parameters}
    bound = signature.bind(*args, **given)
    bound.apply_defaults()
    meta = {k: getattr(v, "value", v) for k, v in bound.arguments.items() if k in constants}
    sizes = [int(size) for size in (grid(meta) if callable(grid) else grid)]
    counts_of = _three(*sizes)
    _fit_vocabulary(meta, bound.arguments, counts_of)
    values = {
        name: meta[name] if name in constants else _argument(value)
        for name, value in bound.arguments.items()
    }
    ids = np.stack([axis.reshape(-1) for axis in np.indices(counts_of)], axis=1)
    stores: list[_Store] = []
    waiting = [ids] if ids.size else []
    while waiting:
        launch = _Launch(waiting.pop(), counts_of)
        try:
            _device_function(function, launch)(**values)
        except DivergedError as parted:
            waiting += [launch.ids[parted.choice == side] for side in np.unique(parted.choice)]
        else:
            stores += launch.stores
    for store in stores:
        store.memory.flat[store.places] = store.values


def _three(first: int, second: int = 1, third: int = 1) -> tuple[int, int, int]:
    return first, second, third


def _fit_vocabulary(meta: dict[str, Any], given: Any, grid: tuple[int, int, int]) -> None:
    """One block over the vocabulary needs no more columns than the vocabulary has."""
    size = given.get("vocab_size")
    if isinstance(size, int) and grid[1] == 1 and meta.get("BLOCK_SIZE", 0) > size:
        meta["BLOCK_SIZE"] = 1 << (size - 1).bit_length()


def _argument(value: Any) -> Any:
    if value is None:
        return None
    if hasattr(value, "data_ptr"):
        if value.device.type != "cpu":
            raise UnsupportedError("a tensor on a device")
        return Pointer(Memory(value), np.zeros((1, 1), np.int64))
    return as_value(value)


def vectorised(original: Any) -> Any:
    """`InterpretedFunction.run` that tries this first."""

    def run_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if warmup:
            return None
        if self.fn not in left_out and os.environ.get(VARIABLE) != ONE_BY_ONE:
            try:
                run(self, grid, args, named)
                return None
            except (UnsupportedError, TypeError, AttributeError) as reason:
                left_out[self.fn] = f"{type(reason).__name__}: {reason}"
                logger.debug("%s: left to Triton's interpreter: %s", self.fn.__name__, reason)
        return original(self, *args, grid=grid, warmup=warmup, **named)

    return run_kernel
