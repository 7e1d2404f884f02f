"""The series for vllm-ascend."""

from __future__ import annotations

import ast

from .anchors import Module
from .series import Patch, Series

BUILDER = "vllm_ascend/ops/gdn_attn_builder.py"
LAYER = "vllm_ascend/ops/gdn.py"
RAGGED = "vllm_ascend/ops/gdn_ragged.py"
KEYS = "vllm_ascend/compilation/graph_keys.py"
V2, V2_TESTS = "vllm_ascend/worker/v2", "tests/ut/worker/v2"
KERNEL = "vllm_ascend.ops.triton.kda.fused_recurrent_kda"
OPERATOR = "torch.ops._C_ascend.npu_recurrent_gated_delta_rule"


def pass_is_prefilling_once(module: Module) -> None:
    build = module.scope("build_attn_metadata")
    extra = "common_attn_metadata_extra_kwargs"
    assignment = module.assignment(build, extra)
    module.insert_after(
        assignment,
        f"""
        # The model state may bring its own; a keyword cannot be passed twice.
        {extra} = dict({extra})
        group_is_prefilling = {extra}.pop("is_prefilling", is_prefilling)
        """,
    )
    call = module.call(build, "AscendCommonAttentionMetadata")
    module.replace(module.keyword(call, "is_prefilling"), "group_is_prefilling")


def skip_metadata_without_lengths(module: Module) -> None:
    update = module.scope("AscendAutoRegressiveSpeculator._ascend_update_seq_lens")
    advance = module.assignment(update, "attn_meta.seq_lens")
    module.insert_before(
        advance,
        """
        if getattr(attn_meta, "seq_lens", None) is None:
            continue  # a recurrent layer attends to no cache, so it has no length to advance
        """,
    )


def record_whether_rows_are_full(module: Module) -> None:
    module.add_import("vllm_ascend.ops.gdn_ragged", "rows_fit_recurrent_op")
    metadata = module.scope("GDNSpecDecodeMetadata")
    module.insert_after(
        metadata.body[-1],
        """
        # Host knowledge: every request has num_spec + 1 rows, as the AscendC recurrence needs.
        rows_are_full: bool = True
        """,
    )
    build = module.scope("AscendGDNAttentionMetadataBuilder.build")
    module.insert_after(module.assignment(build, "m"), "spec_rows_are_full = True")
    module.insert_after(
        module.statement(
            build,
            lambda node: (
                isinstance(node, ast.Assert)
                and ast.unparse(node.test) == "spec_sequence_masks_cpu is not None"
            ),
            "assertion about spec_sequence_masks_cpu",
        ),
        """
        spec_query_lens_cpu = query_lens_cpu[spec_sequence_masks_cpu]
        spec_rows_are_full = rows_fit_recurrent_op(spec_query_lens_cpu, self.num_spec + 1)
        """,
    )
    attach = module.call(build, "self._attach_spec_decode_metadata")
    module.replace(attach, "self._attach_spec_decode_metadata(attn_metadata, spec_rows_are_full)")
    method = module.scope("AscendGDNAttentionMetadataBuilder._attach_spec_decode_metadata")
    assert isinstance(method, ast.FunctionDef)
    last = method.args.args[-1]
    module.replace(last, f"{module.segment(last)},\n        rows_are_full: bool = True")
    lengths = module.keyword(module.call(method, "GDNSpecDecodeMetadata"), "actual_seq_lengths")
    module.replace(lengths, f"{module.segment(lengths)},\n            rows_are_full=rows_are_full")


def _speculative_recurrence(module: Module) -> ast.stmt:
    forward = module.scope("AscendGatedDeltaNetAttention._forward_core")
    return module.statement(
        forward,
        lambda node: (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "core_attn_out_spec"
            and OPERATOR in ast.unparse(node.value)
        ),
        f"assignment of {OPERATOR} to core_attn_out_spec",
    )


def refuse_ragged_rows(module: Module) -> None:
    module.add_import("vllm_ascend.ops.gdn_ragged", "require_full_rows")
    module.insert_before(
        _speculative_recurrence(module),
        "require_full_rows(attn_metadata.spec_decode_metadata.rows_are_full)",
    )


def run_ragged_rows(module: Module) -> None:
    recurrence = _speculative_recurrence(module)
    stock = module.lines_of(recurrence).rstrip("\n").replace("\n", "\n    ")
    forward = module.scope("AscendGatedDeltaNetAttention._forward_core")
    guard = module.call(forward, "require_full_rows")
    module.replace_statement(
        module.statement(
            forward,
            lambda node: isinstance(node, ast.Expr) and node.value is guard,
            "guard of the recurrence",
        ),
        "",
    )
    module.replace_statement(
        recurrence,
        "if attn_metadata.spec_decode_metadata.rows_are_full:\n    "
        + stock
        + """
else:
    core_attn_out_spec = ragged_recurrent_gated_delta_rule(
        query=query_spec,
        key=key_spec,
        value=value_spec,
        g=g_spec,
        beta=beta_spec,
        state=ssm_state,
        scale=key_spec.shape[-1] ** -0.5,
        query_start_loc=spec_causal_conv1d_meta.query_start_loc,
        state_indices=spec_state_indices_tensor,
        num_accepted_tokens=spec_causal_conv1d_meta.num_accepted_tokens,
    )
""",
    )
    imported = module.statement(
        module.tree,
        lambda node: (
            isinstance(node, ast.ImportFrom) and node.module == "vllm_ascend.ops.gdn_ragged"
        ),
        "import of gdn_ragged",
    )
    module.replace_statement(
        imported,
        "from vllm_ascend.ops.gdn_ragged import ragged_recurrent_gated_delta_rule",
    )


