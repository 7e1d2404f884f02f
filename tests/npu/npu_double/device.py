"""Values for operators on the double's device, which is host memory.

torch_npu allocates, checks arguments and dispatches as on an NPU; below it nothing computes. The
mode defined here sees every operator before torch_npu does. aten operators run on CPU aliases of
the device memory; an operator of torch_npu, ATB or vllm-ascend runs for its argument checks and
its output allocation, where its kernel exists here, and takes its values from a reference that is
registered with one of `computes`, `writes` and `stands_for`.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .graphs import Graphs

DEVICE = "npu"
Reference = Callable[..., Any]

_computes: dict[str, Reference] = {}
_writes: dict[str, Reference] = {}
_stands_for: dict[str, Reference] = {}
_values_stay: set[str] = set()

# They allocate, or change no element.
_ALLOCATING = (
    "aten::empty", "aten::resize_", "aten::record_stream", "aten::is_pinned", "aten::pin_memory",
    "aten::_pin_memory", "aten::new_empty", "aten::set_", "aten::detach",
)  # fmt: skip
_OPERATOR_LIBRARIES = ("npu", "_C_ascend", "atb")


def computes(*names: str) -> Callable[[Reference], Reference]:
    """The reference gives the values of the real operator's outputs (`None`: not needed)."""
    return _register(_computes, names)


def writes(*names: str) -> Callable[[Reference], Reference]:
    """The reference writes into its arguments; the real operator only checks them."""
    return _register(_writes, names)


def stands_for(*names: str) -> Callable[[Reference], Reference]:
    """The reference alone runs: the kernel lies in a library that is absent (AscendC, ATB)."""
    return _register(_stands_for, names)


def values_stay(*names: str) -> None:
    """Operators that return an argument, or no tensor."""
    _values_stay.update(names)


def _register(table: dict[str, Reference], names: tuple[str, ...]) -> Any:
    def register(reference: Reference) -> Reference:
        table.update(dict.fromkeys(names, reference))
        return reference

    return register


def host_alias(tensor: Any) -> Any:
    """A CPU tensor over the same memory; anything but a device tensor comes back as it is."""
    if not _on_device(tensor):
        return tensor
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * size).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    alias = torch.empty(0, dtype=tensor.dtype)
    place = (tensor.storage_offset(), tensor.size(), tensor.stride())
    return alias.set_(flat.untyped_storage(), *place)


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == DEVICE


def _to_device(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=DEVICE)
    host_alias(copy).copy_(value)
    return copy


class NpuDouble(TorchDispatchMode):
    """Inside `with NpuDouble() as double:` operators on the device have right values.

    calls: how often each operator ran. missing: operators of torch_npu and vllm-ascend that have
    no reference; their outputs were uninitialised memory, so a test asserts that it is empty.
    graphs: captured graphs, which replay what ran here.
    """

    def __init__(self, graphs: Graphs) -> None:
        super().__init__()
        self.graphs = graphs
        self.calls: Counter[str] = Counter()
        self.missing: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._concerns_the_device(args, kwargs):
            return func(*args, **kwargs)
        name = func._schema.name
        library = name.partition("::")[0]
        if library == "aten" and _is_composite(func):
            # Inference mode hands composite operators over whole; their parts are what can run.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.calls[str(func)] += 1
        if func.is_view or name.startswith(_ALLOCATING):
            return func(*args, **kwargs)
        if library == "aten":
            result = _run_on_host(func, args, kwargs)
            self._keep(func, args, kwargs, result, func)
            return result
        if library in _OPERATOR_LIBRARIES:
            return self._run_operator(func, name, args, kwargs)
        # A Python operator (torch.ops.vllm.*): what it calls must come by here too.
        with self:
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
            return func.redispatch(keys, *args, **kwargs)

    @staticmethod
    def _concerns_the_device(args: Any, kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == DEVICE:
            return True
        return any(_on_device(leaf) for leaf in tree_leaves((args, kwargs)))

    def _run_operator(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name in _stands_for:
            host = tree_map(host_alias, (args, kwargs))
            result = tree_map(_to_device, _stands_for[name](*host[0], **host[1]))
            self._keep(func, args, kwargs, result, _stands_for[name])
            return result
        result = func(*args, **kwargs)
        reference = _writes.get(name) or _computes.get(name)
        if reference is None:
            if name not in _values_stay:
                self.missing.add(func.name())
            return result
        if self.graphs.updating or self.graphs.grouping:
            self.graphs.note_lengths(kwargs)
        if not self.graphs.updating:
            host = tree_map(host_alias, (args, kwargs))
            values = reference(*host[0], **host[1])
            if name in _computes:
                _fill(name, result, values)
        self._keep(func, args, kwargs, result, reference)
        return result

    def _keep(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, compute: Reference
    ) -> None:
        """For a graph: the same computation on the same memory, whenever it is replayed."""
        if not (self.graphs.capturing or self.graphs.updating):
            return

        def again() -> None:
            named = {
                k: torch.device("cpu") if k == "device" and v else v for k, v in kwargs.items()
            }
            host = tree_map(host_alias, (args, named))
            values = _as_tuple(compute(*host[0], **host[1]))
            for output, value in zip(_as_tuple(result), values, strict=False):
                if isinstance(value, Tensor) and isinstance(output, Tensor):
                    target = host_alias(output)
                    if target.data_ptr() != value.data_ptr():
                        target.copy_(value)

        self.graphs.note(again)


def _is_composite(func: Any) -> bool:
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _fill(name: str, outputs: Any, values: Any) -> None:
    """Copy a reference's values into what the real operator allocated."""
    for output, value in zip(_as_tuple(outputs), _as_tuple(values), strict=False):
        if value is None:
            continue
        found, wanted = (value.shape, value.dtype), (output.shape, output.dtype)
        assert found == wanted, f"{name}: reference gives {found}, the real operator {wanted}"
        host_alias(output).copy_(value)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _run_on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An aten operator on aliases; results that alias an argument alias it on the device too."""
    named = dict(kwargs)
    target = torch.device(named["device"]) if named.get("device") is not None else None
    if target is not None:
        named["device"] = torch.device("cpu")
    if named.get("pin_memory"):
        named["pin_memory"] = False
    host_args, host_named = tree_map(host_alias, (args, named))
    results = func(*host_args, **host_named)
    if target is not None and target.type == "cpu":
        return tree_map(lambda r: r.clone() if isinstance(r, Tensor) else r, results)
    given = tree_leaves((args, named))
    aliases = list(zip(tree_leaves((host_args, host_named)), given, strict=True))
    same = {id(alias): original for alias, original in aliases}
    storages = {
        alias.untyped_storage().data_ptr(): original
        for alias, original in aliases
        if _on_device(original) and alias.untyped_storage().nbytes()
    }

    def back(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if id(result) in same:
            return same[id(result)]
        storage = result.untyped_storage()
        base = storages.get(storage.data_ptr()) if storage.nbytes() else None
        if base is not None and base.dtype == result.dtype:
            place = (result.size(), result.stride(), result.storage_offset())
            return torch.as_strided(base, *place)
        return _to_device(result)

    return tree_map(back, results)
