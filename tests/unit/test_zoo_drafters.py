"""Data layout, acceptance bookkeeping and draft vocabulary of the zoo's drafters."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")
pytest.importorskip("transformers")

from hypothesis import strategies as st  # noqa: E402

from tools.zoo.config import IM_END_ID, PAD_ID, target_shape  # noqa: E402
from tools.zoo.drafters import draft_vocab_mapping, drafter_spec, target_kind  # noqa: E402
from tools.zoo.drafters_data import (  # noqa: E402
    Answers,
    HiddenStates,
    Packer,
    collect_hidden_states,
    load_answers,
    pack_answers,
)
from tools.zoo.drafters_eval import Acceptance, area_under_roc, walk_answer  # noqa: E402
from tools.zoo.modeling import Target  # noqa: E402

AUX = (1, 3, 4)


def some_answers() -> Answers:
    prompts = [[10, 11, 12], [20, 21, 22, 23]]
    return pack_answers(prompts, [[13, 14, IM_END_ID], [24, IM_END_ID]])


def numbered_hidden(answers: Answers) -> HiddenStates:
    """Hidden states whose value is the token's index in the answers file."""
    index = torch.arange(answers.tokens.numel(), dtype=torch.float32)[:, None]
    return HiddenStates(index, index + 100)


def packer(shifted: bool, targets_in_place: bool) -> Packer:
    answers = some_answers()
    return Packer(
        answers,
        numbered_hidden(answers),
        shifted=shifted,
        targets_in_place=targets_in_place,
        tokens_per_batch=16,
        seed=0,
    )


def test_block_layout_keeps_token_and_state_in_one_row() -> None:
    batch = packer(shifted=False, targets_in_place=True).batch([1, 0])
    assert batch.input_ids[0, :12].tolist() == [20, 21, 22, 23, 24, 2, 10, 11, 12, 13, 14, 2]
    assert batch.hidden_states[0, :12, 0].tolist() == [6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]
    assert batch.position_ids[0, :12].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert batch.document_ids[0].tolist() == [0] * 6 + [1] * 6 + [-1] * 4
    assert batch.loss_mask[0].int().tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1] + [0] * 4
    assert (batch.input_ids[0, 12:] == PAD_ID).all()


def test_block_layout_can_leave_out_the_end_token_as_anchor() -> None:
    batch = packer(shifted=False, targets_in_place=False).batch([1, 0])
    assert batch.loss_mask[0].int().tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0] + [0] * 4


def test_shifted_layout_pairs_a_token_with_the_state_before_it() -> None:
    batch = packer(shifted=True, targets_in_place=False).batch([0, 1])
    assert batch.input_ids[0, :10].tolist() == [11, 12, 13, 14, 2, 21, 22, 23, 24, 2]
    assert batch.hidden_states[0, :10, 0].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert batch.verifier_last_hidden_states[0, :3, 0].tolist() == [101, 102, 103]
    assert batch.position_ids[0, :10].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert batch.loss_mask[0].int().tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1, 0] + [0] * 6


def test_an_epoch_draws_every_document_once() -> None:
    answers = pack_answers([[i] * 3 for i in range(10, 30)], [[i, 2] for i in range(10, 30)])
    data = Packer(
        answers,
        numbered_hidden(answers),
        shifted=False,
        targets_in_place=True,
        tokens_per_batch=22,
        seed=3,
    )
    seen = torch.cat([data.random_batch().input_ids[0, :20] for _ in range(5)])
    assert sorted(seen.unique().tolist()) == [2, *range(10, 30)]


