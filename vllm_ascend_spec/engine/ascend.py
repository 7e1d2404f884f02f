"""The Ascend engine: vllm-ascend's platform and Model Runner V2, extended.

vllm-ascend stays the platform: its class is extended when its module loads, and what this plugin
changes lands after vllm-ascend's own patches, because every change waits for the import of the
module that holds its target. Nothing here imports torch, vLLM or vllm-ascend.

vllm-ascend is developed against one vLLM release and its main branch, and its version says little
about what it holds, so what is needed is looked up in its source (`versions.REQUIRED["ascend"]`),
and a repair is declared only where the code that it repairs is there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from typing import Any

from vllm_ascend_spec.engine import versions
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.options import CONFIG_KEY

logger = logging.getLogger("vllm.ascend_spec.ascend")

DISTRIBUTION = "vllm-ascend"
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_VERIFIED = "main of August 2026 (commit 182b75e)"

_enabled = False


def installed() -> bool:
    """Whether vllm-ascend is in this environment."""
    return importlib.util.find_spec("vllm_ascend") is not None and versions.is_installed(
        DISTRIBUTION
    )


def npu_count() -> int:
    """NPUs that torch_npu sees; 0 without torch_npu or without CANN below it."""
    try:
        # torch_npu prints warnings to standard output, which may be a report.
        with contextlib.redirect_stdout(sys.stderr):
            import torch_npu
    except (ImportError, OSError) as error:
        logger.info("torch_npu does not load (%s): the plugin stays out of the way", error)
        return 0
    return int(torch_npu.npu.device_count())


def obstacle() -> str | None:
    """Why vllm-ascend cannot be extended in this process; None where it can."""
    if npu_count() == 0:
        return "torch_npu sees no NPU"
    if os.environ.get(RUNNER_VARIABLE, "1") not in ("1", "true", "True"):
        return (
            f"{RUNNER_VARIABLE}={os.environ[RUNNER_VARIABLE]} keeps vllm-ascend on Model Runner "
            "V1, which this plugin does not extend; unset the variable"
        )
    return None


def enable() -> bool:
    """Extend vllm-ascend in this process; whether it was done. Later calls change nothing.

    Raises:
        UserError: this vllm-ascend has no Model Runner V2 that drafts for hybrid models.
    """
    global _enabled
    if _enabled:
        return True
    problem = obstacle()
    if problem is not None:
        logger.warning("the plugin stays inactive beside vllm-ascend: %s", problem)
        return False
    require_runner(versions.require_engine(DISTRIBUTION))
    # vllm-ascend takes Model Runner V2 only where this variable says so.
    os.environ[RUNNER_VARIABLE] = "1"
    from vllm_ascend_spec.engine import ascend_registrations

    ascend_registrations.declare_all()
    _enabled = True
    return True


def require() -> None:
    """Extend vllm-ascend in this process, or refuse: for a command that asks for this engine.

    Raises:
        UserError: no NPU, Model Runner V1, or a vllm-ascend without the runner that is extended.
    """
    problem = obstacle()
    if problem is not None:
        raise UserError(
            f"--platform ascend: {problem}. Run it where CANN and an NPU are, or install "
            "`vllm-ascend-spec[cpu]` in an environment of its own."
        )
    enable()


def engine_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` as the vLLM below vllm-ascend takes them.

    It has no `enable_adaptive_verification`; there the plugin's own option stands for it.
    """
    speculative = arguments.get("speculative_config")
    if not isinstance(speculative, dict) or "enable_adaptive_verification" not in speculative:
        return arguments
    speculative = dict(speculative)
    adaptive = speculative.pop("enable_adaptive_verification")
    additional = dict(arguments.get("additional_config") or {})
    if adaptive:
        additional[CONFIG_KEY] = {"adaptive": True} | additional.get(CONFIG_KEY, {})
    return arguments | {"speculative_config": speculative, "additional_config": additional}


def require_runner(engine: versions.Engine) -> None:
    """Refuse a vllm-ascend without the runner that this plugin extends.

    Raises:
        UserError: says what is missing and what to install.
    """
    missing = versions.missing_names("ascend", engine)
    if missing:
        raise UserError(
            f"vllm-ascend {engine.version} drafts for hybrid models on Model Runner V1 only "
            f"(missing: {'; '.join(missing)}), and vllm-ascend-spec extends Model Runner V2. "
            f"Install vllm-ascend from its {_VERIFIED} or newer, or uninstall vllm-ascend-spec."
        )


def active() -> bool:
    """Whether this process runs the extended platform."""
    return _enabled
