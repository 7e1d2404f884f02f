"""Norm weights stored for the other convention are warned of; trained ones, however far, are not.

Case C37: a drafter made from Qwen3.5 norms, whose scale is 1 + w, for a class that scales by w
(speculators#1098), and the addition done twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_ascend_spec.engine.checkpoint import Checkpoint
from vllm_ascend_spec.engine.checks import Plan, check
from vllm_ascend_spec.options import Options
from vllm_ascend_spec.zoo import Zoo

HIDDEN = 64
TARGETS = {"zero-centred": "Qwen3_5ForCausalLM", "plain": "Qwen3ForCausalLM"}
DRAFTERS = {
    "dspark": "Qwen3DSparkModel",
    "dflash": "DFlashDraftModel",
    "eagle3": "LlamaForCausalLMEagle3",
}
SIZES = {"hidden_size": HIDDEN, "vocab_size": 8, "num_hidden_layers": 2}
Weights = dict[str, torch.Tensor]
Warnings = Callable[[Plan], str]


def norms(mean: float, spread: float, layers: int = 2, prefix: str = "") -> Weights:
    """The norms of some layers, bfloat16 [64] each."""
    generator = torch.Generator().manual_seed(0)
    names = [
        f"{prefix}layers.{layer}.{name}.weight"
        for layer in range(layers)
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm")
    ]
    drawn = torch.randn(len(names) + 1, HIDDEN, generator=generator) * spread + mean
    return dict(zip([*names, f"{prefix}norm.weight"], drawn.bfloat16(), strict=True))


def gated(mean: float) -> Weights:
    """A GDN layer's gated norm, whose scale is w in every model."""
    return {"model.layers.0.linear_attn.norm.weight": torch.full((HIDDEN,), mean)}


def write(directory: Path, architecture: str, weights: Weights) -> Path:
    directory.mkdir()
    config = {"architectures": [architecture], **SIZES}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in weights.items()}, directory / "model.safetensors")
    return directory


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Warnings:
    """What `check` warns of."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def warnings(plan: Plan) -> str:
        caplog.clear()
        check(plan)
        return caplog.text

    return warnings


RIGHT_TARGETS = [
    ("zero-centred", norms(0.0, 0.0) | gated(1.0)),  # as it is initialised
    ("zero-centred", norms(0.001, 0.0) | gated(0.46)),
    ("zero-centred", norms(0.9, 0.5) | gated(0.2)),  # trained far away: 4 % are negative
    ("plain", norms(1.0, 0.2)),
    ("plain", norms(0.05, 0.01)),  # as small as those of a first layer, and none negative
    ("plain", norms(1.5, 0.7)),  # 2 % are negative
]


@pytest.mark.parametrize(("kind", "weights"), RIGHT_TARGETS)
def test_right_targets_are_left_alone(
    kind: str, weights: Weights, tmp_path: Path, warnings: Warnings
):
    target = write(tmp_path / "target", TARGETS[kind], weights)
    assert warnings(Plan(str(target), None, Options())) == ""


WRONG_TARGETS = [
    ("zero-centred", norms(1.0, 0.1) | gated(1.0), "Subtract 1", "scales by 1 + w"),
    ("plain", norms(0.0, 0.1), "Add 1", "scales by w"),
    # The gated norm was taken for a zero-centred one.
    ("zero-centred", norms(0.0, 0.1) | gated(-0.2), "Add 1", "linear_attn.norm.weight"),
]


@pytest.mark.parametrize(("kind", "weights", "mend", "named"), WRONG_TARGETS)
def test_targets_of_the_other_convention(
    kind: str, weights: Weights, mend: str, named: str, tmp_path: Path, warnings: Warnings
):
    target = write(tmp_path / "target", TARGETS[kind], weights)
    said = warnings(Plan(str(target), None, Options()))
    assert said.count("holds norm weights") == 1
    assert mend in said and named in said
    assert str(target / "model.safetensors") in said and str(target / "config.json") in said


@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize(("mean", "warned"), [(0.0, True), (0.001, True), (1.0, False)])
def test_drafters_made_of_zero_centred_norms(
    method: str, mean: float, warned: bool, tmp_path: Path, warnings: Warnings
):
    target = write(tmp_path / "target", TARGETS["zero-centred"], norms(0.0, 0.1))
    drafter = write(tmp_path / "drafter", DRAFTERS[method], norms(mean, 0.1, layers=1))
    speculative = {"method": method, "model": str(drafter), "num_speculative_tokens": 4}
    said = warnings(Plan(str(target), speculative, Options()))
    assert ("holds norm weights" in said) == warned
    if warned:
        assert str(drafter / "model.safetensors") in said and "Add 1" in said
        assert DRAFTERS[method] in said and "layers.0." in said


def test_what_is_not_judged(tmp_path: Path, warnings: Warnings):
    """Towers with other conventions, architectures that are not known, quantised norms."""
    tower = {"visual.blocks.0.norm1.weight": torch.ones(HIDDEN)}
    quantised = {"model.norm.weight": torch.ones(HIDDEN).to(torch.float8_e4m3fn)}
    for index, (architecture, weights) in enumerate(
        [
            (TARGETS["zero-centred"], norms(0.0, 0.1) | tower),
            ("SomeOtherForCausalLM", norms(0.0, 0.1)),
            (TARGETS["zero-centred"], quantised),
        ]
    ):
        target = write(tmp_path / str(index), architecture, weights)
        assert warnings(Plan(str(target), None, Options())) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_are_read_as_they_are_stored(dtype: torch.dtype, tmp_path: Path):
    stored = {k: v.to(dtype) for k, v in norms(0.3, 1.0, prefix="model.").items()}
    matrices = {"model.embed_tokens.weight": torch.randn(8, HIDDEN), "a.norm_proj": torch.ones(3)}
    found = Checkpoint(write(tmp_path / "t", TARGETS["plain"], stored | matrices), "--model").norms
    assert found.keys() == stored.keys()
    for name, values in found.items():
        assert torch.equal(torch.from_numpy(values), stored[name].float()), name


def zoo_plans() -> list[tuple[str, str | None]]:
    """(target, drafter or None) of every checkpoint of the zoo."""
    names = [path.parent.name for path in sorted(Zoo().root.glob("*/model.safetensors"))]
    return [(name.split("-")[0], name if "-" in name else None) for name in names]


@pytest.mark.parametrize(("target", "drafter"), zoo_plans())
def test_trained_models_are_right_and_converted_ones_are_not(
    target: str, drafter: str | None, tmp_path: Path, warnings: Warnings
):
    """The zoo's: seven checkpoints, each as it is and with 1 added or subtracted."""
    zoo = Zoo()
    source = zoo.root / (drafter or target)
    shift = 1.0 if source.name == "hybrid" else -1.0
    wrong = tmp_path / source.name
    wrong.mkdir()
    (wrong / "config.json").write_text((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    judged = Checkpoint(source, "--model").norms.keys()
    save_file(
        {k: v + shift if k in judged and "linear_attn" not in k else v for k, v in weights.items()},
        wrong / "model.safetensors",
    )
    for directory, expected in ((source, 0), (wrong, 1)):
        model = str(zoo.target(target)) if drafter else str(directory)
        speculative = None
        if drafter:
            method = drafter.split("-")[1].replace("dflash2", "dflash")
            speculative = {"method": method, "model": str(directory), "num_speculative_tokens": 4}
        said = warnings(Plan(model, speculative, Options()))
        assert said.count("holds norm weights") == expected, said
