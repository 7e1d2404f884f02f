"""The linter finds each fault it is for, accepts the reasons it may, and the kernels pass."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ascend_lint", ROOT / "tools/ascend_lint.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


lint = _tool()

STRIDE = "for i in range(tl.program_id(0), n, tl.num_programs(0)):"
LANES = "at = tl.arange(0, 64)"
# what a kernel's body says -> the rules that it breaks
FAULTY = {
    f"{STRIDE}\n    break": {"break"},
    f"{STRIDE}\n    if i:\n        continue": {"continue"},
    "x = tl.load(p)\nwhile x > 0:\n    x -= 1": {"while"},
    f"j = tl.program_id(1)\n{STRIDE}\n    pass": {"grid"},
    f"j = tl.program_id(axis=2)\n{STRIDE}\n    pass": {"grid"},
    "i = tl.program_id(0)\ntl.store(p + i, i)": {"stride"},
    "for i in range(tl.program_id(0), n, 4):\n    pass": {"stride"},
    f"{LANES}\nx = tl.load(p + at).to(tl.float64)": {"dtype"},
    f"{LANES}\nx = at.to(tl.uint32)": {"dtype"},
    f"{LANES}\nx = tl.sort(tl.load(p + at))": {"operation"},
    f"{LANES}\nx = tl.reduce((at, at), 0, combine)": {"operation"},
    f"{LANES}\nx = tl.extra.cuda.libdevice.rint(at)": {"operation"},
    f"{LANES}\nx = tl.cumsum(tl.load(p + at), axis=0)": {"scalar"},
    "tl.atomic_add(p, 1)": {"scalar"},
    f"{STRIDE}\n    for k in range(8):\n        x = tl.load(p + i * 8 + k)": {"hot"},
    "for k in range(n):\n    tl.store(p + k, 0)": {"hot"},
}
SOUND = [
    f"{STRIDE}\n    x = tl.load(p + i)\n    tl.store(p + i, x)",
    f"step = tl.num_programs(0)\nfor i in range(tl.program_id(0), n, step):\n    {LANES}",
    f"{LANES}\nfor k in range(8):\n    x = tl.load(p + k * 64 + at)",
    f"{LANES}\nrow = p + at\nfor k in range(8):\n    x = tl.load(row + k)",
    f"{LANES}\n# ascend: once a step\nx = tl.cumsum(at, axis=0)",
    f"{LANES}\nx = tl.cumsum(at, axis=0)  # ascend: once a step",
    f"{LANES}\n# ascend: a reason\n# of two lines\nx = tl.cumsum(at, axis=0)",
    "tl.store(p, 1)",
]


def kernel(body: str, launch: str = "kernel[(1,)](p, n)") -> str:
    lines = "\n".join("    " + line for line in body.splitlines())
    return (
        "import triton\nimport triton.language as tl\n\n"
        f"@triton.jit\ndef kernel(p, n):\n{lines}\n\n"
        f"def run(p, n):\n    {launch}\n"
    )


def rules(source: str) -> set[str]:
    return {finding.rule for finding in lint.lint_source(source)}


@pytest.mark.parametrize("body", FAULTY)
def test_a_fault_is_found_by_its_rule_and_no_other(body: str) -> None:
    assert rules(kernel(body)) == FAULTY[body]


@pytest.mark.parametrize("body", SOUND)
def test_sound_code_passes(body: str) -> None:
    assert rules(kernel(body)) == set()


def test_every_rule_has_a_case() -> None:
    covered = set().union(*FAULTY.values()) | {"launch", "autotune", "excuse"}
    assert covered == set(lint.RULES)


def test_a_grid_of_two_axes_is_found_at_the_launch() -> None:
    assert rules(kernel("tl.store(p, 1)", launch="kernel[(4, 4)](p, n)")) == {"launch"}


def test_autotuning_is_found() -> None:
    source = kernel("tl.store(p, 1)").replace(
        "@triton.jit", "@triton.autotune(configs=[], key=[])\n@triton.jit"
    )
    assert rules(source) == {"autotune"}


def test_an_excuse_needs_a_reason_and_does_not_excuse_what_cannot_compile() -> None:
    assert rules(kernel(f"{LANES}\nx = tl.cumsum(at, axis=0)  # ascend:")) == {"excuse", "scalar"}
    assert rules(kernel(f"{STRIDE}\n    break  # ascend: needed")) == {"break"}


def test_a_kernel_launched_from_another_file_is_an_entry(tmp_path: Path) -> None:
    source = kernel("i = tl.program_id(0)\ntl.store(p + i, i)")
    device, host = source.split("def run")
    (tmp_path / "device.py").write_text(device)
    assert lint.lint_paths([tmp_path]) == []
    (tmp_path / "host.py").write_text("def run" + host)
    assert [finding.rule for finding in lint.lint_paths([tmp_path])] == ["stride"]


def test_the_command_prints_where_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(kernel(f"{STRIDE}\n    break"))
    assert lint.main([str(bad)]) == 1
    assert f"{bad}:7: break" in capsys.readouterr().out
    bad.write_text(kernel(f"{STRIDE}\n    pass"))
    assert lint.main([str(bad)]) == 0
    with pytest.raises(SystemExit):
        lint.main([str(tmp_path / "missing.py")])


def test_the_kernels_keep_the_rules() -> None:
    assert [str(finding) for finding in lint.lint_paths([ROOT / "kernels"])] == []
