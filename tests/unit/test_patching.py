"""Replacements: applied on import, once, and refused when the target is not upstream's own."""

from __future__ import annotations

import functools
import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_spec.engine import patching
from vllm_ascend_spec.engine.patching import PatchError, Replacement

UPSTREAM = """
def compute(x):
    return x + 1

class Layer:
    scale = 2

    def forward(self, x):
        return self.scale * x

    @classmethod
    def name(cls):
        return cls.__name__

    @staticmethod
    def kind():
        return "upstream"
"""


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of an importable package `engine_x`, version 1.2 of the distribution `engine-x`."""
    package = tmp_path / "engine_x"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "ops.py").write_text(UPSTREAM)
    (package / "user.py").write_text("from engine_x.ops import compute\n")
    metadata = tmp_path / "engine_x-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-x\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("_declared", "_applied", "_callbacks"):
        monkeypatch.setattr(patching, name, {})
    monkeypatch.setattr(patching, "_unreported", [])
    yield "engine_x"
    for name in [name for name in sys.modules if name.partition(".")[0] == "engine_x"]:
        del sys.modules[name]


def replacement(target: str = "engine_x.ops:compute", **changes: Any) -> Replacement:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def doubled(*args: Any) -> Any:
            return 2 * original(*args)

        return doubled

    settings = {"reason": "doubles it", "versions": ">=1,<2", "distributions": ("engine-x",)}
    return Replacement(target=target, make=make, **{**settings, **changes})


def test_takes_effect_when_the_module_is_imported(upstream: str):
    patching.declare(replacement())
    assert "engine_x.ops" not in sys.modules
    assert patching.applied() == ()
    assert importlib.import_module("engine_x.ops").compute(1) == 4
    assert [r.target for r in patching.applied()] == ["engine_x.ops:compute"]


def test_takes_effect_at_once_when_the_module_is_loaded(upstream: str):
    ops = importlib.import_module("engine_x.ops")
    patching.declare(replacement())
    assert ops.compute(1) == 4


def test_modules_that_bind_the_name_later_get_the_replacement(upstream: str):
    patching.declare(replacement())
    assert importlib.import_module("engine_x.user").compute(1) == 4


def test_declared_twice_is_applied_once(upstream: str):
    patching.declare(replacement())
    ops = importlib.import_module("engine_x.ops")
    patching.declare(replacement())
    assert ops.compute(1) == 4


def test_two_claims_on_one_target_are_refused(upstream: str):
    patching.declare(replacement())
    with pytest.raises(PatchError, match=r"engine_x.ops:compute is claimed twice.*halves it"):
        patching.declare(replacement(reason="halves it"))


@pytest.mark.parametrize(
    ("name", "expected"), [("forward", 12), ("name", "LayerLayer"), ("kind", "upstreamupstream")]
)
def test_methods_of_every_kind(upstream: str, name: str, expected: Any):
    patching.declare(replacement(f"engine_x.ops:Layer.{name}"))
    layer = importlib.import_module("engine_x.ops").Layer()
    method = getattr(layer, name)
    assert (method(3) if name == "forward" else method()) == expected


def test_copy_bound_in_another_module(upstream: str):
    patching.declare(replacement("engine_x.user:compute", defined_in="engine_x.ops"))
    assert importlib.import_module("engine_x.user").compute(1) == 4
    assert sys.modules["engine_x.ops"].compute(1) == 2


def test_missing_target_names_it_with_version_and_mend(upstream: str):
    patching.declare(replacement("engine_x.ops:Layer.backward"))
    with pytest.raises(PatchError) as error:
        importlib.import_module("engine_x.ops")
    message = str(error.value)
    assert "engine_x.ops:Layer.backward is missing" in message
    assert "engine-x 1.2" in message and "Install engine-x >=1,<2" in message


def test_unsupported_version_is_refused(upstream: str):
    patching.declare(replacement(versions=">=2"))
    with pytest.raises(PatchError, match=r"engine-x >=2, but engine-x 1\.2 is installed"):
        importlib.import_module("engine_x.ops")


def test_target_replaced_by_a_plain_function_is_refused(upstream: str):
    ops = importlib.import_module("engine_x.ops")
    ops.compute = lambda x: x
    with pytest.raises(PatchError, match=rf"already replaced by {__name__}:"):
        patching.declare(replacement())


def test_target_replaced_by_a_disguised_wrapper_is_refused(upstream: str):
    ops = importlib.import_module("engine_x.ops")
    original = ops.compute

    @functools.wraps(original)
    def wrapper(x: int) -> int:
        return original(x) + 100

    ops.compute = wrapper
    assert (wrapper.__module__, wrapper.__qualname__) == ("engine_x.ops", "compute")
    with pytest.raises(PatchError, match=r"already replaced by code in .*test_patching"):
        patching.declare(replacement())


def test_decorators_of_the_engine_itself_are_upstream(upstream: str):
    package = Path(str(importlib.import_module("engine_x").__file__)).parent
    (package / "decorated.py").write_text(
        "import functools\n"
        "def cached(f):\n"
        "    @functools.wraps(f)\n"
        "    def wrapper(x):\n"
        "        return f(x)\n"
        "    return wrapper\n"
        "@cached\n"
        "def compute(x):\n"
        "    return x + 1\n"
    )
    importlib.invalidate_caches()
    patching.declare(replacement("engine_x.decorated:compute"))
    assert importlib.import_module("engine_x.decorated").compute(1) == 4


def test_replacements_are_logged_once_vllm_logs(
    upstream: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    vllm_logger = logging.getLogger("vllm")
    monkeypatch.setattr(vllm_logger, "handlers", [])
    patching.declare(replacement())
    importlib.import_module("engine_x.ops")
    assert caplog.messages == []
    with caplog.at_level(logging.INFO, "vllm"):
        monkeypatch.setattr(vllm_logger, "handlers", [caplog.handler])
        monkeypatch.setattr(vllm_logger, "propagate", False)
        patching.report()
        patching.report()
    assert caplog.messages == ["Replaced engine_x.ops:compute: doubles it"]


def test_a_module_that_fails_to_import_is_not_taken_for_replaced(upstream: str):
    package = Path(str(importlib.import_module("engine_x").__file__)).parent
    (package / "broken.py").write_text("raise ImportError('no device')\n")
    importlib.invalidate_caches()
    patching.declare(replacement("engine_x.broken:compute"))
    with pytest.raises(ImportError, match="no device"):
        importlib.import_module("engine_x.broken")
    assert patching.applied() == ()
    (package / "broken.py").write_text("def compute(x):\n    return x + 1  # repaired\n")
    importlib.invalidate_caches()
    assert importlib.import_module("engine_x.broken").compute(1) == 4


def test_watched_modules_keep_source_and_resources(upstream: str):
    import inspect

    patching.declare(replacement())
    ops = importlib.import_module("engine_x.ops")
    assert "def forward" in inspect.getsource(ops.Layer)


def test_importing_the_module_imports_no_engine():
    code = (
        "import sys, vllm_ascend_spec.engine.patching;"
        "assert not {'torch', 'vllm', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
