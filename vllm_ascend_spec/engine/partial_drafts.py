"""Drafting rounds for a part of the batch, for block drafters (DFlash, DFlash 2, DSpark).

Upstream drafts for every request or for none. Here the planner names the requests that will be
verified: keys and values of the context are stored for all of them in a graph of its own, and the
drafter's graph runs for the named ones alone, at the size that holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import prepare_dflash_inputs

from vllm_ascend_spec.budget.survival import Ints


@dataclass(frozen=True)
class Round:
    """What upstream's `propose` is given; names and shapes are its own."""

    input_batch: Any
    last_hidden_states: torch.Tensor
    aux_hidden_states: list[torch.Tensor] | None
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    next_prefill_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Round:
        return cls(**{name: arguments[name] for name in cls.__dataclass_fields__})


class ContextGraphs:
    """Keys and values of a step's rows into the drafter's cache, one graph for each size."""

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @staticmethod
    def sizes(largest: int) -> list[int]:
        """Rows of the graphs, ascending: powers of two, and half-way steps from 16 on."""
        found, size = set(), 1
        while size < largest:
            found |= {size, size * 3 // 2} if size >= 16 else {size}
            size *= 2
        return sorted({rows for rows in found if rows < largest} | {largest})

    def capture(self) -> None:
        """Record the graphs; nothing is written to the cache meanwhile."""
        speculator = self._speculator
        manager = speculator.query_cudagraph_manager
        if manager is None or not manager.graphs:
            return
        self._graphs.clear()
        speculator._context_slot_mappings.fill_(PAD_SLOT_ID)
        largest = speculator._num_graph_context_tokens(speculator.max_num_reqs)
        with graph_capture(device=speculator.device):
            for rows in reversed(self.sizes(largest)):
                speculator._precompute_context_kv(0, rows)
                graph = torch.cuda.CUDAGraph()
                with (
                    capture_pool(manager.pool, speculator.vllm_config) as pool,
                    torch.cuda.graph(graph, pool=pool),
                ):
                    speculator._precompute_context_kv(0, rows)
                self._graphs[rows] = graph

    def store(self, rows: int) -> None:
        """The first `rows` rows of the speculator's context buffers."""
        speculator = self._speculator
        size = min((size for size in self._graphs if size >= rows), default=None)
        if size is None:
            speculator._precompute_context_kv(0, rows)
            return
        speculator._context_slot_mappings[:, rows:size].fill_(PAD_SLOT_ID)
        self._graphs[size].replay()


@torch.inference_mode()
def draft(speculator: Any, contexts: ContextGraphs, step: Round, chosen: Ints) -> torch.Tensor:
    """One round that drafts for the batch rows `chosen` (ascending, may be empty).

    Returns int64 [R, K] in batch order; entries of other rows mean nothing, and their confidences
    are 0.
    """
    batch = step.input_batch
    store_context(speculator, contexts, step)
    drafts = speculator.draft_tokens[: batch.num_reqs]
    confidence = speculator.draft_token_confidence_probs[: batch.num_reqs]
    if chosen.size == 0:
        confidence.zero_()
        return drafts
    rows = async_tensor_h2d(chosen, device=speculator.device)
    _prepare(speculator, step, _sub_batch(step, rows, chosen))
    _run(speculator, batch.seq_lens_cpu_upper_bound[torch.from_numpy(chosen)])
    made = drafts[: chosen.size].clone(), confidence[: chosen.size].clone()
    drafts[rows] = made[0]
    confidence.zero_()
    confidence[rows] = made[1]
    return drafts


def store_context(speculator: Any, contexts: ContextGraphs, step: Round) -> None:
    """What the target computed in this step goes into the drafter's cache."""
    batch, rows = step.input_batch, step.input_batch.num_tokens
    hidden = step.last_hidden_states
    if step.aux_hidden_states:
        hidden = speculator.model.combine_hidden_states(torch.cat(step.aux_hidden_states, dim=-1))
    speculator.hidden_states[:rows].copy_(hidden[:rows])
    speculator.prepare_context_anchor(batch, step.num_rejected)
    longest = int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max())
    speculator.draft_max_seq_len = min(
        longest + speculator.num_query_per_req, speculator.max_model_len
    )
    _prepare(speculator, step, SimpleNamespace(batch=batch, step=step))
    contexts.store(rows)


