"""Bad input is refused before vLLM is imported, with the file or key and the mend."""

from __future__ import annotations

import json
import logging
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_spec.engine.checks import Plan, check
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.options import Options

TARGET = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 128,
    "vocab_size": 1024,
    "num_hidden_layers": 4,
    "mtp_num_hidden_layers": 1,
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 512,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    },
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "dflash_config": {"target_layer_ids": [0, 2, 3]},
    },
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "target_layer_ids": [0, 2, 3],
        "enable_confidence_head": True,
    },
}
WEIGHTS = {
    "target": {"model.embed_tokens.weight": [1024, 128], "mtp.fc.weight": [128, 256]},
    "eagle3": {"fc.weight": [128, 384], "d2t": [512]},
    "dflash": {"fc.weight": [128, 384]},
    "dspark": {"fc.weight": [128, 384], "confidence_head.proj.weight": [1, 160]},
}


def write(directory: Path, config: dict[str, Any], shapes: dict[str, list[int]]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        entry = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        header[name], offset = entry, offset + size
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(offset)
    (directory / "model.safetensors").write_bytes(data)
    return directory


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write(tmp_path / "target", TARGET, WEIGHTS["target"])


MakePlan = Callable[..., Plan]


@pytest.fixture
def plan(tmp_path: Path, target: Path) -> MakePlan:
    """`plan(method, weights=..., options=..., spec=..., **config)`: config changes the drafter."""

    def make(method: str, **changes: Any) -> Plan:
        weights = changes.pop("weights", WEIGHTS.get(method, {}))
        options = Options.model_validate(changes.pop("options", {}))
        speculative = {"method": method, "num_speculative_tokens": 7, **changes.pop("spec", {})}
        if method in DRAFTERS:
            config = {"hidden_size": 128, "vocab_size": 1024, **DRAFTERS[method], **changes}
            speculative["model"] = str(write(tmp_path / "drafter", config, weights))
        return Plan(str(target), speculative, options)

    return make


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark", "mtp", "ngram_gpu"])
def test_what_fits_is_accepted(plan: MakePlan, method: str):
    check(plan(method))


def test_what_lies_on_a_hub_is_left_to_vllm(target: Path):
    check(Plan("someone/some-model", {"method": "mtp"}, Options()))
    check(Plan(str(target), {"method": "eagle3", "model": "someone/drafter"}, Options()))


WRONG_DRAFTERS = [
    ("dflash", {"hidden_size": 256}, ["target_hidden_size is 256", "hidden_size 128"]),
    ("eagle3", {"target_hidden_size": 64}, ["target_hidden_size is 64", "hidden_size 128"]),
    ("dspark", {"vocab_size": 2048}, ["vocab_size is 2048", "vocab_size 1024"]),
    ("dspark", {"target_layer_ids": [0, 2, 9]}, ["target_layer_ids", "[9]", "4 layers"]),
    (
        "dflash",
        {"dflash_config": {"target_layer_ids": [0, 4]}},
        ["dflash_config.target_layer_ids", "[4]", "4 layers"],
    ),
    (
        "eagle3",
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
        ["eagle_aux_hidden_state_layer_ids", "[5]"],
    ),
    ("dspark", {"target_layer_ids": [0, 2]}, ["fc.weight", "384", "256"]),
]


@pytest.mark.parametrize(("method", "config", "named"), WRONG_DRAFTERS)
def test_a_drafter_for_another_target(
    plan: MakePlan, method: str, config: dict[str, Any], named: list[str]
):
    with pytest.raises(UserError) as error:
        check(plan(method, **config))
    message = str(error.value)
    assert all(part in message for part in named), message
    assert "drafter" in message and "belongs to another target" in message


def test_a_drafter_of_another_method_names_the_right_one(plan: MakePlan):
    wrong = plan("dflash", architectures=["Qwen3DSparkModel"])
    with pytest.raises(UserError, match=r'Qwen3DSparkModel \(architectures\). Set method to "dspa'):
        check(wrong)


def test_a_missing_table_of_a_reduced_vocabulary(plan: MakePlan):
    wrong = plan("eagle3", weights={"fc.weight": [128, 384]})
    with pytest.raises(UserError, match=r"draft_vocab_size 512 of 1024.*d2t"):
        check(wrong)


def test_a_missing_drafter(plan: MakePlan, target: Path):
    with pytest.raises(UserError, match='method "dspark" needs "model"'):
        check(Plan(str(target), {"method": "dspark"}, Options()))
    with pytest.raises(UserError, match=r"--speculative-config model: /nowhere does not exist"):
        check(Plan(str(target), {"method": "dspark", "model": "/nowhere"}, Options()))


def test_a_target_without_mtp(tmp_path: Path):
    plain = write(tmp_path / "t", {**TARGET, "mtp_num_hidden_layers": 0}, WEIGHTS["target"])
    with pytest.raises(UserError, match="declares no MTP layer"):
        check(Plan(str(plain), {"method": "mtp"}, Options()))
    (tmp_path / "t" / "config.json").write_text(json.dumps(TARGET))
    (tmp_path / "t" / "model.safetensors").unlink()
    shutil.copy(
        write(tmp_path / "u", TARGET, {"lm_head.weight": [4, 4]}) / "model.safetensors", plain
    )
    with pytest.raises(UserError, match=r"hold no mtp.\* weight"):
        check(Plan(str(plain), {"method": "mtp"}, Options()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/model", "--model: /nowhere/model does not exist"),
        ("./nowhere", "--model: ./nowhere does not exist"),
        ("a/b/c", "--model: a/b/c does not exist"),
    ],
)
def test_a_missing_model(name: str, message: str):
    with pytest.raises(UserError, match=message):
        check(Plan(name, None, Options()))


def test_a_directory_that_is_no_model(tmp_path: Path, target: Path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        check(Plan(str(tmp_path), None, Options()))
    (target / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no weights \(\*\.safetensors\)"):
        check(Plan(str(target), None, Options()))


def test_files_that_were_cut_short(target: Path):
    weights = target / "model.safetensors"
    whole = weights.read_bytes()
    for part in (whole[:-1], whole[:40], whole[:5]):
        weights.write_bytes(part)
        with pytest.raises(UserError, match=r"model\.safetensors is not a whole safetensors file"):
            check(Plan(str(target), None, Options()))
    weights.write_bytes(whole)
    (target / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        check(Plan(str(target), {"method": "mtp"}, Options()))


def test_a_declared_confidence_head_without_weights(plan: MakePlan):
    wrong = plan("dspark", weights={"fc.weight": [128, 384]}, options={"adaptive": True})
    with pytest.raises(UserError, match=r"declares a confidence head.*hold none"):
        check(wrong)


@pytest.mark.parametrize(("confidence", "refused"), [("auto", False), ("head", True)])
def test_a_drafter_without_confidence_head(plan: MakePlan, confidence: str, refused: bool):
    adaptive = plan(
        "dspark",
        enable_confidence_head=False,
        options={"adaptive": True, "confidence": confidence},
    )
    if not refused:
        check(adaptive)
        return
    with pytest.raises(UserError, match=r"has no confidence head \(enable_confidence_head\)"):
        check(adaptive)


CONTRADICTIONS = [
    ("dspark", {"adaptive": True}, False, "ascend_spec.adaptive is true.*is false. Give one"),
    ("dspark", {"adaptive": False}, True, "ascend_spec.adaptive is false.*is true. Give one"),
    ("suffix", {"adaptive": True}, None, "'suffix' has none. Leave it off, or choose ngram_gpu"),
    ("eagle3", {"adaptive": True, "confidence": "head"}, None, 'ascend_spec.confidence is "head"'),
    ("dspark", {"confidence": "head"}, None, 'ascend_spec.confidence is "head"'),
]


@pytest.mark.parametrize(("method", "options", "given", "message"), CONTRADICTIONS)
def test_contradictory_options(
    plan: MakePlan, method: str, options: dict[str, Any], given: bool | None, message: str
):
    spec = {} if given is None else {"enable_adaptive_verification": given}
    with pytest.raises(UserError, match=message):
        check(plan(method, options=options, spec=spec))


def test_adaptive_without_a_drafter(target: Path):
    with pytest.raises(UserError, match=r"nothing drafts\. Add --speculative-config"):
        check(Plan(str(target), None, Options(adaptive=True)))


def test_more_draft_tokens_than_trained_for_are_warned_of(
    plan: MakePlan, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    check(plan("dflash", spec={"num_speculative_tokens": 8}))
    assert "num_speculative_tokens is 8" in caplog.text and "Set it to 7 or less" in caplog.text


def test_checking_imports_no_engine(target: Path):
    code = (
        "import sys; from vllm_ascend_spec.engine.checks import Plan, check;"
        "from vllm_ascend_spec.options import Options;"
        f"check(Plan({str(target)!r}, {{'method': 'mtp'}}, Options()));"
        "assert not {'torch', 'vllm', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
