"""Cursors of the replay layout: one for each request, kept on the device, shared by all layers.

vLLM's model state for hybrid models knows when a request enters (`add_request`), what a step holds
(`prepare_attn`) and how many of its rows were accepted (`postprocess_state`); a cursor is reset,
staged and advanced there. Nothing here waits for the device. Prefix caching: `replay_align.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ascend_spec.engine import replay_align
from vllm_ascend_spec.engine.patching import Replacement, in_place_of

if TYPE_CHECKING:  # declared before torch is wanted, and Triton must not be loaded early
    import torch
    from torch import Tensor

    from vllm_ascend_spec.kernels.gdn_verify.layout import ReplayLayout, StepCursor

_STATE = "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState"


class ReplaySteps:
    """The cursors of an engine's requests, and the step that is being run.

    Entries are request slots of the runner. `current` lies at fixed addresses, for graphs. `pages`:
    with prefix caching, once there are pages.
    """

    def __init__(
        self, layout: ReplayLayout, draft_tokens: int, requests: int, device: torch.device
    ) -> None:
        import torch

        from vllm_ascend_spec.kernels.gdn_verify import replay_cursor
        from vllm_ascend_spec.kernels.gdn_verify.layout import StepCursor

        self._kernels = replay_cursor
        self.cursor = replay_cursor.Cursor.allocate(
            requests, layout.ring_rows, draft_tokens + 1, device, null_slot=-1
        )
        self.current = StepCursor(
            *(torch.zeros(requests, dtype=torch.int32, device=device) for _ in range(3))
        )
        self.pages: replay_align.AlignedPages | None = None
        self._requests: Tensor | None = None
        self._step: tuple[Tensor, Tensor | None] | None = None

    def reset(self, request: int) -> None:
        """A request enters, or starts again: its state will be written by its prompt."""
        self.cursor.start[request].fill_(0)
        self.cursor.pending[request].fill_(0)

    def pretend(self, pending: int) -> None:
        """Let all requests have so many pending rows: for timing dummy steps, while none is live.

        0 ends the pretence.
        """
        self.cursor.pending.fill_(pending)

    def announce(self, requests: Tensor) -> None:
        """int32 [R]: request slots of the batch whose metadata is built next."""
        self._requests, self._step = requests, None

    def stage(self, query_start_loc: Tensor, verifies: Tensor | None) -> StepCursor:
        """Cursors of the announced batch, in its order; also noted for `advance`.

        query_start_loc: int32 [R + 1 or more]. verifies: bool [R or more], false for prompt
        chunks; None where all rows verify. May be repeated for a step.
        """
        assert self._requests is not None, "prepare_attn announces every batch"
        self._step = query_start_loc, verifies
        return self._kernels.stage(self.cursor, self._requests, query_start_loc, self.current)

    def advance(self, requests: Tensor, accepted: Tensor) -> None:
        """After sampling. accepted: int32 [R], tokens emitted, bonus included."""
        if self._step is None:  # no row verified
            return
        query_start_loc, verifies = self._step
        self._step = None
        self._kernels.advance(
            self.cursor, requests, query_start_loc, self.current, accepted, verifies
        )


def replacements() -> tuple[Replacement, ...]:
    """Where vLLM tells of requests and steps."""
    return (
        *(
            Replacement(
                target=f"{_STATE}.{name}",
                reason="cursors of the replay layout follow a request's rows",
                make=make,
            )
            for name, make in (
                ("__init__", _attach_after),
                ("add_request", _reset_after),
                ("prepare_attn", _announce_before),
                ("postprocess_state", _advance_after),
            )
        ),
        *replay_align.replacements(),
    )


def _attach_after(original: Any) -> Any:
    @in_place_of(original)
    def construct(self: Any, vllm_config: Any, *args: Any, **named: Any) -> None:
        original(self, vllm_config, *args, **named)
        self.ascend_spec_steps = None
        layers = vllm_config.compilation_config.static_forward_context.values()
        kept = [layer for layer in layers if getattr(layer, "ascend_spec_replay", None) is not None]
        if not kept:
            return
        self.ascend_spec_steps = ReplaySteps(
            kept[0].ascend_spec_replay,
            int(vllm_config.speculative_config.num_speculative_tokens),
            self.max_num_reqs,
            self.device,
        )
        for layer in kept:
            layer.ascend_spec_steps = self.ascend_spec_steps

    return construct


def _reset_after(original: Any) -> Any:
    @in_place_of(original)
    def add_request(self: Any, req_index: int, new_req_data: Any) -> None:
        original(self, req_index, new_req_data)
        if self.ascend_spec_steps is not None:
            self.ascend_spec_steps.reset(req_index)

    return add_request


def _announce_before(original: Any) -> Any:
    @in_place_of(original)
    def prepare_attn(self: Any, input_batch: Any, *args: Any, **named: Any) -> Any:
        if self.ascend_spec_steps is not None:
            self.ascend_spec_steps.announce(input_batch.idx_mapping)
        return original(self, input_batch, *args, **named)

    return prepare_attn


def _advance_after(original: Any) -> Any:
    @in_place_of(original)
    def postprocess_state(
        self: Any, idx_mapping: Any, num_sampled: Any, num_computed_tokens: Any = None
    ) -> None:
        original(self, idx_mapping, num_sampled, num_computed_tokens)
        steps = self.ascend_spec_steps
        if steps is None or isinstance(num_sampled, int):
            return
        steps.advance(idx_mapping, num_sampled)
        if steps.pages is not None and num_computed_tokens is not None:
            steps.pages.settle(
                idx_mapping, num_sampled, num_computed_tokens, self._mamba_state_idx_gpu
            )

    return postprocess_state
