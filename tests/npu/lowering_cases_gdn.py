"""Launches of the gated-delta-rule and convolution kernels that must lower for an NPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from recording import Launch, recorded
from vllm_ascend_spec.kernels.conv_verify import triton as conv_triton
from vllm_ascend_spec.kernels.gdn_verify import layout, replay, replay_cursor
from vllm_ascend_spec.kernels.gdn_verify import triton as native_triton

REQUESTS, ROWS, HK, HV, DIM, CHANNELS = 4, 8, 16, 32, 128, 8192

BY_ROWS = native_triton.RowConfig()


def _int32(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def _rows() -> list[torch.Tensor]:
    """q, k, v, a, b, A_log, dt_bias of REQUESTS * ROWS tokens."""
    tokens = REQUESTS * ROWS
    heads = [torch.zeros(tokens, h, DIM, dtype=torch.bfloat16) for h in (HK, HK, HV)]
    gates = [torch.zeros(tokens, HV, dtype=torch.bfloat16) for _ in range(2)]
    return [*heads, *gates, torch.zeros(HV), torch.zeros(HV)]


def _replay_state(dtype: torch.dtype) -> tuple[layout.ReplayCache, layout.StepCursor]:
    cache = layout.ReplayLayout(HK, HV, state_dtype=dtype).allocate(3, "cpu")
    return cache, layout.StepCursor(_int32(REQUESTS), _int32(REQUESTS), _int32(REQUESTS))


def replay_verify(dtype: torch.dtype) -> Callable[[], list[Launch]]:
    def launches() -> list[Launch]:
        cache, step = _replay_state(dtype)
        with recorded(replay) as found:
            replay.replay_verify(*_rows(), _int32(REQUESTS + 1), _int32(REQUESTS), step, cache)
        return found

    return launches


def replay_flush(dtype: torch.dtype) -> Callable[[], list[Launch]]:
    def launches() -> list[Launch]:
        cache, step = _replay_state(dtype)
        with recorded(replay) as found:
            replay.replay_flush(_int32(REQUESTS), step, cache)
        return found

    return launches


def cursor() -> list[Launch]:
    state = replay_cursor.Cursor.allocate(8, ring_rows=32, max_rows=8, device="cpu")
    slots, starts = _int32(REQUESTS), _int32(REQUESTS + 1)
    step = layout.StepCursor(_int32(REQUESTS), _int32(REQUESTS), _int32(REQUESTS))
    with recorded(replay_cursor) as found:
        replay_cursor.stage(state, slots, starts, step)
        replay_cursor.advance(state, slots, starts, step, _int32(REQUESTS))
    return found


def native_verify(
    dtype: torch.dtype, config: native_triton.RowConfig | None = None
) -> Callable[[], list[Launch]]:
    def launches() -> list[Launch]:
        states = torch.zeros(3, HV, DIM, DIM, dtype=dtype)
        indices = _int32(REQUESTS, ROWS)
        with recorded(native_triton) as found:
            native_triton.gdn_verify(
                *_rows(), states, _int32(REQUESTS + 1), indices, _int32(REQUESTS), config=config
            )
        return found

    return launches


def conv() -> list[Launch]:
    x = torch.zeros(REQUESTS * ROWS, CHANNELS, dtype=torch.bfloat16)
    weight = torch.zeros(CHANNELS, 4, dtype=torch.bfloat16)
    windows = torch.zeros(3, 2 + ROWS, CHANNELS, dtype=torch.bfloat16)
    with recorded(conv_triton) as found:
        conv_triton.conv_verify(
            x, weight, None, windows, _int32(REQUESTS + 1), _int32(REQUESTS), _int32(REQUESTS)
        )
    return found
