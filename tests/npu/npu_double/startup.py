"""Makes vllm-ascend's source importable on a host where it was not built."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .device import NpuDouble

_keep_alive: list[Any] = []


def prepare_process() -> None:
    """What every process needs, vLLM's helpers too: called from the double's sitecustomize."""
    from vllm_ascend_spec.engine import packages

    packages.hide_mismatched()
    for name in ("torchaudio", "torchcodec"):
        if importlib.util.find_spec(name) is None:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    _stand_for_what_a_build_generates()
    _stand_for_pyacl()


def install(vllm_ascend: Path) -> NpuDouble:
    """What the process that runs the engine needs, before vLLM is imported.

    vllm_ascend: root of the source tree. Returns the mode to run the engine in.
    """
    from . import collectives, operators_dense, operators_gdn, triton_host  # noqa: F401
    from .device import NpuDouble
    from .graphs import Graphs

    graphs = Graphs()
    triton_host.install(graphs)
    graphs.install()
    collectives.install(graphs)
    _keep_alive.append(operators_gdn.define_schemas(vllm_ascend))
    return NpuDouble(graphs)


def _stand_for_what_a_build_generates() -> None:
    info = ModuleType("vllm_ascend._build_info")
    info.__device_type__ = "A2"  # type: ignore[attr-defined]
    sys.modules[info.__name__] = info


def _stand_for_pyacl() -> None:
    """The part of CANN's Python binding that vllm-ascend's allocator imports."""

    def memcpy(*_: Any) -> None:
        raise NotImplementedError("the double has no acl.rt.memcpy")

    acl, runtime = ModuleType("acl"), ModuleType("acl.rt")
    acl.__path__ = []
    acl.rt, runtime.memcpy = runtime, memcpy  # type: ignore[attr-defined]
    sys.modules.update({"acl": acl, "acl.rt": runtime})
