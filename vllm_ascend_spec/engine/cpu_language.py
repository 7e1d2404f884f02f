"""The part of Triton's language that vLLM's step kernels use, for all programs of a launch at once.

A value has one row a program and one column an element of the block; what is the same for all
programs, or for all elements, has one row or one column and is broadcast. Arithmetic follows
Triton's promotion rules (fp32 for float with int, unsigned wins among equal widths, Python numbers
take the tensor's type), with NumPy's fp32 functions underneath, as Triton's own interpreter has
them. What is not covered raises `UnsupportedError`, and the launch falls back to that interpreter.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_NUMPY = {
    "int1": np.bool_, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64,
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip
_TRITON = {np.dtype(kind): name for name, kind in _NUMPY.items()}
BFLOAT16 = "bf16"


class UnsupportedError(Exception):
    """A construct that is not covered here."""


class DivergedError(Exception):
    """Programs disagree on a branch or a loop's length; carries each program's choice [P]."""

    def __init__(self, choice: Array) -> None:
        super().__init__()
        self.choice = choice


@dataclass
class _Element:
    element_ty: Any


class Value:
    """data [programs or 1, elements or 1]; bfloat: values of bf16, which nobody computes with."""

    __array_ufunc__ = None  # NumPy must leave mixed operations to this class
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Array, bfloat: bool = False) -> None:
        self.data, self.bfloat = data, bfloat

    @property
    def dtype(self) -> Any:
        import triton.language as tl

        return tl.dtype(BFLOAT16 if self.bfloat else _TRITON[self.data.dtype])

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.data.shape[1] == 1 else (self.data.shape[1],)

    def to(self, dtype: Any, bitcast: bool = False, **_rounding: Any) -> Any:
        """Converted to a Triton type; floats become integers by truncation."""
        name = dtype.name
        if hasattr(dtype, "element_ty"):
            return _addressed(self.data, dtype.element_ty)
        if bitcast:
            if name == BFLOAT16 or self.bfloat:
                raise UnsupportedError("bits of bf16")
            return Value(np.ascontiguousarray(self.data).view(_NUMPY[name]))
        if name == BFLOAT16:
            return Value(_round_to_bfloat(self.data.astype(np.float32)), bfloat=True)
        with np.errstate(invalid="ignore", over="ignore"):
            return Value(self.data.astype(_NUMPY[name]))

    def _decided(self) -> Any:
        if self.data.shape[1] != 1:
            raise UnsupportedError("a branch on a block")
        first = self.data[0, 0]
        if self.data.shape[0] > 1 and not (self.data == first).all():
            raise DivergedError(self.data[:, 0])
        return first

    def __bool__(self) -> bool:
        return bool(self._decided())

    def __index__(self) -> int:
        return int(self._decided())

    __int__ = __index__

    def __invert__(self) -> Value:
        return Value(~self.data)

    def __neg__(self) -> Value:
        return Value(-_computable(self).data)

    def __getitem__(self, _item: Any) -> Any:
        raise UnsupportedError("blocks of two dimensions")


def _computable(value: Value) -> Value:
    if value.bfloat:
        raise UnsupportedError("arithmetic in bf16")
    return value


def constant(number: Any) -> Value:
    """A Python number as Triton types it on its own."""
    if isinstance(number, bool):
        return Value(np.full((1, 1), number))
    if isinstance(number, float):
        return Value(np.full((1, 1), number, np.float32))
    small = -(2**31) <= number < 2**31
    kind = np.int32 if small else np.uint32 if 0 <= number < 2**32 else np.int64
    return Value(np.full((1, 1), number, kind))


def as_value(x: Any) -> Value:
    """A value, from a value, a number or a Triton constant."""
    x = getattr(x, "value", x)
    if isinstance(x, Value):
        return x
    if isinstance(x, (bool, int, float, np.generic)):
        return constant(x.item() if isinstance(x, np.generic) else x)
    raise UnsupportedError(f"a value of {type(x).__name__}")


def _kind(dtype: Any) -> int:
    return 0 if dtype == np.bool_ else 1 if np.issubdtype(dtype, np.integer) else 2


def _promoted(a: Any, b: Any, divides: bool) -> Any:
    if _kind(a) == 2 or _kind(b) == 2:
        if np.float64 in (a, b):
            return np.float64
        return np.float16 if (a == b == np.float16) and not divides else np.float32
    if a == b:
        return a
    size_a, size_b = (1 if x == np.bool_ else np.dtype(x).itemsize * 8 for x in (a, b))
    signed_a, signed_b = (np.issubdtype(x, np.signedinteger) for x in (a, b))
    if signed_a == signed_b:
        return a if size_a > size_b else b
    unsigned, signed = (b, a) if signed_a else (a, b)
    wide, narrow = (size_b, size_a) if signed_a else (size_a, size_b)
    return unsigned if wide >= narrow else signed


def pair(x: Any, y: Any, divides: bool = False) -> tuple[Array, Array]:
    """Both operands in the type that Triton computes in."""
    bare = [not isinstance(getattr(v, "value", v), Value) for v in (x, y)]
    a, b = _computable(as_value(x)).data, _computable(as_value(y)).data
    target = _promoted(a.dtype.type, b.dtype.type, divides)
    if bare[0] != bare[1]:
        number, tensor = (a, b) if bare[0] else (b, a)
        if _kind(number.dtype) <= _kind(tensor.dtype):
            target = _promoted(tensor.dtype.type, tensor.dtype.type, divides)
    with np.errstate(all="ignore"):
        return a.astype(target, copy=False), b.astype(target, copy=False)


def _operation(function: Callable[[Array, Array], Any], divides: bool = False) -> Any:
    def operation(x: Any, y: Any) -> Any:
        if isinstance(y, Pointer):
            return NotImplemented
        a, b = pair(x, y, divides)
        with np.errstate(all="ignore"):
            return Value(np.asarray(function(a, b)))

    return operation


def _divide(a: Array, b: Array) -> Array:
    if _kind(a.dtype) == 2:
        return np.asarray(a / b)
    return np.asarray(a.astype(np.float32) / b.astype(np.float32))


def _floor_divide(a: Array, b: Array) -> Array:
    """Towards zero, as C does it."""
    quotient = a // b
    inexact = (quotient * b != a) & ((a < 0) != (b < 0))
    return np.asarray(quotient + inexact.astype(quotient.dtype), dtype=a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    return np.asarray(a - _floor_divide(a, b) * b, dtype=a.dtype)


def _multiply(a: Array, b: Array) -> Array:
    return a & b if a.dtype == np.bool_ else a * b


_OPERATORS: dict[str, Any] = {
    "add": _operation(operator.add),
    "sub": _operation(operator.sub),
    "mul": _operation(_multiply),
    "truediv": _operation(_divide, divides=True),
    "floordiv": _operation(_floor_divide),
    "mod": _operation(_remainder),
    "and": _operation(operator.and_),
    "or": _operation(operator.or_),
    "xor": _operation(operator.xor),
    "lshift": _operation(operator.lshift),
    "rshift": _operation(operator.rshift),
}
for _name, _function in _OPERATORS.items():
    setattr(Value, f"__{_name}__", _function)
    setattr(Value, f"__r{_name}__", lambda x, y, f=_function: f(y, x))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Value, f"__{_name}__", _operation(getattr(operator, _name)))


def _round_to_bfloat(values: Array) -> Array:
    """fp32 rounded to bf16 and back, halves to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.where(
        np.isnan(values), values, (rounded & np.uint32(0xFFFF0000)).view(np.float32)
    ).astype(np.float32)


