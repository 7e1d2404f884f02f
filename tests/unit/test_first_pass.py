"""The drafter's first pass stays out of full graphs where the target's rows vary."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_spec.engine import first_pass


class Mode(Enum):
    """As much of vLLM's `CUDAGraphMode` as is asked."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def has_piecewise_cudagraphs(self) -> bool:
        return self in (Mode.PIECEWISE, Mode.FULL_AND_PIECEWISE)


class Graphs:
    def __init__(self, config: Any, device: Any, mode: Mode, decode_query_len: int) -> None:
        self.made_of, self.decode_query_len = (config, device, mode), decode_query_len


def speculator(adaptive: bool, mode: Mode) -> Any:
    made = SimpleNamespace(vllm_config="a", device="b", enable_adaptive_verification=adaptive)

    def as_vllm_does(self: Any, cudagraph_mode: Mode) -> None:
        self.prefill_cudagraph_manager = Graphs("a", "b", cudagraph_mode, 8)
        self.decode_cudagraph_manager = Graphs("a", "b", cudagraph_mode, 1)

    (replacement,) = first_pass.replacements()
    replacement.make(as_vllm_does)(made, mode)
    return made


@pytest.mark.parametrize(
    ("mode", "left"),
    [
        (Mode.FULL_DECODE_ONLY, Mode.NONE),
        (Mode.FULL_AND_PIECEWISE, Mode.PIECEWISE),
        (Mode.FULL, Mode.NONE),
        (Mode.NONE, Mode.NONE),
    ],
)
def test_only_its_full_graphs_go(mode: Mode, left: Mode):
    made = speculator(adaptive=True, mode=mode)
    assert made.prefill_cudagraph_manager.made_of == ("a", "b", left)
    assert made.prefill_cudagraph_manager.decode_query_len == 8
    assert made.decode_cudagraph_manager.made_of == ("a", "b", mode)


def test_fixed_lengths_keep_them():
    made = speculator(adaptive=False, mode=Mode.FULL_DECODE_ONLY)
    assert made.prefill_cudagraph_manager.made_of == ("a", "b", Mode.FULL_DECODE_ONLY)
