"""vLLM's CPU platform with Model Runner V2, async scheduling and the plugin's GDN operators.

Imported by vLLM when `plugin.platform` names it; importing it imports vLLM.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

from vllm_ascend_spec.options import Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.ascend_spec.cpu")


class CpuEnginePlatform(CpuPlatform):
    """The CPU platform of the development engine; see `vllm_ascend_spec.engine.cpu`."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Apply upstream's CPU settings, less those that hold for Model Runner V1 only.

        Raises:
            UserError: an unknown or contradictory option under `ascend_spec`, or a drafter that
                does not fit the target.
        """
        from vllm.config import CompilationMode, CUDAGraphMode

        from vllm_ascend_spec.engine import checks

        options = Options.from_additional_config(vllm_config.additional_config)
        # Upstream turns async scheduling off: Model Runner V1 gains nothing from it on a CPU.
        # The choice made before (the user's, or vLLM's default for the drafting method) stands.
        async_scheduling = vllm_config.scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = async_scheduling
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        checks.check_and_apply(vllm_config, options)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Run the slowest interpreted kernels as torch functions."""
        super().register_triton_kernel_overrides()
        from vllm_ascend_spec.engine import cpu_kernels

        cpu_kernels.register()