class Memory:
    """A tensor's storage from its first element on, as a flat array; bf16 as its bits."""

    def __init__(self, tensor: Any) -> None:
        import torch

        self.bfloat = tensor.dtype == torch.bfloat16
        storage = tensor.untyped_storage()
        size = (storage.nbytes() // tensor.element_size()) - tensor.storage_offset()
        flat = tensor.detach().as_strided((size,), (1,), tensor.storage_offset())
        self.flat: Array = (flat.view(torch.uint16) if self.bfloat else flat).numpy()
        self.element = _triton_type(tensor.dtype)
        self.key = storage.data_ptr()
        self.first = tensor.storage_offset() * tensor.element_size()


class _Addresses(Memory):
    """Memory known by its addresses alone, from the lowest of them on; its end is not known."""

    def __init__(self, lowest: int, element: Any) -> None:
        kind = np.dtype(_NUMPY[element.name])
        self.bfloat, self.element, self.key, self.first = False, element, lowest, 0
        pointer = ctypes.cast(lowest, ctypes.POINTER(ctypes.c_uint8))
        span = 1 << 46
        self.flat = np.ctypeslib.as_array(pointer, shape=(span,)).view(kind)


def _addressed(addresses: Array, element: Any) -> Pointer:
    if element.name not in _NUMPY or element.name == "int1":
        raise UnsupportedError(f"pointers to {element.name}")
    lowest = int(addresses.min())
    size = np.dtype(_NUMPY[element.name]).itemsize
    beyond = addresses.astype(np.uint64) - np.uint64(lowest)
    return Pointer(_Addresses(lowest, element), (beyond // np.uint64(size)).astype(np.int64))


def _triton_type(dtype: Any) -> Any:
    import triton.language as tl

    name = str(dtype).removeprefix("torch.")
    short = {"bool": "int1", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return tl.dtype(short.get(name, {"float64": "fp64"}.get(name, name)))


class Pointer:
    """Elements of a memory, int64 [programs or 1, elements or 1]."""

    def __init__(self, memory: Memory, offset: Array) -> None:
        self.memory, self.offset = memory, offset

    @property
    def dtype(self) -> Any:
        return _Element(self.memory.element)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + as_value(other).data.astype(np.int64))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset - as_value(other).data.astype(np.int64))
