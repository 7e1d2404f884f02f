"""An exported target is the trained one, rounded, in the form that vLLM loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_ascend_spec.engine.packages import hide_mismatched

torch = pytest.importorskip("torch")
hide_mismatched()
pytest.importorskip("transformers")

from tools.zoo.config import TARGET_KINDS, TargetKind, target_shape  # noqa: E402
from tools.zoo.export import export_dense, export_hybrid, load_target  # noqa: E402
from tools.zoo.modeling import Target  # noqa: E402
from tools.zoo.optim import MuonAdam, orthogonalise  # noqa: E402
from tools.zoo.train_target import learning_rate, masked_loss  # noqa: E402


def _export(kind: TargetKind, model: Target, directory: Path) -> None:
    if kind == "hybrid":
        export_hybrid(model.state_dict(), None, directory)
    else:
        export_dense(model.state_dict(), directory)


@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_export_loads_in_transformers_with_the_same_logits(
    kind: TargetKind, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = Target(target_shape(kind))
    _export(kind, model, tmp_path)
    ours = load_target(kind, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "List the codes as JSON: AB-1234"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )["input_ids"]  # fmt: skip
    with torch.no_grad():
        assert (ours(ids).logits - theirs(ids).logits).abs().max() < 1e-4
    assert tokenizer.decode(ids[0]).endswith("<|im_end|>\n<|im_start|>assistant\n")
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size < 2.5 * 2**20


def test_mtp_weights_are_merged_and_foreign_names_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = Target(target_shape("hybrid"))
    export_hybrid(model.state_dict(), {"mtp.norm.weight": torch.zeros(128)}, tmp_path)
    weights = load_file(str(tmp_path / "model.safetensors"))
    assert set(weights) == {*model.state_dict(), "mtp.norm.weight"}
    for name, value in weights.items():
        fp32 = name.endswith(("A_log", "dt_bias"))
        assert value.dtype == (torch.float32 if fp32 else torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert (config["model_type"], config["mtp_num_hidden_layers"]) == ("qwen3_5_text", 1)
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    with pytest.raises(ValueError, match=r"mtp\.\*, found 'norm.weight'"):
        export_hybrid(model.state_dict(), {"norm.weight": torch.zeros(1)}, tmp_path)


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        load_target("dense", tmp_path)


def test_orthogonalise_pushes_singular_values_towards_one() -> None:
    torch.manual_seed(0)
    for shape in ((2, 32, 64), (2, 64, 32)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.5 and values.max() < 1.5


@pytest.mark.parametrize("kind", TARGET_KINDS)
@pytest.mark.parametrize("use_muon", [True, False])
def test_a_few_steps_learn_one_batch(kind: TargetKind, use_muon: bool) -> None:
    torch.manual_seed(0)
    model = Target(target_shape(kind))
    optimizer = MuonAdam(model, torch.device("cpu"), use_muon, 0.25 if use_muon else 1.0)
    tokens = torch.randint(5, 1024, (2, 48))
    segments = torch.tensor([[0] * 20 + [1] * 28] * 2)
    answer = torch.ones(2, 48, dtype=torch.bool)
    losses = []
    for _ in range(12):
        optimizer.set_lr(0.02 if use_muon else 0.005)
        model.zero_grad()
        loss, _ = masked_loss(model, tokens, segments, answer, 0.1)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]


def test_loss_ignores_padding_borders_and_weights_prompts() -> None:
    torch.manual_seed(0)
    model = Target(target_shape("dense"))
    tokens = torch.randint(5, 1024, (1, 30))
    segments = torch.tensor([[0] * 10 + [1] * 10 + [-1] * 10])
    answer = torch.zeros(1, 30, dtype=torch.bool)
    answer[0, 5:10] = True
    loss, answer_loss = masked_loss(model, tokens, segments, answer, 0.0)
    logits = model(tokens[:, :10]).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[4:9], tokens[0, 5:10])
    assert float(loss) == pytest.approx(float(expected), abs=1e-4)
    assert float(answer_loss) == pytest.approx(float(expected), abs=1e-4)
    weighted, _ = masked_loss(model, tokens, segments, answer, 0.5)
    assert float(weighted) != pytest.approx(float(loss), abs=1e-4)


def test_learning_rate_warms_up_and_cools_down() -> None:
    rates = [learning_rate(x, 1.0) for x in (0.0, 0.01, 0.3, 0.775, 1.0)]
    assert rates[0] < rates[1] < rates[2] == 1.0 and 0.49 < rates[3] < 0.51 and rates[4] < 0.01