def test_a_document_longer_than_a_batch_names_the_option() -> None:
    answers = some_answers()
    with pytest.raises(ValueError, match="--tokens 4"):
        Packer(
            answers,
            numbered_hidden(answers),
            shifted=False,
            targets_in_place=True,
            tokens_per_batch=4,
            seed=0,
        )


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_collected_states_equal_those_of_each_document_alone(kind: str) -> None:
    torch.manual_seed(0)
    target = Target(target_shape(kind)).eval()  # type: ignore[arg-type]
    prompts = [torch.randint(5, 1000, (n,)).tolist() for n in (9, 70, 3)]
    answers = pack_answers(prompts, [[7, 8, 2], [9, 2], [5, 6, 7, 2]])
    hidden = collect_hidden_states(target, answers, AUX, tokens_per_batch=150)
    for i in range(len(answers)):
        alone = target(answers.document(i)[None]).hidden
        rows = slice(int(answers.starts[i]), int(answers.starts[i + 1]))
        expected = torch.cat([alone[j][0] for j in AUX], -1)
        torch.testing.assert_close(hidden.aux[rows].float(), expected, atol=0.05, rtol=0.02)
        torch.testing.assert_close(hidden.last[rows].float(), alone[4][0], atol=0.05, rtol=0.02)


def test_answers_survive_a_file(tmp_path: Path) -> None:
    answers = some_answers()
    answers.save(tmp_path / "a.safetensors")
    read = load_answers(tmp_path / "a.safetensors")
    assert read.tokens.tolist() == answers.tokens.tolist()
    assert read.slice(1, 2).document(0).tolist() == [20, 21, 22, 23, 24, 2]
    assert read.answer_counts(1024)[[13, 24, 2, 10]].tolist() == [1, 1, 2, 0]


def test_a_broken_answers_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(FileNotFoundError, match=r"a\.safetensors"):
        load_answers(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        load_answers(path)


def test_acceptance_walks_from_the_last_token_of_each_step() -> None:
    acceptance = Acceptance()
    answer = [1, 2, 3, 4, 5]
    drafts = [[2, 3, 9], [0, 0, 0], [0, 0, 0], [9, 9, 9], [1, 1, 1]]
    walk_answer(acceptance, answer, drafts, [[0.9, 0.8, 0.1]] * 5)
    # From token 1: 2 and 3 accepted, 9 rejected, 4 emitted. From token 4: nothing accepted.
    assert (acceptance.steps, acceptance.accepted, acceptance.reached) == (2, [1, 1, 0], [2, 1, 1])
    report = acceptance.report()
    assert report["acceptance_length"] == 2.0
    assert report["confidence_auc"][0] == 0.5


def test_drafts_past_the_end_count_as_rejected() -> None:
    acceptance = Acceptance()
    walk_answer(acceptance, [1, 2], [[2, 2, 2]], None)
    assert acceptance.accepted == [1, 0, 0]


@hypothesis.given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40))
def test_auc_is_the_share_of_ordered_pairs(pairs: list[tuple[int, bool]]) -> None:
    good = [s for s, label in pairs if label]
    bad = [s for s, label in pairs if not label]
    result = area_under_roc([s for s, _ in pairs], [label for _, label in pairs])
    if not good or not bad:
        assert result is None
        return
    ordered = sum((g > b) + 0.5 * (g == b) for g in good for b in bad)
    assert result == pytest.approx(ordered / (len(good) * len(bad)))


def test_draft_vocabulary_keeps_frequent_tokens_and_the_end_token() -> None:
    counts = torch.zeros(1024, dtype=torch.long)
    counts[[500, 900, 30]] = torch.tensor([5, 9, 7])
    d2t, t2d = draft_vocab_mapping(counts, 4)
    kept = (torch.arange(4) + d2t).tolist()
    assert kept == [IM_END_ID, 30, 500, 900]
    assert t2d.nonzero().squeeze(-1).tolist() == kept


def test_block_rows_follow_the_method() -> None:
    assert drafter_spec("dflash").block_size == 8
    assert drafter_spec("dspark").block_size == 7
    with pytest.raises(ValueError, match="--method 'medusa'"):
        drafter_spec("medusa")  # type: ignore[arg-type]


def test_a_directory_without_a_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--target"):
        target_kind(tmp_path)
