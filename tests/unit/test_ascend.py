"""Where the plugin stays out of vllm-ascend's way, and which vllm-ascend it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ascend_spec import plugin
from vllm_ascend_spec.engine import ascend, launch, versions
from vllm_ascend_spec.engine.versions import Engine
from vllm_ascend_spec.errors import UserError

PLATFORM_ONLY = "class NPUPlatform:\n    def check_and_update_config(vllm_config): ...\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty package `vllm_ascend` on the path."""
    root = tmp_path / "vllm_ascend"
    root.mkdir()
    (root / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend, "_enabled", False)
    monkeypatch.setattr(plugin, "_setup_error", None)
    monkeypatch.delenv(ascend.RUNNER_VARIABLE, raising=False)


def write_names(root: Path, names: tuple[versions.UpstreamName, ...]) -> None:
    """Source files that define the names, with the parameters that are asked for."""
    modules: dict[str, list[str]] = {}
    for name in names:
        module, _, qualname = name.target.partition(":")
        owner, _, function = qualname.rpartition(".")
        body = f"def {function}(self, {', '.join(name.parameters)}): ..."
        if owner:
            text = f"class {owner}:\n    {body}"
        else:
            text = body if name.parameters else f"class {function}: ..."
        modules.setdefault(module, []).append(text)
    for module, texts in modules.items():
        path = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(texts) + "\n")


def test_a_release_on_runner_v1_is_refused_with_what_is_needed(source: Path):
    (source / "platform.py").write_text(PLATFORM_ONLY)
    with pytest.raises(UserError) as error:
        ascend.require_runner(Engine("vllm-ascend", "0.23.0", source.parent / "vllm"))
    message = str(error.value)
    assert "vllm-ascend 0.23.0 drafts for hybrid models on Model Runner V1 only" in message
    assert "module vllm_ascend.worker.v2.model_runner" in message
    assert "commit 182b75e" in message and "uninstall vllm-ascend-spec" in message


def test_a_source_with_every_name_is_taken_whatever_its_version(source: Path):
    write_names(source, versions.REQUIRED["ascend"])
    ascend.require_runner(Engine("vllm-ascend", "0.99.dev1+unknown", source.parent / "vllm"))


def test_a_parameter_that_went_away_is_named(source: Path):
    names = versions.REQUIRED["ascend"]
    write_names(source, names)
    path = source / "worker" / "v2" / "attn_utils.py"
    path.write_text(path.read_text().replace("is_prefilling, ", ""))
    with pytest.raises(UserError, match=r"build_attn_metadata \(no parameter is_prefilling\)"):
        ascend.require_runner(Engine("vllm-ascend", "1", source.parent / "vllm"))


def test_without_an_npu_nothing_is_declared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ascend, "npu_count", lambda: 0)
    monkeypatch.setattr(ascend, "require_runner", pytest.fail)
    assert ascend.enable() is False and not ascend.active()


def test_a_user_who_chose_runner_v1_keeps_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(ascend, "npu_count", lambda: 1)
    monkeypatch.setattr(ascend, "require_runner", pytest.fail)
    monkeypatch.setenv(ascend.RUNNER_VARIABLE, "0")
    assert ascend.enable() is False
    assert f"{ascend.RUNNER_VARIABLE}=0 keeps vllm-ascend on Model Runner V1" in caplog.text


def test_a_command_that_asks_for_this_engine_is_refused_where_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ascend, "enable", pytest.fail)
    monkeypatch.setattr(ascend, "npu_count", lambda: 0)
    with pytest.raises(UserError, match=r"--platform ascend: torch_npu sees no NPU. .*\[cpu\]"):
        ascend.require()
    monkeypatch.setattr(ascend, "npu_count", lambda: 1)
    monkeypatch.setenv(ascend.RUNNER_VARIABLE, "0")
    with pytest.raises(UserError, match="Model Runner V1, which this plugin does not extend"):
        ascend.require()


def test_a_command_on_an_npu_extends_vllm_ascend(monkeypatch: pytest.MonkeyPatch):
    called = []
    monkeypatch.setattr(ascend, "npu_count", lambda: 1)
    monkeypatch.setattr(ascend, "enable", lambda: called.append(True))
    monkeypatch.setattr(
        launch.versions, "require_engine", lambda: Engine("vllm-ascend", "1", Path("vllm"))
    )
    assert launch.set_up() == launch.set_up("ascend") == "ascend" and len(called) == 2
    with pytest.raises(UserError, match="--platform cuda: vllm-ascend 1 is built for ascend"):
        launch.set_up("cuda")


@pytest.mark.parametrize("adaptive", [True, False])
def test_vllms_switch_for_adaptive_verification_becomes_the_plugins(adaptive: bool):
    given = {
        "speculative_config": {"method": "mtp", "enable_adaptive_verification": adaptive},
        "additional_config": {"refresh": True, "ascend_spec": {"cost_surface": "file"}},
        "max_num_seqs": 4,
    }
    options = {"cost_surface": "file"} | ({"adaptive": True} if adaptive else {})
    assert ascend.engine_arguments(given) == {
        "speculative_config": {"method": "mtp"},
        "additional_config": {"refresh": True, "ascend_spec": options},
        "max_num_seqs": 4,
    }
    assert "enable_adaptive_verification" in given["speculative_config"], "the caller's stays"


@pytest.mark.parametrize("config", [None, {"method": "mtp"}])
def test_arguments_without_that_switch_stay(config: dict[str, str] | None):
    arguments = {"speculative_config": config}
    assert ascend.engine_arguments(arguments) is arguments


def test_the_platform_plugin_leaves_the_choice_to_vllm_ascend(
    source: Path, monkeypatch: pytest.MonkeyPatch
):
    called = []
    monkeypatch.setattr(ascend, "installed", lambda: True)
    monkeypatch.setattr(ascend, "enable", lambda: called.append(True))
    assert plugin.platform() is None and called


def test_a_refusal_stops_startup_though_vllm_swallows_it(
    source: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse() -> None:
        raise UserError("Model Runner V1 only")

    monkeypatch.setattr(ascend, "installed", lambda: True)
    monkeypatch.setattr(ascend, "enable", refuse)
    assert plugin.platform() is None
    with pytest.raises(UserError, match="V1 only"):
        plugin.register()
