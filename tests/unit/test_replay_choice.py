"""Which state layout `gdn_state: "auto"` means, and what stands against the replay layout."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ascend_spec.engine import replay
from vllm_ascend_spec.errors import UserError


class Device:
    """vLLM's platform of a GPU with this compute capability, or of a CPU."""

    def __init__(self, capability: int | None) -> None:
        self._capability = capability

    def is_cuda(self) -> bool:
        return self._capability is not None

    def is_device_capability(self, wanted: int) -> bool:
        return self._capability == wanted


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(capability: int | None) -> None:
        platforms = SimpleNamespace(current_platform=Device(capability))
        monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)

    types = (torch.bfloat16, torch.bfloat16)
    monkeypatch.setattr(replay, "_dtypes", lambda _: types)
    return put


def config(state: str = "auto", mode: str = "none", stages: int = 1) -> Any:
    text = SimpleNamespace(
        model_type="qwen3_5_text", linear_key_head_dim=128, linear_value_head_dim=128,
        linear_num_key_heads=16, linear_num_value_heads=32,
    )  # fmt: skip
    return SimpleNamespace(
        additional_config={"ascend_spec": {"gdn_state": state}},
        model_config=SimpleNamespace(hf_text_config=text, dtype=torch.bfloat16),
        speculative_config=SimpleNamespace(num_speculative_tokens=7),
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages, tensor_parallel_size=1),
        kv_transfer_config=None,
    )


@pytest.mark.parametrize("mode", ["none", "align"])
def test_auto_is_replay_on_hopper_with_prefix_caching_or_without(mode: str, on: Any) -> None:
    on(90)
    found = replay.planned(config(mode=mode))
    assert found is not None and found.ring_rows == 32


@pytest.mark.parametrize("capability", [None, 80, 100])
def test_auto_is_native_where_the_kernels_were_not_timed(capability: int | None, on: Any) -> None:
    on(capability)
    assert replay.planned(config()) is None
    assert replay.planned(config("replay")) is not None


def test_what_stands_against_it_decides_for_auto_and_is_an_error_when_asked_for(on: Any) -> None:
    on(90)
    assert replay.planned(config(stages=2)) is None
    assert replay.planned(config("native")) is None
    with pytest.raises(UserError, match="pipeline-parallel-size"):
        replay.planned(config("replay", stages=2))
    with pytest.raises(UserError, match="mamba-cache-mode is all"):
        replay.planned(config("replay", mode="all"))
