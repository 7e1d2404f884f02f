"""csrc/ascend on a CPU: its tiling arithmetic, and its kernels' own source on a double of AscendC.

The double (ascendc/kernel_operator.h) checks addresses, on-chip space, alignment of copies and the
waits between pipes. CANN's compiler has not seen this code, and no NPU has run it.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from vllm_ascend_spec.kernels.gdn_verify import ascend_cube
from vllm_ascend_spec.kernels.gdn_verify.naive import gdn_verify

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "csrc/ascend"
DOUBLE = HERE / "ascendc"
MEMORY = 192 * 1024
MAX_ROWS = 16

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the double")

UINT32, UINT64 = ctypes.c_uint32, ctypes.c_uint64


class Shape(ctypes.Structure):
    _fields_ = [(n, UINT32) for n in (
        "requests", "key_heads", "value_heads", "key_size", "value_size", "columns", "state_bytes"
    )]  # fmt: skip


class Device(ctypes.Structure):
    _fields_ = [(n, UINT32) for n in ("cube_cores", "vector_cores", "vector_memory_bytes")]


class Tiling(ctypes.Structure):
    _fields_ = [
        *((n, UINT32) for n in (
            "requests", "key_heads", "value_heads", "key_size", "value_size", "columns",
            "value_tile", "cube_cores", "vector_cores",
        )),
        *((n, UINT64) for n in ("projection_floats", "gram_offset", "workspace_bytes")),
        ("scale", ctypes.c_float),
    ]  # fmt: skip


class Buffer(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("bytes", UINT64)]


def build(folder: Path, source: Path = SOURCE) -> ctypes.CDLL:
    library = folder / "runner.so"
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", f"-I{DOUBLE}", f"-I{source}"]
    done = subprocess.run(
        [*command, str(DOUBLE / "runner.cpp"), "-o", str(library)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = ctypes.CDLL(str(library))
    found.make_tiling.restype = ctypes.c_char_p
    found.make_tiling.argtypes = [
        ctypes.POINTER(Shape), ctypes.POINTER(Device), ctypes.c_float, ctypes.POINTER(Tiling)
    ]  # fmt: skip
    return found


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("ascendc"))


def tiling_of(
    runner: ctypes.CDLL, shape: Shape, cores: tuple[int, int] = (24, 48), memory: int = MEMORY
) -> Tiling | str:
    tiling = Tiling()
    problem = runner.make_tiling(shape, Device(*cores, memory), 0.125, tiling)
    return problem.decode() if problem else tiling


SIZES = st.integers(1, 16).map(lambda n: 16 * n)


@given(
    st.integers(1, 1024), st.integers(1, 32), st.integers(1, 4), SIZES, SIZES, st.integers(1, 16),
    st.sampled_from([2, 4]), st.sampled_from([192, 256]),
)  # fmt: skip
def test_every_tiling_fits_the_chip_and_covers_the_state(
    runner: ctypes.CDLL, requests: int, key_heads: int, group: int, key_size: int, value_size: int,
    columns: int, state_bytes: int, kilobytes: int,
) -> None:  # fmt: skip
    heads = key_heads * group
    shape = Shape(requests, key_heads, heads, key_size, value_size, columns, state_bytes)
    tiling = tiling_of(runner, shape, memory=kilobytes * 1024)
    assert isinstance(tiling, Tiling), tiling
    assert runner.vector_bytes(ctypes.byref(tiling), state_bytes) <= (kilobytes - 8) * 1024
    assert tiling.value_tile % 8 == 0 and value_size % tiling.value_tile == 0
    units = requests * heads
    assert (tiling.cube_cores, tiling.vector_cores) == (min(units, 24), min(units, 48))
    # Projections, then Gram blocks, none over another and none past the end.
    assert tiling.projection_floats == 2 * MAX_ROWS * value_size
    assert tiling.gram_offset == units * tiling.projection_floats
    grams = requests * key_heads * 2 * MAX_ROWS * MAX_ROWS
    assert tiling.workspace_bytes == 4 * (tiling.gram_offset + grams)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"value_heads": 3}, "value heads must be a multiple of key heads"),
        ({"key_size": 120}, "key size must be a multiple of 16"),
        ({"key_size": 272}, "key size must be a multiple of 16, 256 at most"),
        ({"value_size": 0}, "value size must be a multiple of 16"),
        ({"columns": 17}, "state columns must be 1 to 16"),
        ({"columns": 0}, "state columns must be 1 to 16"),
        ({"state_bytes": 8}, "states must be bfloat16 or float32"),
    ],
)
def test_a_shape_that_cannot_be_cut_is_named(
    runner: ctypes.CDLL, change: dict[str, int], said: str
) -> None:
    given_shape = {
        "requests": 4, "key_heads": 2, "value_heads": 4, "key_size": 128, "value_size": 128,
        "columns": 8, "state_bytes": 4,
    }  # fmt: skip
    assert said in str(tiling_of(runner, Shape(**given_shape | change)))
    assert "no tile" in str(tiling_of(runner, Shape(**given_shape), memory=64 * 1024))
    assert "no cores" in str(tiling_of(runner, Shape(**given_shape), cores=(0, 48)))


class Problem:
    """A ragged step with seeded inputs; NaN where nothing may read."""

    def __init__(
        self, lengths: list[int], accepted: list[int], columns: int, state: torch.dtype,
        heads: tuple[int, int] = (2, 4), sizes: tuple[int, int] = (32, 48),
    ) -> None:  # fmt: skip
        random = torch.Generator().manual_seed(11)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random)

        (hk, hv), (dk, dv), tokens = heads, sizes, max(sum(lengths), 1)
        self.q, self.k = (normal(tokens, hk, dk).bfloat16() for _ in range(2))
        self.v = normal(tokens, hv, dv).bfloat16()
        self.log_decay, self.beta = -normal(tokens, hv).abs(), normal(tokens, hv).sigmoid()
        requests = len(lengths)
        self.table = torch.randperm(requests * columns, generator=random).int() + 1
        self.table = self.table.view(requests, columns)
        self.states = normal(requests * columns + 1, hv, dv, dk).to(state)
        self.states[0] = torch.nan  # the null block: never read, never written
        self.starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        self.accepted = torch.tensor(accepted, dtype=torch.int32)
        self.scale = dk**-0.5

    def expected(self) -> tuple[Tensor, Tensor]:
        """The oracle in float64, with one rounding of states to their type at the end."""
        states = self.states.double()
        rows = self.q.double(), self.k.double(), self.v.double()
        gates = self.log_decay.double(), self.beta.double()
        places = self.starts, self.table, self.accepted
        return gdn_verify(*rows, *gates, states, *places), states

    def run(
        self, runner: ctypes.CDLL, cores: tuple[int, int] = (3, 5), memory: int = MEMORY
    ) -> tuple[Tensor, Tensor]:
        """Outputs and states from the kernels; RuntimeError with the double's complaint."""
        hk, hv = self.q.shape[1], self.v.shape[1]
        size = self.states.element_size()
        shape = Shape(*(len(self.table), hk, hv), self.q.shape[2], self.v.shape[2],
                      self.table.shape[1], size)  # fmt: skip
        tiling = tiling_of(runner, shape, cores, memory)
        assert isinstance(tiling, Tiling), tiling
        tiling.scale = self.scale
        states, out = self.states.clone(), torch.zeros_like(self.v)
        cube = self.q.to(states.dtype), self.k.to(states.dtype)
        workspace = torch.full((tiling.workspace_bytes // 4,), torch.nan)
        tensors = [
            self.q, self.k, self.v, self.log_decay, self.beta, states, self.starts, self.table,
            self.accepted, cube[0].clone(), cube[1].clone(), workspace, out,
        ]  # fmt: skip
        assert all(tensor.is_contiguous() for tensor in tensors)
        buffers = (Buffer * len(tensors))(*((t.data_ptr(), t.nbytes) for t in tensors))
        message = ctypes.create_string_buffer(500)
        failed = runner.run(
            buffers, ctypes.byref(tiling), int(size == 4), UINT32(memory), message, UINT64(500)
        )
        if failed:
            raise RuntimeError(message.value.decode())
        return out, states


def double_environment() -> Path:
    """Where `tools/npu_env.sh double` put the real torch_npu, headers included."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    default = Path(cache_home, "vllm_ascend_spec", "npu_double")
    return Path(os.environ.get("VLLM_ASCEND_SPEC_NPU_DOUBLE") or default)


def test_binding_is_well_typed_against_torch_npu() -> None:
    """torch and torch_npu are real; of CANN only the cube's tiling is, as a double."""
    site = next(iter((double_environment() / "lib").glob("python3*/site-packages/torch_npu")), None)
    if site is None:
        pytest.skip(f"no torch_npu in {double_environment()}: run `tools/npu_env.sh double`")
    torch_headers = site.parent / "torch/include"
    folders = [
        SOURCE, DOUBLE, torch_headers, torch_headers / "torch/csrc/api/include", site / "include",
        site / "include/third_party/acl/inc",
    ]  # fmt: skip
    command = ["g++", "-std=c++20", "-fsyntax-only", *(f"-I{folder}" for folder in folders)]
    done = subprocess.run([*command, str(SOURCE / "binding.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_without_the_library_the_wrapper_says_how_to_build_it() -> None:
    assert "ASCEND_HOME_PATH" in str(ascend_cube.unavailable())
    problem = Problem([1], [1], 1, torch.float32)
    rows = problem.q, problem.k, problem.v, problem.log_decay, problem.beta
    places = problem.starts, problem.table, problem.accepted
    with pytest.raises(ascend_cube.NotBuiltError, match="--no-build-isolation"):
        ascend_cube.gdn_verify(*rows, problem.states, *places)


def test_wrapper_and_binding_agree_on_the_operators_name_and_arguments() -> None:
    text = " ".join((SOURCE / "binding.cpp").read_text("utf-8").replace('"', "").split())
    schema = text[text.index("library.def( ") : text.index("-> Tensor)")]
    names = re.findall(r"(?:Tensor(?:\(a!\))?|float) (\w+)", schema)
    parameters = list(inspect.signature(ascend_cube.gdn_verify).parameters)
    assert names == [*parameters, "scale"]


def test_a_cann_without_the_ascendc_compiler_leaves_the_folder_out(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(outer LANGUAGES CXX)\n"
        f"set(Python_EXECUTABLE {sys.executable})\nadd_subdirectory({SOURCE} ascend)\n"
    )
    done = subprocess.run(
        ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build")],
        capture_output=True, text=True, env=os.environ | {"ASCEND_HOME_PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "holds no AscendC compiler" in " ".join(done.stderr.split())


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def check(problem: Problem, found: tuple[Tensor, Tensor]) -> None:
    out, states = problem.expected()
    assert error(found[0], out) < 4e-3, "the outputs are bfloat16"
    limit = 1e-5 if problem.states.dtype == torch.float32 else 4e-3
    assert error(found[1][1:], states[1:]) < limit
    assert found[1][0].isnan().all(), "the null block stays"
    changed = (found[1][1:] != problem.states[1:]).flatten(1).any(1)
    wanted = (states[1:] != problem.states[1:].double()).flatten(1).any(1)
    assert torch.equal(changed, wanted), "exactly the oracle's slots are written"


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_ragged_rows_with_any_accepted_count(runner: ctypes.CDLL, state: torch.dtype) -> None:
    # Fewer rows than accepted, all columns, no rows, nothing accepted.
    problem = Problem([3, 1, 4, 0, 2], [1, 4, 2, 3, 0], 4, state)
    check(problem, problem.run(runner))


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_the_shape_of_real_models(runner: ctypes.CDLL, state: torch.dtype) -> None:
    problem = Problem([10, 7], [3, 10], 10, state, heads=(1, 2), sizes=(128, 128))
    check(problem, problem.run(runner, cores=(24, 48)))


@pytest.mark.parametrize("cores", [(1, 1), (2, 3), (40, 40)])
def test_the_number_of_cores_decides_nothing(runner: ctypes.CDLL, cores: tuple[int, int]) -> None:
    problem = Problem([2, 4, 1], [4, 1, 2], 4, torch.float32)
    out, states = problem.run(runner, cores)
    one = problem.run(runner)
    assert torch.equal(out, one[0]) and torch.equal(states[1:], one[1][1:])


def test_tiles_of_a_state(runner: ctypes.CDLL) -> None:
    """A chip with little memory cuts the state into several tiles."""
    problem = Problem([4, 2], [2, 4], 4, torch.bfloat16, heads=(1, 2), sizes=(128, 128))
    small = 122 * 1024
    shape = Shape(2, 1, 2, 128, 128, 4, 2)
    tiling = tiling_of(runner, shape, memory=small)
    assert isinstance(tiling, Tiling) and tiling.value_tile < 128 // 2
    check(problem, problem.run(runner, memory=small))


def test_null_slots_are_neither_read_nor_written(runner: ctypes.CDLL) -> None:
    problem = Problem([3, 3], [1, 2], 3, torch.float32)
    problem.table[0, 0] = 0  # its start: the request does nothing
    problem.table[1, 2] = 0  # its last column: that state is not kept
    check(problem, problem.run(runner))


VECTOR, CUBE, TILING = "gdn_verify_vector.h", "gdn_verify_cube.h", "gdn_verify_tiling.h"
NEXT = "\n        "
# (file, what stands there, what a slip would leave, what the double or the oracle says)
FAULTS = [
    (VECTOR, f"Await<HardEvent::MTE2_V>();{NEXT}AscendC::Cast(to,", "AscendC::Cast(to,", "race: V"),
    (VECTOR, "Await<HardEvent::V_MTE2>();  // the cast", "//", "race: MTE2"),
    (VECTOR, f"Await<HardEvent::V_S>();{NEXT}Await<HardEvent::MTE2_S>();", "", "race: S"),
    (VECTOR, "Await<HardEvent::MTE3_MTE2>();\n            Await<HardEvent::V", "Await<HardEvent::V",
     "race: V .* MTE3 reads"),
    (VECTOR, "Await<HardEvent::S_MTE2>();", "", "race: MTE2"),
    (VECTOR, f"Await<HardEvent::V_MTE3>();{NEXT}const uint64_t at", "const uint64_t at",
     "race: MTE3"),
    (VECTOR, f"AwaitStage(turn);{NEXT}auto stage", "auto stage", "set twice|race: V"),
    (VECTOR, "for (uint32_t i = 0; i < kStages; ++i) AwaitStage(i);", "", "left|set twice|race"),
    (VECTOR, "decay_[t], size);\n                AscendC::PipeBarrier<PIPE_V>();",
     "decay_[t], size);", "race: V"),
    (VECTOR, "if (slot > 0) StoreState", "StoreState", "oracle"),
    (VECTOR, "since[s] *= decay_[t];", "", "oracle"),
    (VECTOR, "(kMaxRows + t) * kMaxRows + s)", "(kMaxRows + s) * kMaxRows + t)", "oracle"),
    (VECTOR, "uint32_t>((t_.valueHeads - 1) * t_.value", "uint32_t>((0) * t_.value", "oracle"),
    (CUBE, "request} * columns + kept - 1", "request} * columns + rows - 1", "oracle"),
    (CUBE, "kept > static_cast<int32_t>(columns)", "kept > rows", "oracle"),
    (CUBE, "t_.valueSize, t_.keyHeads * t_.keySize", "t_.valueSize, t_.keySize", "oracle"),
    (CUBE, "if (head % group == 0) Gram", "if (head == 0) Gram", "oracle"),
    (TILING, "b.projection = 2 * b.value;", "b.projection = b.value;", "past the on-chip"),
    (TILING, "->gramOffset = units * ", "->gramOffset = 0 * ", "oracle|past its tensor"),
]  # fmt: skip


def seen_by(faulty: ctypes.CDLL, problem: Problem) -> str:
    try:
        check(problem, problem.run(faulty, cores=(1, 2)))
    except RuntimeError as complaint:
        return str(complaint)
    except AssertionError:
        return "oracle"
    return "nothing"


@pytest.mark.parametrize(("file", "stands", "slip", "said"), FAULTS, ids=range(len(FAULTS)))
def test_a_fault_put_in_is_caught(
    tmp_path: Path, file: str, stands: str, slip: str, said: str
) -> None:
    shutil.copytree(SOURCE, tmp_path / "source")
    text = (tmp_path / "source" / file).read_text("utf-8")
    assert text.count(stands) == 1, "the fault has its place"
    (tmp_path / "source" / file).write_text(text.replace(stands, slip), "utf-8")
    faulty = build(tmp_path, tmp_path / "source")
    ragged = Problem([3, 1, 4, 2], [2, 4, 1, 3], 4, torch.bfloat16)
    ragged.table[2, 1] = 0
    # No state is kept, so no wait for a store stands in for another one.
    nothing_kept = Problem([1, 1, 1], [2, 2, 2], 2, torch.float32)
    nothing_kept.table[:, 0] = 0
    seen = [seen_by(faulty, problem) for problem in (ragged, nothing_kept)]
    assert any(re.search(said, each) for each in seen), f"caught by: {seen}"