def _sub_batch(step: Round, rows: torch.Tensor, chosen: Ints) -> SimpleNamespace:
    """The chosen requests as a target batch of one row each: the last one that was accepted."""
    batch, requests = step.input_batch, len(chosen)
    rejected = step.num_rejected[rows]
    last = batch.query_start_loc[1:][rows] - rejected - 1
    starts = torch.arange(requests + 1, dtype=torch.int32, device=rows.device)
    sub = SimpleNamespace(
        num_reqs=requests,
        positions=batch.positions[last],
        query_start_loc=starts,
        idx_mapping=batch.idx_mapping[rows],
        num_scheduled_tokens=np.ones(requests, dtype=np.int32),
    )
    verdict = SimpleNamespace(
        num_sampled=step.num_sampled[rows], num_rejected=torch.zeros_like(rejected)
    )
    return SimpleNamespace(batch=sub, step=verdict)


def _prepare(speculator: Any, step: Round, part: SimpleNamespace) -> None:
    """Upstream's kernel: slots of the context, inputs of the queries, of the requests in `part`."""
    tables = speculator.block_tables
    if part.batch is not step.input_batch:
        # The target's forward pass is over; its next step gathers the tables anew.
        tables.gather_block_tables(part.batch.idx_mapping, num_reqs_padded=part.batch.num_reqs)
    for group, gid in enumerate(speculator.draft_kv_cache_group_ids):
        prepare_dflash_inputs(
            speculator.input_buffers, tables.slot_mappings[gid], speculator.context_positions,
            speculator._context_slot_mappings[group], speculator.sample_indices,
            speculator.sample_pos, speculator.sample_idx_mapping, speculator.temperature,
            speculator.seeds, part.batch, part.step.num_sampled, part.step.num_rejected,
            step.last_sampled, step.next_prefill_tokens, step.temperature, step.seeds,
            tables.input_block_tables[gid], tables.block_sizes[gid], tables.cp_rank,
            speculator.dcp_size, tables.cp_interleave, speculator.parallel_drafting_token_id,
            speculator.num_query_per_req, speculator.num_speculative_steps,
            speculator.max_num_reqs, speculator.max_num_tokens, speculator.max_model_len,
            speculator.sample_from_anchor,
        )  # fmt: skip


def _run(speculator: Any, longest: torch.Tensor) -> None:
    """The drafter over the requests prepared last. longest: bounds of their lengths, on the host.

    The context is stored already: rows that the graph stores again are padding.
    """
    requests, width = len(longest), speculator.num_query_per_req
    shape, _ = dispatch_cg_and_sync_dp(
        speculator.query_cudagraph_manager,
        requests,
        requests * width,
        uniform_token_count=width,
        dp_size=speculator.dp_size,
        dp_rank=speculator.dp_rank,
    )
    full = shape.cg_mode == CUDAGraphMode.FULL
    metadata = None
    if not (full and speculator.supports_decode_metadata_update):
        metadata = speculator._build_uniform_attn_metadata(
            num_reqs=requests,
            batch_desc=shape,
            num_query_per_req=width,
            seq_lens_cpu_upper_bound=longest,
            step=width,
            causal=speculator._group_causal,
        )
    speculator._prepare_eplb_forward(requests * width)
    if full:
        stored = speculator._num_graph_context_tokens(shape.num_reqs)
        speculator._context_slot_mappings[:, :stored].fill_(PAD_SLOT_ID)
        speculator.query_cudagraph_manager.run_fullgraph(shape)
        return
    slots = build_slot_mappings_by_layer(
        speculator.block_tables.slot_mappings[:, : shape.num_tokens], speculator.kv_cache_config
    )
    speculator._generate_draft(
        requests,
        shape.num_tokens,
        metadata,
        slots,
        num_tokens_across_dp=None,
        cudagraph_runtime_mode=shape.cg_mode,
    )
