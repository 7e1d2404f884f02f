"""Kernels that must be reported as not lowered, so that the report is known to be able to fail."""

import triton
import triton.language as tl


@triton.jit
def breaks(p, n):
    for i in range(n):
        if i == 3:
            break
        tl.store(p + i, 0)


@triton.jit
def overflows(p, n):
    at = tl.arange(0, 131072)
    x = tl.load(p + at).to(tl.float32)
    tl.store(p + at, (x * tl.sum(x, axis=0)).to(p.dtype.element_ty))


@triton.jit
def copies(p, n):
    at = tl.arange(0, 1024)
    tl.store(p + 1024 + at, tl.load(p + at))


@triton.jit
def gathers(p, n):
    at = tl.arange(0, 64)
    tl.store(p + at, tl.load(p + tl.load(p + at).to(tl.int32)))
