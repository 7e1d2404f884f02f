"""FULL graphs for rows of any length on vllm-ascend; importing this imports neither.

vllm-ascend captures a decode graph for every number of requests, K + 1 rows each, so a step with
trimmed rows finds none. With adaptive verification its graphs are captured once for each row count
instead, with as many requests as the engine may run: which request has how many rows is read from
the metadata, and the lengths of captured attention are updated before each replay.

What a launch is decides, not its shape: a prompt's last chunk of K + 1 tokens finds no graph here.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from vllm_ascend_spec.graphs import acl
from vllm_ascend_spec.graphs.dispatcher import Batch, Dispatcher, Replay, classify
from vllm_ascend_spec.graphs.keys import GraphStore, Phase, Role
from vllm_ascend_spec.options import Options

logger = logging.getLogger("vllm.ascend_spec.graphs")


def extend(upstream: Any) -> Any:
    """A graph manager derived from vllm-ascend's `ModelAclGraphManager`."""

    class AscendSpecGraphManager(upstream):
        """vllm-ascend's manager; `dispatcher` is None where every row has K + 1 tokens.

        described: how the runner knows each graph that the dispatcher answers with.
        """

        dispatcher: Dispatcher | None = None
        described: GraphStore[Any]

        def _init_candidates(self) -> None:
            super()._init_candidates()
            options = Options.from_additional_config(self.vllm_config.additional_config)
            if options.adaptive and self.cudagraph_mode.has_full_cudagraphs():
                self.dispatcher = _for_any_lengths(self)

        def dispatch(
            self, num_reqs: int, num_tokens: int, uniform_token_count: Any, num_active_loras: int
        ) -> Any:
            """The graph for the step that the runner launches; as upstream without one."""
            batch = self.model_runner.launched_batch
            if self.dispatcher is not None and batch is not None and self._graphs_captured:
                launch = self.dispatcher.dispatch(batch)
                if isinstance(launch, Replay):
                    return self.described[launch.key]
                logger.debug("eager: %s", launch.message)
            # Upstream's table was emptied, so that no graph is found by its shape.
            return super().dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras)

    AscendSpecGraphManager.__module__ = __name__
    AscendSpecGraphManager.__qualname__ = "AscendSpecGraphManager"
    return AscendSpecGraphManager


def _for_any_lengths(manager: Any) -> Dispatcher:
    """One graph for each captured row count, in place of those for equal requests."""
    from vllm.config.compilation import CUDAGraphMode

    equal = {graph.num_tokens: graph for graph in manager._capture_descs[CUDAGraphMode.FULL]}
    captures = acl.captures(equal, manager.max_num_reqs)
    manager.described = GraphStore()
    for capture in captures:
        graph = dataclasses.replace(
            equal[capture.key.rows], num_reqs=capture.key.requests, uniform_token_count=None
        )
        manager.described.put(capture.key, graph)
    # The largest first, as upstream captures them.
    keys = sorted(manager.described, reverse=True)
    manager._capture_descs[CUDAGraphMode.FULL] = [manager.described[key] for key in keys]
    manager._candidates.clear()
    return Dispatcher(Role.TARGET, captures)


def batch_of(scheduler_output: Any, runner: Any) -> Batch:
    """What the step is: prompt chunks beside verification rows, or verification rows alone.

    A decoding request without a draft token verifies its anchor, so it counts as such a row.
    """
    rows, phases = [], []
    for request, count in scheduler_output.num_scheduled_tokens.items():
        rows.append(count)
        phases.append(Phase.PREFILL if in_prompt(request, runner) else Phase.VERIFY)
    return classify(Role.TARGET, rows, phases)


def in_prompt(request: str, runner: Any) -> bool:
    """Whether the request's prompt is not computed yet; one that the runner has not met is new."""
    states = runner.req_states
    slot = states.req_id_to_index.get(request)
    if slot is None:
        return True
    return bool(states.num_computed_prefill_tokens[slot] < states.prefill_len.np[slot])
