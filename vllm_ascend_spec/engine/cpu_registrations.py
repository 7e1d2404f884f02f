"""What the CPU engine registers with vLLM, and what it has to replace.

Registered, through vLLM's own extension points: the platform class (`plugin.platform`), the GDN
layer, the GDN attention backend, torch twins of slow interpreted kernels. Replaced: what no
extension point reaches.
"""

from types import ModuleType
from typing import Any

from vllm_ascend_spec.engine import cpu_programs, ngram, replay, replay_steps, runner
from vllm_ascend_spec.engine.patching import Replacement, declare, on_import

_RUNNER = "vllm.v1.worker.gpu.model_runner"
_ADAPTIVE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
_GDN_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_TOP_K_TOP_P = "vllm.v1.sample.ops.topk_topp"
_BACKENDS = "vllm.v1.attention.backends.registry"


def replacements() -> tuple[Replacement, ...]:
    """Everything that the CPU engine replaces in other packages."""
    return (
        *(
            Replacement(
                target=f"triton.runtime.interpreter:InterpreterBuilder.{name}",
                reason="integer masks, which compiled kernels take, crash the interpreter",
                make=make,
                versions=">=3.4,<4",
                distributions=("triton",),
            )
            for name, make in (
                ("create_masked_load", _masked_load),
                ("create_masked_store", _masked_store),
            )
        ),
        Replacement(
            target="triton.runtime.interpreter:InterpretedFunction.run",
            reason="the interpreter runs a launch's programs one by one: seconds for a large batch",
            make=cpu_programs.vectorised,
            versions=">=3.4,<4",
            distributions=("triton",),
        ),
        Replacement(
            target="vllm.config.vllm:VllmConfig._validate_adaptive_verification",
            reason="adaptive verification asks for full CUDA graphs, and a CPU has none",
            make=_validate_without_graphs,
        ),
        Replacement(
            target=f"{_RUNNER}:maybe_create_adaptive_verification_manager",
            reason="step costs come from graph replays upstream, on a CPU from an option",
            make=_create_manager,
            defined_in=_ADAPTIVE,
        ),
        Replacement(
            target=f"{_TOP_K_TOP_P}_sampler:apply_top_k_top_p_triton",
            reason="the interpreter stops in this kernel: a loop counter has no .to()",
            make=_top_k_top_p_in_torch,
            defined_in=f"{_TOP_K_TOP_P}_triton",
        ),
        Replacement(
            target=f"{_RUNNER}:resolve_adaptive_cudagraph_mode",
            reason="asserts full CUDA graphs, and a CPU has none",
            make=_resolve_mode,
            defined_in=_ADAPTIVE,
        ),
    )


def declare_all() -> None:
    """Declare the replacements and hook the registrations to the modules that they belong to."""
    declare(
        *replacements(),
        *runner.replacements(),
        *ngram.replacements(),
        *replay.replacements(),
        *replay_steps.replacements(),
    )
    on_import(_BACKENDS, _register_gdn_backend)
    on_import(_GDN_LAYER, _register_gdn_layer)


def _register_gdn_backend(registry: ModuleType) -> None:
    registry.register_backend(
        registry.MambaAttentionBackendEnum.GDN_ATTN,
        "vllm_ascend_spec.engine.gdn.RaggedGDNAttentionBackend",
        is_mamba=True,
    )


def _register_gdn_layer(layers: ModuleType) -> None:
    from vllm_ascend_spec.engine.cpu_gdn import layer_class

    upstream = layers.QwenGatedDeltaNetAttention
    upstream.register_oot(layer_class(replay.layer_class(upstream)))


def _masked_load(original: Any) -> Any:
    def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return original(self, pointers, _boolean(mask), *rest, **named)

    return create_masked_load


def _masked_store(original: Any) -> Any:
    def create_masked_store(
        self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any
    ) -> Any:
        return original(self, pointers, value, _boolean(mask), *rest, **named)

    return create_masked_store


def _boolean(mask: Any) -> Any:
    if mask.data.dtype == bool:
        return mask
    from triton.language import int1

    return type(mask)(mask.data.astype(bool), int1)


def _validate_without_graphs(original: Any) -> Any:
    def validate_adaptive_verification(self: Any) -> None:
        from vllm.config.compilation import CUDAGraphMode

        compilation = self.compilation_config
        mode = compilation.cudagraph_mode
        # The other conditions (LoRA, pipeline parallelism) hold on a CPU too.
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        try:
            original(self)
        finally:
            compilation.cudagraph_mode = mode

    return validate_adaptive_verification


def _top_k_top_p_in_torch(_original: Any) -> Any:
    def apply_top_k_top_p_triton(logits: Any, k: Any, p: Any) -> Any:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

        return apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    return apply_top_k_top_p_triton


def _create_manager(original: Any) -> Any:
    def maybe_create_adaptive_verification_manager(**arguments: Any) -> Any:
        from vllm_ascend_spec.engine.cpu_adaptive import create_manager

        return create_manager(**arguments)

    return maybe_create_adaptive_verification_manager


def _resolve_mode(original: Any) -> Any:
    def resolve_adaptive_cudagraph_mode(mode: Any, **arguments: Any) -> Any:
        return original(mode, **arguments) if mode.has_full_cudagraphs() else mode

    return resolve_adaptive_cudagraph_mode
