"""Prefix caching with the replay layout: states follow their request from block to block.

With prefix caching (`mamba_cache_mode` "align") vLLM keeps a request's state in the page of the
block that its last token falls into, and expects a full block's page to hold the state at the
block's end. vLLM's own copies take it that every row has a state of its own; here they are left the
convolution windows alone, and states are moved and settled by `kernels/gdn_verify/pages.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ascend_spec.engine.patching import Replacement, in_place_of

if TYPE_CHECKING:  # declared before torch is wanted, and Triton must not be loaded early
    from torch import Tensor

    from vllm_ascend_spec.kernels.gdn_verify.replay_cursor import Cursor

_STATE = "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState"


class AlignedPages:
    """Moves and settles the states of an engine's requests. All arguments lie on the device.

    layers: those of all groups, bound to their pages. groups: for each the index of its block
    table. tables: int32 [requests, columns] by request slot, at addresses that stay.
    """

    def __init__(
        self, cursor: Cursor, layers: list[Any], groups: list[int], tables: list[Tensor],
        block_tokens: int,
    ) -> None:  # fmt: skip
        from vllm_ascend_spec.engine.replay import cache_of
        from vllm_ascend_spec.kernels.gdn_verify.pages import FoldPlan, PagePool

        self._cursor, self._block_tokens = cursor, block_tokens
        self._pool = PagePool([cache_of(layer) for layer in layers], groups, tables)
        self._plan = FoldPlan.allocate(tables[0].shape[0], self._pool.states.device)

    def move(self, requests: Tensor, previous: Tensor, running: Tensor) -> None:
        """Before a step. previous, running: int32 [slots], block of the last step and of this."""
        from vllm_ascend_spec.kernels import ops

        ops.plan_moves(self._cursor, requests, previous, running, self._plan)
        ops.fold_pages(self._plan, self._pool)

    def settle(self, requests: Tensor, accepted: Tensor, computed: Tensor, running: Tensor) -> None:
        """After a step, its cursors advanced. computed: int32 [slots], with what was accepted."""
        from vllm_ascend_spec.kernels import ops

        ops.plan_settles(
            self._cursor, requests, accepted, computed, running, self._block_tokens, self._plan
        )
        ops.fold_pages(self._plan, self._pool)


def replacements() -> tuple[Replacement, ...]:
    """Where vLLM learns of the pages, and where it moves states itself."""
    return (
        Replacement(
            target=f"{_STATE}.initialize_kv_cache",
            reason="vLLM's copies of states are for the native layout",
            make=_keep_windows_only,
        ),
        Replacement(
            target=f"{_STATE}.preprocess_state",
            reason="states of the replay layout follow their request into its next block",
            make=_move_after,
        ),
    )


def _keep_windows_only(original: Any) -> Any:
    @in_place_of(original)
    def initialize_kv_cache(self: Any, kv_cache_config: Any, block_tables: Any) -> None:
        if self.ascend_spec_steps is not None and self._align_mode:
            self._mamba_state_copy_funcs = _window_copies(self.model, kv_cache_config)
        original(self, kv_cache_config, block_tables)
        if self.ascend_spec_steps is not None and self._align_mode:
            self.ascend_spec_steps.pages = _pages(self, kv_cache_config, block_tables)

    return initialize_kv_cache


def _window_copies(model: Any, kv_cache_config: Any) -> dict[Any, Any]:
    """vLLM's copy functions for the first tensor of a page; it takes any prefix of them."""
    from vllm.v1.worker.mamba_utils import get_mamba_groups

    types = {spec.mamba_type for spec in get_mamba_groups(kv_cache_config)}
    functions = model.get_mamba_state_copy_funcs(types)
    return {mamba_type: copies[:1] for mamba_type, copies in functions.items()}


def _pages(state: Any, kv_cache_config: Any, block_tables: Any) -> AlignedPages:
    ids, spec = state._get_mamba_group_info(kv_cache_config)
    built = state.vllm_config.compilation_config.static_forward_context
    names = [
        (index, name)
        for index, group in enumerate(ids)
        for name in kv_cache_config.kv_cache_groups[group].layer_names
    ]
    layers = [built[name] for _, name in names]
    native = [
        name
        for (_, name), layer in zip(names, layers, strict=True)
        if getattr(layer, "ascend_spec_replay", None) is None
    ]
    if native:
        raise RuntimeError(f"states of {native} are not in the replay layout, others' are")
    return AlignedPages(
        state.ascend_spec_steps.cursor,
        layers,
        [index for index, _ in names],
        [block_tables.block_tables[group].gpu for group in ids],
        int(spec.block_size),
    )


def _move_after(original: Any) -> Any:
    @in_place_of(original)
    def preprocess_state(self: Any, input_batch: Any, *args: Any, **named: Any) -> None:
        original(self, input_batch, *args, **named)
        pages = getattr(self.ascend_spec_steps, "pages", None)
        if pages is not None and input_batch.num_reqs:
            pages.move(
                input_batch.idx_mapping[: input_batch.num_reqs],
                self._mamba_src_col_gpu,
                self._mamba_state_idx_gpu,
            )

    return preprocess_state
