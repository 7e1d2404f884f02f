"""Records what a launcher passes to its kernels, instead of launching them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One specialisation. signature: types of run-time arguments; constants: the others."""

    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]


def type_name(value: object) -> str:
    """Triton's name for the type of a run-time argument."""
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), value
    return "i32" if abs(value) < 1 << 31 else "i64"


@dataclass
class Recorder:
    """Takes a kernel's place: recorder[grid](...) notes the launch."""

    kernel: Any
    launches: list[Launch] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert len(grid) == 1, f"Ascend takes a grid of one axis, got {grid}"
        return self._record

    def _record(self, *args: Any, **kwargs: Any) -> None:
        function = self.kernel.fn
        parameters = inspect.signature(function).parameters
        given = dict(zip(parameters, args, strict=False)) | kwargs
        signature, constants = {}, {}
        for name, parameter in parameters.items():
            value = given[name]
            if "constexpr" in str(parameter.annotation) or value is None:
                constants[name] = value
            else:
                signature[name] = type_name(value)
        module = function.__module__.removeprefix("vllm_ascend_spec.")
        self.launches.append(Launch(module, function.__name__, signature, constants))


@contextmanager
def recorded(*modules: ModuleType) -> Iterator[list[Launch]]:
    """Inside, launches of the modules' kernels are noted in the list and not run."""
    launches: list[Launch] = []
    replaced = []
    for module in modules:
        for name, value in list(vars(module).items()):
            if type(value).__name__ in ("JITFunction", "InterpretedFunction"):
                replaced.append((module, name, value))
                setattr(module, name, Recorder(value, launches))
    try:
        yield launches
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)