def add_the_ragged_recurrence(module: Module) -> None:
    guard = module.scope("require_full_rows")
    module.replace_statement(guard, _our("gdn_ragged_kernel.py.in"))
    module.add_import(KERNEL, "fused_recurrent_gated_delta_rule_fwd_kernel")


def keep_requests_without_drafts(module: Module) -> None:
    prepare = module.scope("AscendMambaHybridModelState.prepare_attn")
    module.replace_statement(
        module.statement(
            prepare,
            lambda node: (
                isinstance(node, ast.If)
                and ast.unparse(node.test) == "num_draft_tokens_per_req is not None"
            ),
            "condition on num_draft_tokens_per_req",
        ),
        """
        if num_draft_tokens_per_req is None:
            num_draft_tokens_per_req = np.zeros(input_batch.num_reqs, dtype=np.int32)
        # Without draft tokens a request still starts from the column of its last accepted
        # token; prompt chunks alone start from column 0.
        is_decode = input_batch.num_scheduled_tokens == num_draft_tokens_per_req + 1
        num_decode_draft_tokens_np[: input_batch.num_reqs] = np.where(
            is_decode & ~input_batch.is_prefilling_np,
            num_draft_tokens_per_req,
            -1,
        )
        """,
    )


def stream_the_maximum(module: Module) -> None:
    module.add_import("vllm_ascend.ops.triton.spec_decode.max_softmax", "max_softmax")
    method = module.scope("DynamicSpecScheduler._compute_dflash_token_probs")
    copy = module.call(method, "token_probs.copy_")
    module.replace(copy, "token_probs.copy_(max_softmax(logits).view(num_reqs, num_draft_tokens))")


def key_parameters_by_graph(module: Module) -> None:
    module.add_import("vllm_ascend.compilation.graph_keys", "PerGraph")
    for name in ("", "_draft", "_draft_prefill"):
        function = {"": "set_graph_params", "_draft": "set_draft_graph_params"}.get(
            name, "set_draft_graph_prefill_params"
        )
        scope = module.scope(function)
        call = module.call(scope, "GraphParams")
        for argument in call.args:
            assert isinstance(argument, ast.DictComp)
            factory = "list" if isinstance(argument.value, ast.List) else "lambda: None"
            module.replace(argument, f"PerGraph(aclgraph_capture_sizes, {factory})")


def _also_inherits(module: Module, name: str) -> None:
    module.add_import("vllm_ascend.compilation.graph_keys", "GraphKeyedCapture")
    manager = module.scope(name)
    assert isinstance(manager, ast.ClassDef)
    base = manager.bases[-1]
    module.replace(base, f"{module.segment(base)}, GraphKeyedCapture")


def key_target_graphs(module: Module) -> None:
    _also_inherits(module, "ModelAclGraphManager")


def key_dflash_graphs(module: Module) -> None:
    _also_inherits(module, "DFlashAclGraphManager")


def key_eagle_graphs(module: Module) -> None:
    _also_inherits(module, "EagleAclGraphManager")
    capture = module.call(module.scope("EagleAclGraphManager.capture"), "CudaGraphManager.capture")
    module.replace(capture.func, "GraphKeyedCapture.capture")
    imports = module.statement(
        module.tree,
        lambda node: (
            isinstance(node, ast.ImportFrom) and node.module == "vllm.v1.worker.gpu.cudagraph_utils"
        ),
        "import of vllm's graph utilities",
    )
    assert isinstance(imports, ast.ImportFrom)
    names = [alias.name for alias in imports.names if alias.name != "CudaGraphManager"]
    lines = "".join(f"    {name},\n" for name in names)
    module.replace_statement(imports, f"from {imports.module} import (\n{lines})")


def _our(name: str) -> str:
    from .series import our_text

    return our_text(f"vllm_ascend/{name}")


