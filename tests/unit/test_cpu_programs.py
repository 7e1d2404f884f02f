"""Running a kernel's programs at once: same values as one after another, and Triton's types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tl = pytest.importorskip("triton.language")

from vllm_ascend_spec.engine import cpu_programs  # noqa: E402
from vllm_ascend_spec.engine.cpu_language import UnsupportedError, Value, pair  # noqa: E402


def column(*numbers: Any, kind: Any) -> Value:
    return Value(np.array(numbers, dtype=kind)[:, None])


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (column(1, kind=np.int32), column(1, kind=np.int64), np.int64),
        (column(1, kind=np.int32), column(1, kind=np.uint32), np.uint32),
        (column(1, kind=np.int64), column(1, kind=np.uint32), np.int64),
        (column(1, kind=np.int32), column(1, kind=np.float32), np.float32),
        (column(1, kind=np.int64), 0.5, np.float32),
        (column(1, kind=np.uint32), 0xCC9E2D51, np.uint32),
        (column(1, kind=np.uint32), -1, np.uint32),
        (column(1, kind=np.float32), 3, np.float32),
        (column(True, kind=np.bool_), 1, np.int32),
        (column(1.0, kind=np.float16), 2.0, np.float16),
    ],
)
def test_types_are_promoted_as_triton_promotes_them(left: Value, right: Any, expected: Any):
    for operands in ((left, right), (right, left)):
        a, b = pair(*operands)
        assert a.dtype == b.dtype == expected


def test_integer_division_goes_towards_zero_and_keeps_its_type():
    divided = column(-7, 7, kind=np.int32) // column(2, 2, kind=np.int32)
    left = column(-7, 7, kind=np.int32) % 4
    assert divided.data[:, 0].tolist() == [-3, 3] and left.data[:, 0].tolist() == [-3, 3]
    assert divided.data.dtype == np.int32


def test_unsigned_products_wrap():
    product = column(0xFFFFFFFF, kind=np.uint32) * 0xCC9E2D51
    assert int(product.data[0, 0]) == (0xFFFFFFFF * 0xCC9E2D51) & 0xFFFFFFFF


def test_bfloat16_rounds_to_even_and_is_not_computed_with():
    numbers = torch.tensor([1.00390625, 1.01171875, -3.1415927, float("inf")])
    rounded = Value(numbers.numpy()[:, None]).to(tl.bfloat16)
    assert rounded.data[:, 0].tolist() == numbers.bfloat16().float().tolist()
    with pytest.raises(UnsupportedError):
        rounded + 1.0


def counting_kernel(out, counts, lengths, size, BLOCK: tl.constexpr):
    """Branches, a loop of another length in each program, and counts that it stores and reads."""
    program = tl.program_id(0)
    length = tl.load(lengths + program)
    if length < 0:
        return
    total = 0
    for i in range(length):
        place = counts + program * size + i // 2
        tl.store(place, tl.load(place) + 1)
        if i % 2 == 0 and length > 3:
            total += i
    block = tl.arange(0, BLOCK)
    seen = tl.load(counts + program * size + block, mask=block < size, other=0)
    tl.store(out + program, total * 100 + tl.sum(seen, axis=0))


def one_after_another(lengths: list[int], size: int) -> tuple[list[int], list[list[int]]]:
    out, counts = [-1] * len(lengths), [[0] * size for _ in lengths]
    for program, length in enumerate(lengths):
        if length < 0:
            continue
        for i in range(length):
            counts[program][i // 2] += 1
        total = sum(i for i in range(length) if i % 2 == 0) if length > 3 else 0
        out[program] = total * 100 + sum(counts[program])
    return out, counts


def test_programs_that_part_end_as_if_they_had_run_alone():
    lengths = [3, -1, 5, 0, 5, 7, 1]
    out = torch.full((len(lengths),), -1, dtype=torch.int32)
    counts = torch.zeros(len(lengths), 5, dtype=torch.int32)
    kernel = SimpleNamespace(fn=counting_kernel, arg_names=())
    arguments = (out, counts, torch.tensor(lengths, dtype=torch.int32), 5)
    cpu_programs.run(kernel, (len(lengths),), arguments, {"BLOCK": 8, "num_warps": 1})
    expected = one_after_another(lengths, 5)
    assert (out.tolist(), counts.tolist()) == expected


def two_dimensional_kernel(out, BLOCK: tl.constexpr):
    tl.store(out, 7)
    tl.store(out + tl.arange(0, BLOCK)[:, None], 1)


def test_a_kernel_that_is_not_covered_stores_nothing():
    out = torch.zeros(8, dtype=torch.int32)
    kernel = SimpleNamespace(fn=two_dimensional_kernel, arg_names=())
    with pytest.raises(UnsupportedError, match="two dimensions"):
        cpu_programs.run(kernel, (1,), (out,), {"BLOCK": 8})
    assert not out.any()


def test_an_address_outside_its_tensor_is_refused():
    def past_the_end(out):
        tl.store(out + 8, 1)

    kernel = SimpleNamespace(fn=past_the_end, arg_names=())
    past_the_end.__globals__["tl"] = tl
    with pytest.raises(UnsupportedError, match="outside its storage"):
        cpu_programs.run(kernel, (1,), (torch.zeros(8, dtype=torch.int32),), {})
