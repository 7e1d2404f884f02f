"""The drafters' modules against serving semantics; needs the `speculators` library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("speculators")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from tools.zoo.config import TARGET_KINDS, VOCAB_SIZE, hf_config_dict, target_shape  # noqa: E402
from tools.zoo.drafters import (  # noqa: E402
    METHODS,
    DrafterSpec,
    build_drafter,
    draft_vocab_mapping,
    drafter_spec,
    load_frozen_target,
    to_serving_precision,
)
from tools.zoo.drafters_data import (  # noqa: E402
    Answers,
    Batch,
    Packer,
    collect_hidden_states,
    pack_answers,
)
from tools.zoo.drafters_export import (  # noqa: E402
    drafter_config,
    export_drafter,
    load_drafter_weights,
)
from tools.zoo.drafters_loss import LossOptions, loss_function  # noqa: E402
from tools.zoo.drafters_propose import propose  # noqa: E402
from tools.zoo.export import storage_dtype  # noqa: E402
from tools.zoo.modeling import Target  # noqa: E402

TOKENS = 96


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    state = Target(target_shape(TARGET_KINDS[0])).state_dict()
    stored = {k: v.to(storage_dtype(k)).contiguous() for k, v in state.items()}
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(hf_config_dict("hybrid")))
    return directory


@pytest.fixture(scope="module")
def answers() -> Answers:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(5, VOCAB_SIZE, (2, 40), generator=generator).tolist()
    return pack_answers([r[:15] for r in rows], [r[15:] for r in rows])


def make_drafter(method: str, target: Path, answers: Answers) -> tuple[DrafterSpec, Any]:
    spec = drafter_spec(method)  # type: ignore[arg-type]
    torch.manual_seed(2)
    mapping = draft_vocab_mapping(answers.answer_counts(VOCAB_SIZE), VOCAB_SIZE // 2)
    model = build_drafter(spec, target, mapping)
    with torch.no_grad():
        # Fresh drafters echo their input embedding; noise makes the context matter.
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return spec, model.eval()


def make_batch(spec: DrafterSpec, target: Path, answers: Answers) -> Batch:
    frozen = load_frozen_target(target, torch.device("cpu")).float()
    hidden = collect_hidden_states(frozen, answers, spec.aux_layer_ids)
    batch = Packer(
        answers,
        hidden,
        shifted=spec.method in ("mtp", "eagle3"),
        targets_in_place=spec.method in ("dflash", "dflash2"),
        tokens_per_batch=TOKENS,
        seed=0,
    ).batch([0, 1])
    batch.hidden_states = batch.hidden_states.float()
    batch.verifier_last_hidden_states = batch.verifier_last_hidden_states.float()
    return batch


@pytest.mark.parametrize("method", METHODS)
def test_drafts_depend_on_nothing_after_the_anchor(
    method: str, target_dir: Path, answers: Answers
) -> None:
    spec, model = make_drafter(method, target_dir, answers)
    batch = make_batch(spec, target_dir, answers)
    before = propose(model, spec, batch)
    anchor = int(before.rows[10])
    # In the shifted layout row `anchor` itself carries the state before the anchor token.
    first_hidden = anchor + 1 if method in ("mtp", "eagle3") else anchor
    batch.input_ids[0, anchor + 1 :] = 7
    batch.hidden_states[0, first_hidden:] = 3.0
    after = propose(model, spec, batch)
    same_row = int((after.rows == anchor).nonzero())
    assert after.tokens[same_row].tolist() == before.tokens[10].tolist()
    # Untrained layers say little, but a model that ignores its rows says one thing only.
    assert before.tokens[: same_row + 1].unique().numel() > 3
    batch.hidden_states[0, first_hidden - 1] += 3.0
    changed = propose(model, spec, batch)
    assert changed.tokens[same_row].tolist() != before.tokens[10].tolist()


def test_parallel_mtp_recursion_equals_a_cached_loop(target_dir: Path, answers: Answers) -> None:
    """One anchor at a time with a growing KV cache, as the engine runs it."""
    spec, model = make_drafter("mtp", target_dir, answers)
    batch = make_batch(spec, target_dir, answers)
    drafts = propose(model, spec, batch)
    width = model.lm_head.weight.shape[1]
    hidden_in = model.serving_hidden(batch.hidden_states[..., -width:])
    for index in (0, 5, 20):
        row = int(drafts.rows[index])
        cache, loop = DynamicCache(), []
        start = int((batch.document_ids[0] == batch.document_ids[0, row]).nonzero()[0])
        rows = slice(start, row + 1)
        size = row + 1 - start
        causal = torch.ones(size, size, dtype=torch.bool).tril()[None, None]
        with torch.no_grad():
            out = model.step(
                batch.input_ids[:, rows],
                hidden_in[:, rows],
                causal,
                batch.position_ids[:, rows],
                cache,
            )[:, -1:]
            for step in range(spec.num_draft_tokens):
                token = model.lm_head(out).argmax(-1)
                loop.append(int(token))
                mask = torch.ones(1, 1, 1, size + step + 1, dtype=torch.bool)
                position = batch.position_ids[:, row : row + 1] + step + 1
                out = model.step(token, out, mask, position, cache)
        assert drafts.tokens[index].tolist() == loop


@pytest.mark.parametrize("method", METHODS)
def test_training_lowers_the_loss_of_a_batch(
    method: str, target_dir: Path, answers: Answers
) -> None:
    spec, model = make_drafter(method, target_dir, answers)
    batch = make_batch(spec, target_dir, answers)
    loss = loss_function(model.train(), spec, LossOptions(anchors=50))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    values = []
    for _ in range(15):
        value = loss(batch)
        optimizer.zero_grad()
        value.backward()
        assert all(p.grad is not None for p in trained)
        optimizer.step()
        values.append(value.item())
    assert values[-1] < 0.8 * values[0]


@pytest.mark.parametrize("method", METHODS)
def test_an_exported_checkpoint_drafts_the_same(
    method: str, target_dir: Path, answers: Answers, tmp_path: Path
) -> None:
    spec, model = make_drafter(method, target_dir, answers)
    batch = make_batch(spec, target_dir, answers)
    export_drafter(model, spec, target_dir, tmp_path)
    mapping = draft_vocab_mapping(answers.answer_counts(VOCAB_SIZE), VOCAB_SIZE // 2)
    torch.manual_seed(9)
    copy = build_drafter(spec, target_dir, mapping)
    load_drafter_weights(copy, spec, tmp_path)
    expected = propose(to_serving_precision(model).float(), spec, batch)
    actual = propose(to_serving_precision(copy).float(), spec, batch)
    assert actual.tokens.tolist() == expected.tokens.tolist()


def test_an_mtp_export_keeps_the_target(target_dir: Path, answers: Answers, tmp_path: Path) -> None:
    spec, model = make_drafter("mtp", target_dir, answers)
    added = export_drafter(model, spec, target_dir, tmp_path)
    merged, own = (load_file(d / "model.safetensors") for d in (tmp_path, target_dir))
    assert all(torch.equal(merged[name], tensor) for name, tensor in own.items())
    mtp = [name for name in merged if name.startswith("mtp.")]
    assert sum(merged[name].numel() for name in mtp) == added
    assert {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= set(mtp)


def test_layer_ids_follow_each_formats_convention() -> None:
    assert drafter_config(drafter_spec("eagle3"))["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert drafter_config(drafter_spec("dspark"))["target_layer_ids"] == [0, 2, 3]
    assert drafter_config(drafter_spec("dflash2"))["dflash_config"]["target_layer_ids"] == [0, 2, 3]


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark", "dflash2"])
def test_checkpoints_leave_out_what_the_target_has(
    method: str, target_dir: Path, answers: Answers, tmp_path: Path
) -> None:
    spec, model = make_drafter(method, target_dir, answers)
    export_drafter(model, spec, target_dir, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert not any("embed_tokens" in n or "verifier" in n for n in names)
    assert ("lm_head.weight" in names) == (method == "eagle3")
    assert ("d2t" in names) == (method == "eagle3")