SERIES = Series(
    engine="vllm-ascend",
    package="vllm_ascend",
    written_for="main of 2026-08-22 (182b75e)",
    patches=(
        Patch(
            "[BugFix][MRV2] Pass is_prefilling once to the common attention metadata",
            """
            A hybrid model's state hands is_prefilling among its extra arguments, and the
            function passes its own beside them, so that every model with GDN layers stops with a
            TypeError on Model Runner V2 before its first kernel. The model state's value is the
            one that counts.

            How was this patch tested? New unit test; a hybrid model runs to the end on a host
            double of AscendCL. Not run on an NPU.
            """,
            edits={f"{V2}/attn_utils.py": pass_is_prefilling_once},
            files={
                f"{V2_TESTS}/test_attn_metadata_is_prefilling.py":
                "vllm_ascend/test_is_prefilling.py.in"
            },
        ),
        Patch(
            "[BugFix][MRV2] Draft steps skip metadata that has no sequence lengths",
            """
            MTP and EAGLE-3 advance seq_lens of every layer's metadata after a draft step. The
            metadata of a GDN layer has none, so both methods stop with an AttributeError on a
            hybrid target.

            How was this patch tested? New unit test. Not run on an NPU.
            """,
            edits={
                f"{V2}/spec_decode/autoregressive/speculator.py":
                skip_metadata_without_lengths
            },
            files={
                f"{V2_TESTS}/test_draft_step_lengths.py":
                "vllm_ascend/test_draft_step_lengths.py.in"
            },
        ),
        Patch(
            "[BugFix][Ops] Refuse ragged speculative rows in the AscendC GDN recurrence",
            """
            npu_recurrent_gated_delta_rule takes one state slot per token. The layer passes the
            flattened [num_reqs, num_spec + 1] table, which is right only while every request has
            num_spec + 1 rows: with fewer, every later request reads and writes slots of another
            one. A request that accepted more tokens than it verifies now makes its core return,
            and the rows that were left stay uninitialised. Dynamic verification lengths produce
            both on a hybrid target, without an error.

            The metadata builder knows the lengths on the host and records whether they are full;
            the layer raises where they are not.

            How was this patch tested? New unit tests; the operator's indexing was emulated on a
            CPU to confirm both effects. Not run on an NPU.
            """,
            edits={BUILDER: record_whether_rows_are_full, LAYER: refuse_ragged_rows},
            files={
                RAGGED: "vllm_ascend/gdn_ragged.py.in",
                "tests/ut/ops/test_gdn_ragged.py": "vllm_ascend/test_gdn_ragged.py.in",
            },
        ),
        Patch(
            "[Feature][Ops] Run ragged speculative rows of GDN through the Triton recurrence",
            """
            The Triton kernel of the KDA layers indexes the state table by request and column, and
            its start does not depend on the current length, so it answers ragged rows right. Full
            rows keep the AscendC operator.

            How was this patch tested? New unit tests of the launch; values compared with a plain
            recurrence under Triton's interpreter. Not run on an NPU.
            """,
            edits={LAYER: run_ragged_rows, RAGGED: add_the_ragged_recurrence},
            files={"tests/ut/ops/test_gdn_ragged.py": "vllm_ascend/test_gdn_ragged_kernel.py.in"},
        ),
        Patch(
            "[BugFix][MRV2] Keep requests without draft tokens on GDN's speculative path",
            """
            A decoding request for which nothing was drafted is marked like a prompt chunk, and a
            prompt chunk starts from state column 0. Its state lies in the column of the token that
            it accepted last, so its next tokens are computed from an older state. Whether a row is
            a verify row now depends on the request's phase, not on its number of draft tokens.

            How was this patch tested? New unit test. Not run on an NPU.
            """,
            edits={f"{V2}/model_states/mamba_hybrid.py": keep_requests_without_drafts},
            files={
                f"{V2_TESTS}/test_requests_without_drafts.py": (
                    "vllm_ascend/test_requests_without_drafts.py.in"
                )
            },
        ),
        Patch(
            "[Performance][SpecDecode] Confidence from one pass over the logits",
            """
            The dynamic scheduler copies the draft logits to float32, writes their softmax and
            reads its maximum: three arrays of [tokens, vocabulary]. The maximum of a softmax is
            1 / sum(exp(z - max z)), which one pass computes without writing any.

            How was this patch tested? New unit test; values compared with torch under Triton's
            interpreter. No speed is claimed: not run on an NPU.
            """,
            edits={"vllm_ascend/spec_decode/utils.py": stream_the_maximum},
            files={
                "vllm_ascend/ops/triton/spec_decode/max_softmax.py":
                "vllm_ascend/max_softmax.py.in",
                "tests/ut/spec_decode/test_max_softmax.py": "vllm_ascend/test_max_softmax.py.in",
            },
        ),
        Patch(
            "[BugFix][MRV2] Key captured attention parameters by graph, not by row count",
            """
            Events, handles, workspaces and arguments of captured attention calls are kept per
            number of tokens. Two graphs of one size, with different requests or LoRA cases, append
            to the same lists, and an update meant for one is sent to the other. The managers of
            Model Runner V2 now tell which graph is captured or replayed, and the tables keep one
            entry for each.

            How was this patch tested? New unit tests. Not run on an NPU.
            """,
            edits={
                "vllm_ascend/compilation/acl_graph.py": key_parameters_by_graph,
                f"{V2}/aclgraph_utils.py": key_target_graphs,
                f"{V2}/spec_decode/dflash/aclgraph.py": key_dflash_graphs,
                f"{V2}/spec_decode/eagle/aclgraph.py": key_eagle_graphs,
            },
            files={
                KEYS: "vllm_ascend/graph_keys.py.in",
                "tests/ut/compilation/test_graph_keys.py": "vllm_ascend/test_graph_keys.py.in",
            },
        ),
    ),
)  # fmt: skip
