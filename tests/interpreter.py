"""Mends Triton's interpreter for bfloat16; shared by every tier that runs kernels without a GPU."""

from __future__ import annotations

import numpy as np


def _bfloat16_bits_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _float32_to_bfloat16_bits(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).astype(np.uint16)


def mend_interpreter() -> None:
    """Make the interpreter treat bfloat16 as the hardware does.

    It keeps bfloat16 as 16-bit integers, multiplies those integers in tl.dot, and truncates when
    it converts from fp32 (seen in Triton 3.6 and 3.9).
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    stock_cast = builder.cast_impl

    def cast(self: object, source: interpreter.TensorHandle, target: tl.dtype) -> object:
        pair = source.dtype.scalar, target.scalar
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(_bfloat16_bits_to_float32(source.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(_float32_to_bfloat16_bits(source.data), tl.bfloat16)
        return stock_cast(self, source, target)

    def operand(handle: interpreter.TensorHandle) -> np.ndarray:
        if handle.dtype.scalar == tl.bfloat16:
            return _bfloat16_bits_to_float32(handle.data)
        return handle.data

    def dot(
        self: object,
        left: interpreter.TensorHandle,
        right: interpreter.TensorHandle,
        total: interpreter.TensorHandle,
        *_options: object,
    ) -> object:
        product = np.matmul(operand(left), operand(right), dtype=total.data.dtype)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    builder.cast_impl = cast
    builder.create_dot = dot
