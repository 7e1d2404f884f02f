"""The registry: what is picked where, that it says so, and that tests can override it."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm_ascend_spec.kernels import _cuda_library, ops
from vllm_ascend_spec.kernels.gdn_verify import cuda, replay, replay_naive
from vllm_ascend_spec.kernels.gdn_verify import naive as native_naive
from vllm_ascend_spec.kernels.max_softmax import naive, triton
from vllm_ascend_spec.kernels.pack_rows import cuda as pack_cuda
from vllm_ascend_spec.kernels.pack_rows import triton as pack_triton

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
@pytest.mark.parametrize("operator", ["max_softmax", "draft_inputs"])
def test_accelerators_get_triton(operator: str, device: str) -> None:
    function = ops.resolve(operator, device)
    assert function.__module__ == f"{ops.__package__}.{operator}.triton"
    assert ops.picked()[operator].implementation == "triton"


def test_compiled_code_is_preferred_where_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_unavailable", lambda *_: None)
    monkeypatch.setattr(ops, "_load", lambda operator, implementation: implementation)
    assert ops.resolve("pack_rows", "npu") == "ascend"
    assert ops.resolve("pack_rows", "cuda") == "cuda"


def test_replay_on_cuda_runs_compiled_where_there_is_a_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "unavailable", lambda: "this device is sm_80")
    assert ops.resolve("replay_verify", "cuda") is replay.replay_verify
    assert ops.picked()["replay_verify"].reason == "this device is sm_80"
    ops._preferred.cache_clear()
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    assert ops.resolve("replay_verify", "cuda") is cuda.replay_verify
    assert ops.resolve("replay_verify", "npu") is replay.replay_verify
    assert ops.resolve("replay_flush", "cuda") is replay.replay_flush


def test_pack_rows_on_cuda_runs_compiled_where_there_is_a_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pack_cuda, "unavailable", lambda: "no CUDA device")
    assert ops.resolve("pack_rows", "cuda") is pack_triton.pack_rows
    ops._preferred.cache_clear()
    monkeypatch.setattr(pack_cuda, "unavailable", lambda: None)
    assert ops.resolve("pack_rows", "cuda") is pack_cuda.pack_rows
    assert ops.resolve("pack_rows", "npu") is pack_triton.pack_rows


def test_a_host_without_a_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda_library, "_nvcc", lambda: None)
    monkeypatch.setattr(_cuda_library, "device_obstacle", lambda: None)
    with pytest.raises(_cuda_library.MissingLibraryError, match="put nvcc on PATH"):
        _cuda_library.library.__wrapped__("no_such_kernel")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_builds_the_library_once_and_its_words_are_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = _cuda_library.library.__wrapped__("pack_rows")
    written = path.stat().st_mtime_ns
    assert _cuda_library.library.__wrapped__("pack_rows") == path
    assert path.stat().st_mtime_ns == written
    assert path.is_relative_to(tmp_path)
    (tmp_path / "broken.cu").write_text("this is no CUDA\n")
    monkeypatch.setattr(_cuda_library, "_SOURCES", tmp_path)
    with pytest.raises(
        _cuda_library.MissingLibraryError, match=r"nvcc refused broken\.cu: .*error"
    ):
        _cuda_library.library.__wrapped__("broken")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_libraries_for_a_machine_without_nvcc_are_found_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Built into the package's folder, as a host with a source tree and no compiler finds them."""
    import vllm_ascend_spec

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "nothing.cu").write_text('extern "C" int nothing() { return 7; }\n')
    monkeypatch.setattr(_cuda_library, "_SOURCES", sources)
    assert _cuda_library.build_into(tmp_path) == [tmp_path / "libnothing.so"]
    monkeypatch.setattr(_cuda_library, "_nvcc", lambda: None)
    monkeypatch.setattr(vllm_ascend_spec, "__path__", [str(tmp_path)])
    path = _cuda_library.library.__wrapped__("nothing")
    assert ctypes.CDLL(str(path)).nothing() == 7
    with pytest.raises(_cuda_library.MissingLibraryError, match="there is no nvcc"):
        _cuda_library.build_into(tmp_path)


@pytest.mark.parametrize("implementation", ["naive", "host", "triton"])
def test_native_layout_takes_raw_gates_everywhere(
    implementation: str, device: torch.device
) -> None:
    """One call, three implementations: the same rows, states and untouched outputs."""
    random = torch.Generator().manual_seed(0)
    normal = lambda *size: torch.randn(*size, generator=random)  # noqa: E731
    integer = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    q, k, v = (normal(6, heads, 32).bfloat16() for heads in (1, 1, 2))
    a, b, A_log, dt_bias = normal(6, 2).bfloat16(), normal(6, 2).bfloat16(), normal(2), normal(2)
    states = normal(8, 2, 32, 32)
    places = (
        integer(0, 3, 4, 6, 6), integer(*range(1, 7), 0, 0, 0, 0, 0, 0).view(4, 3),
        integer(2, 1, 1, 1),
    )  # fmt: skip
    exact = states.double()
    gates = replay_naive.gates(a, b, A_log, dt_bias, torch.float64)
    wanted = native_naive.gdn_verify(q.double(), k.double(), v.double(), *gates, exact, *places)
    arguments = [x.to(device) for x in (q, k, v, a, b, A_log, dt_bias, states, *places)]
    out = torch.full_like(arguments[2], 777.0)
    with ops.override("gdn_verify", implementation):
        ops.gdn_verify(*arguments, out=out, max_rows=3, scale=32**-0.5)
    torch.testing.assert_close(out[:4].cpu().double(), wanted[:4], rtol=2e-2, atol=2e-2)
    assert bool((out[4:] == 777.0).all())  # a padding request's rows
    torch.testing.assert_close(arguments[7].cpu().double(), exact, rtol=1e-4, atol=1e-4)


def test_without_triton_the_oracle_serves_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else found(name)
    )
    function = ops.resolve("max_softmax", "cuda")
    assert function is naive.max_softmax
    said = "no cuda implementation; triton is not installed"
    assert ops.picked()["max_softmax"].reason == said
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


def test_a_library_of_other_sources_is_passed_over_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stale() -> None:
        raise RuntimeError("lib.so was built from other sources")

    monkeypatch.setattr(_cuda_library, "device_obstacle", lambda: None)
    assert "other sources" in (_cuda_library.unavailable(stale) or "")
