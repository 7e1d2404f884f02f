"""Which FULL graph of vllm-ascend a step with rows of any length replays."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_ascend_spec.engine import ascend_graphs

MAX_REQUESTS = 4
ROWS = 8  # K + 1


class Mode(Enum):
    NONE = 0
    FULL = 1

    def has_full_cudagraphs(self) -> bool:
        return self is Mode.FULL


@dataclass(frozen=True)
class Descriptor:
    cg_mode: Mode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None


class UpstreamManager:
    """As vLLM's: a graph for every number of requests, found by shape."""

    max_num_reqs = MAX_REQUESTS

    def __init__(self, runner: Any, adaptive: bool, mode: Mode = Mode.FULL) -> None:
        additional = {"ascend_spec": {"adaptive": adaptive}}
        self.vllm_config = SimpleNamespace(additional_config=additional)
        self.model_runner, self.cudagraph_mode = runner, mode
        self._graphs_captured = True
        self._init_candidates()

    def _init_candidates(self) -> None:
        graphs = [Descriptor(Mode.FULL, ROWS * n, n, ROWS) for n in (1, 2, 4)]
        self._capture_descs = {Mode.FULL: graphs}
        self._candidates = {graph.num_tokens: graph for graph in graphs}

    def dispatch(self, num_reqs: int, num_tokens: int, uniform: Any, loras: int) -> Descriptor:
        found = self._candidates.get(num_tokens)
        return found or Descriptor(Mode.NONE, num_tokens, num_reqs)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    compilation = ModuleType("vllm.config.compilation")
    compilation.CUDAGraphMode = Mode  # type: ignore[attr-defined]
    for name, module in (
        ("vllm", ModuleType("vllm")),
        ("vllm.config", ModuleType("vllm.config")),
        ("vllm.config.compilation", compilation),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    states = SimpleNamespace(
        req_id_to_index={name: i for i, name in enumerate("abcd")},
        num_computed_prefill_tokens=np.array([20, 20, 20, 20]),
        prefill_len=SimpleNamespace(np=np.array([20, 20, 20, 20])),
    )
    return SimpleNamespace(req_states=states, launched_batch=None)


def manager(runner: SimpleNamespace, **options: Any) -> Any:
    return ascend_graphs.extend(UpstreamManager)(runner, **options)


def launch(runner: SimpleNamespace, made: Any, rows: dict[str, int]) -> Descriptor:
    runner.launched_batch = ascend_graphs.batch_of(
        SimpleNamespace(num_scheduled_tokens=rows), runner
    )
    return made.dispatch(len(rows), sum(rows.values()), None, 0)


@pytest.mark.parametrize(
    ("rows", "graph"),
    [
        ({"a": 8}, 8),
        ({"a": 1}, 8),  # padded: three requests to spare for seven rows
        ({"a": 1, "b": 2, "c": 5}, 8),
        ({"a": 5, "b": 6, "c": 5}, 16),
        ({"a": 1, "b": 3, "c": 5}, 16),
        ({"a": 8, "b": 8, "c": 8}, 32),
        ({"a": 8, "b": 8, "c": 8, "d": 8}, 32),
    ],
)
def test_rows_of_any_length_find_the_smallest_graph(
    runner: SimpleNamespace, rows: dict[str, int], graph: int
):
    made = manager(runner, adaptive=True)
    assert launch(runner, made, rows) == Descriptor(Mode.FULL, graph, min(graph, MAX_REQUESTS))


@pytest.mark.parametrize(
    "rows",
    [
        {"a": 1, "b": 1, "c": 1, "d": 2},  # every request is real, so none can take three rows
        {"a": 8, "b": 2, "c": 2, "d": 2},
    ],
)
def test_padding_without_a_request_for_it_runs_without_a_graph(
    runner: SimpleNamespace, rows: dict[str, int]
):
    assert launch(runner, manager(runner, adaptive=True), rows).cg_mode is Mode.NONE


def test_a_prompt_chunk_of_a_verification_rows_shape_finds_no_graph(runner: SimpleNamespace):
    runner.req_states.num_computed_prefill_tokens[1] = 12
    made = manager(runner, adaptive=True)
    assert launch(runner, made, {"a": 8, "b": 8}).cg_mode is Mode.NONE
    assert launch(runner, made, {"a": 8, "c": 8}).cg_mode is Mode.FULL


def test_one_graph_for_each_row_count_is_captured(runner: SimpleNamespace):
    """vllm-ascend keeps the tasks of captured attention by row count alone."""
    made = manager(runner, adaptive=True)
    captured = [graph.num_tokens for graph in made._capture_descs[Mode.FULL]]
    assert captured == [32, 16, 8]
    assert [(key.rows, key.requests) for key in made.described] == [(8, 4), (16, 4), (32, 4)]


@pytest.mark.parametrize("options", [{"adaptive": False}, {"adaptive": True, "mode": Mode.NONE}])
def test_without_adaptive_verification_or_graphs_nothing_changes(
    runner: SimpleNamespace, options: dict[str, Any]
):
    made = manager(runner, **options)
    assert made.dispatcher is None
    assert made.dispatch(2, 16, ROWS, 0) == Descriptor(Mode.FULL, 16, 2, ROWS)


def test_a_dummy_run_has_no_batch_and_no_graph(runner: SimpleNamespace):
    assert manager(runner, adaptive=True).dispatch(2, 16, ROWS, 0).cg_mode is Mode.NONE
