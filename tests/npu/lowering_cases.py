"""Launches that must lower for an NPU: each operator's own launcher at the shapes that matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import lowering_cases_gdn as gdn
import torch
from recording import Launch, recorded
from vllm_ascend_spec.kernels import draft_inputs, pack_rows, record_round
from vllm_ascend_spec.kernels.draft_inputs import triton as draft_inputs_triton
from vllm_ascend_spec.kernels.max_softmax import triton as max_softmax_triton
from vllm_ascend_spec.kernels.pack_rows import triton as pack_rows_triton
from vllm_ascend_spec.kernels.record_round import triton as record_round_triton


@dataclass(frozen=True)
class Case:
    """scalar_accesses: single-element accesses in loops that the lowered code may have, and why."""

    name: str
    launches: Callable[[], list[Launch]]
    scalar_accesses: int = 0
    why: str = ""


def _int32(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def pack(requests: int, positions: int) -> Callable[[], list[Launch]]:
    def launches() -> list[Launch]:
        out = pack_rows.PackedRows.allocate(requests, "cpu")
        batch = pack_rows.Batch(
            _int32(requests), _int32(requests), _int32(requests), num_requests=_int32(1)
        )
        with recorded(pack_rows_triton) as found:
            scores = torch.zeros(requests, positions)
            pack_rows_triton.pack_rows(scores, _int32(1), batch, out)
        return found

    return launches


def softmax(dtype: torch.dtype, **options: torch.Tensor) -> Callable[[], list[Launch]]:
    def launches() -> list[Launch]:
        with recorded(max_softmax_triton) as found:
            max_softmax_triton.max_softmax(torch.zeros(64, 32768, dtype=dtype), **options)
        return found

    return launches


def shard() -> list[Launch]:
    with recorded(max_softmax_triton) as found:
        max_softmax_triton.max_softmax_partial(torch.zeros(2, 65536), first_id=65536)
    return found


def draft(requests: int, extra_rows: int, mrope: bool) -> Callable[[], list[Launch]]:
    def launches() -> list[Launch]:
        shape = draft_inputs.BlockShape(7, 7 + extra_rows, 1, 128, 32768)
        rows = 8 * requests
        out = draft_inputs.DraftBuffers.allocate(requests, shape, rows, "cpu", mrope=mrope)
        step = draft_inputs.TargetStep(
            _int32(requests + 1), torch.zeros(rows, dtype=torch.int64), _int32(requests),
            _int32(requests), _int32(requests), torch.zeros(requests, dtype=torch.int64),
            _int32(requests), _int32(requests, 256), _int32(requests),
            torch.zeros(3, rows, dtype=torch.int64) if mrope else None,
            _int32(requests) if mrope else None, _int32(1),
        )  # fmt: skip
        with recorded(draft_inputs_triton) as found:
            draft_inputs_triton.draft_inputs(step, shape, out)
        return found

    return launches


def recorded_round() -> list[Launch]:
    requests, depth, slots, levels = 256, 7, 512, 32
    tables = record_round.RoundTables(torch.zeros(2, depth, levels), _int32(slots), _int32(slots))
    verdict = record_round.Verdict(_int32(requests), _int32(requests))
    with recorded(record_round_triton) as found:
        record_round_triton.record_round(
            torch.zeros(requests, depth), _int32(requests), tables, torch.zeros(slots, depth),
            torch.zeros(requests, depth + 2), verdict,
        )  # fmt: skip
    return found


_SUMS = "three running sums over at most 1024 requests, for ties and row offsets, once a step"
_D2T = "one look-up of a target id a row"
_LOOK_UPS = "class, chances and ranking row of each request: look-ups by nature, once a round"
_PAGES = "look-ups by page, by state row and by target row: gathers by nature"
_SCALARS = "a segment's own scalars: its row, temperature and three results, none in the row loop"
_CURSOR = "slots, lengths and cursors of requests, read by request and slot"
_SYSTEM = (
    _CURSOR + "; v, outputs and updates, which lie [rows, dv] and are held transposed, gates, and "
    "the ring's rows at places modulo W: all element by element, states are not"
)

CASES = [
    Case("pack_rows 256x15", pack(256, 15), 9, _SUMS),
    Case("pack_rows 1024x7", pack(1024, 7), 9, _SUMS),
    Case("pack_rows 512x16", pack(512, 16), 9, _SUMS),
    Case("max_softmax fp32", softmax(torch.float32), 40, _SCALARS),
    Case(
        "max_softmax bf16 d2t temperature",
        softmax(
            torch.bfloat16, d2t=torch.zeros(32768, dtype=torch.int64), temperature=torch.ones(64)
        ),
        40,
        _SCALARS + "; " + _D2T,
    ),
    Case("max_softmax shard", shard, 40, _SCALARS),
    Case("draft_inputs 256 DFlash", draft(256, 1, mrope=False), 40, _PAGES),
    Case("draft_inputs 256 DSpark M-RoPE", draft(256, 0, mrope=True), 40, _PAGES),
    Case("draft_inputs 1024 DSpark", draft(1024, 0, mrope=False), 40, _PAGES),
    Case("record_round 256x7", recorded_round, 12, _LOOK_UPS),
    Case("replay_verify bf16", gdn.replay_verify(torch.bfloat16), 48, _SYSTEM),
    Case("replay_verify fp32", gdn.replay_verify(torch.float32), 38, _SYSTEM),
    Case("replay_flush bf16", gdn.replay_flush(torch.bfloat16), 10, _CURSOR),
    Case("replay_flush fp32", gdn.replay_flush(torch.float32), 10, _CURSOR),
    Case("replay cursor", gdn.cursor, 13, _CURSOR),
    Case("gdn_verify native bf16", gdn.native_verify(torch.bfloat16), 31, _SYSTEM),
    Case("gdn_verify native fp32", gdn.native_verify(torch.float32), 29, _SYSTEM),
    Case(
        "gdn_verify native rows bf16", gdn.native_verify(torch.bfloat16, gdn.BY_ROWS), 47, _SYSTEM
    ),
    Case("gdn_verify native rows fp32", gdn.native_verify(torch.float32, gdn.BY_ROWS), 47, _SYSTEM),
    Case("conv_verify", gdn.conv, 4, _CURSOR),
]
