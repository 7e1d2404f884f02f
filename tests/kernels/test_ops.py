"""The registry: what is picked where, that it says so, and that tests can override it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator

import pytest
import torch
from vllm_ascend_spec.kernels import ops
from vllm_ascend_spec.kernels.max_softmax import naive, triton

LOGITS = torch.tensor([[0.0, 2.0, 1.0]])


@pytest.fixture(autouse=True)
def fresh_registry() -> Iterator[None]:
    ops._preferred.cache_clear()
    ops._picks.clear()
    yield
    ops._preferred.cache_clear()
    ops._picks.clear()


def test_cpu_tensors_go_to_the_oracle_and_the_registry_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger=ops.__name__):
        _, tokens = ops.max_softmax(LOGITS)
        ops.max_softmax(LOGITS)
    assert tokens.tolist() == [1]
    pick = ops.picked()["max_softmax"]
    assert (pick.implementation, pick.device) == ("naive", "cpu")
    assert pick.reason == "no host implementation"
    said = [record.message for record in caplog.records]
    assert said == ["max_softmax on cpu runs as naive (no host implementation)"]  # once


@pytest.mark.parametrize("device", ["cuda", "npu"])
@pytest.mark.parametrize("operator", ["pack_rows", "max_softmax", "draft_inputs"])
def test_accelerators_get_triton(operator: str, device: str) -> None:
    function = ops.resolve(operator, device)
    assert function.__module__ == f"{ops.__package__}.{operator}.triton"
    assert ops.picked()[operator].implementation == "triton"


def test_ascend_code_is_preferred_where_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_unavailable", lambda *_: None)
    monkeypatch.setattr(ops, "_load", lambda operator, implementation: implementation)
    assert ops.resolve("pack_rows", "npu") == "ascend"
    assert ops.resolve("pack_rows", "cuda") == "triton"


def test_without_triton_the_oracle_serves_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else found(name)
    )
    function = ops.resolve("max_softmax", "cuda")
    assert function is naive.max_softmax
    assert ops.picked()["max_softmax"].reason == "triton is not installed"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_an_override_lasts_as_long_as_its_block() -> None:
    device = "cpu"
    with ops.override("max_softmax", "triton"):
        assert ops.resolve("max_softmax", device) is triton.max_softmax
        assert ops.picked()["max_softmax"] == ops.Pick("triton", "any", "override")
        with ops.override("max_softmax", "naive"):
            assert ops.resolve("max_softmax", device) is naive.max_softmax
        assert ops.resolve("max_softmax", device) is triton.max_softmax
    assert ops.resolve("max_softmax", device) is naive.max_softmax


def test_unknown_names_are_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"unknown operator 'softmax', known: pack_rows"):
        ops.resolve("softmax", "cpu")
    refused = pytest.raises(ValueError, match="'ascend' cannot be used, no ascend implementation")
    with refused, ops.override("pack_rows", "ascend"):
        pass


def test_every_operator_has_an_oracle_and_all_it_names_can_be_loaded() -> None:
    for operator, places in ops.OPERATORS.items():
        there = [kind for kind in places if ops._unavailable(operator, kind) is None]
        assert "naive" in there
        assert all(callable(ops._load(operator, kind)) for kind in there)
        assert callable(getattr(ops, operator))
