"""The corpus is reproducible, its answers fit their schemas, and held out means held out."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from tools.zoo.config import (
    IM_END_ID,
    MAX_ANSWER_TOKENS,
    MAX_PROMPT_TOKENS,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
)
from tools.zoo.corpus import Prompt, examples, held_out_prompts, score_json
from tools.zoo.corpus_calls import bfcl_tools
from tools.zoo.corpus_code import library_files
from tools.zoo.corpus_schema import JSON_KINDS, matches, schema_of
from tools.zoo.corpus_values import Values, is_held_out
from tools.zoo.packing import ROW_TOKENS, build_rows
from tools.zoo.tokenizer import CHAT_TEMPLATE, load_tokenizer, prompt_text

FROZEN = Path(__file__).parents[2] / "vllm_ascend_spec" / "zoo" / "prompts.jsonl"


def test_examples_are_reproducible_and_json_answers_fit_their_schema() -> None:
    drawn = list(examples("train", 5, 1500))
    assert drawn == list(examples("train", 5, 1500))
    assert drawn != list(examples("train", 6, 1500))
    kinds = {e.kind for e in drawn}
    assert kinds == {"extract", "call", "convert", "code", "chat"}
    for example in drawn:
        assert (example.schema is not None) == (example.kind in JSON_KINDS)
        if example.schema is not None:
            assert matches(json.loads(example.answer), example.schema)


def test_extraction_answers_can_be_copied_from_the_request() -> None:
    written_out = 0
    for example in examples("held_out", 1, 1500):
        if example.kind != "extract":
            continue
        for value in json.loads(example.answer).values():
            if isinstance(value, bool):
                continue
            written_out += str(value) not in example.request
    # Only days that the text writes out ("March 3, 2024") differ from their ISO form.
    assert 0 < written_out < 200


def test_no_held_out_value_function_or_file_is_in_training() -> None:
    train, held = (Values(random.Random(0), flag) for flag in (False, True))
    for draw in (Values.surname, Values.product, Values.topic, Values.company):
        assert not {draw(train) for _ in range(500)} & {draw(held) for _ in range(500)}
    assert all(is_held_out(held.surname()) for _ in range(50))
    assert not {t.name for t in bfcl_tools(False)} & {t.name for t in bfcl_tools(True)}
    names = [{name for name, _ in library_files(flag)} for flag in (False, True)]
    assert names[0] and names[1] and not names[0] & names[1]


def test_frozen_prompts_are_those_of_the_recipe() -> None:
    rows = [json.loads(line) for line in FROZEN.read_text().splitlines()]
    assert len(rows) == 512 and len({row["text"] for row in rows}) == 512
    tokenizer = load_tokenizer()
    training = {prompt_text(e.request) for e in examples("train", "0.0", 5000)}
    for row in rows:
        prompt = Prompt(**row)
        assert prompt.text not in training
        assert len(tokenizer.encode(prompt.text)) <= MAX_PROMPT_TOKENS
        assert len(tokenizer.encode(prompt.reference)) <= MAX_ANSWER_TOKENS
    # Code prompts depend on the running Python's library; the others must come out the same.
    again = {p.text for p in held_out_prompts(40, 7) if p.kind in ("extract", "convert")}
    first = {row["text"] for row in rows[:60]}
    assert len(again & first) > 10 or any(row["kind"] == "code" for row in rows[:3])


def test_tokenizer_round_trips_and_copies_alike_after_space_and_quote() -> None:
    tokenizer = load_tokenizer()
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    for example in examples("held_out", 3, 300):
        ids = tokenizer.encode(example.request).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == example.request
    name = tokenizer.encode("Dalsen").tokens
    for text in ("to Dalsen.", '"Dalsen", '):
        tokens = tokenizer.encode(text).tokens
        assert any(tokens[i : i + len(name)] == name for i in range(len(tokens)))


def test_chat_template_equals_prompt_text() -> None:
    jinja2 = pytest.importorskip("jinja2")
    message = {"role": "user", "content": 'Say "hi"\nnow'}
    rendered = jinja2.Template(CHAT_TEMPLATE).render(messages=[message], add_generation_prompt=True)
    assert rendered == prompt_text(message["content"])


def test_packed_rows_hold_whole_documents_and_mark_answers() -> None:
    rows = build_rows("train", 3, 200, workers=1)
    assert rows.tokens.shape == rows.segments.shape == (len(rows), ROW_TOKENS)
    assert (rows.segments >= 0).float().mean() > 0.85
    tokenizer, answers = load_tokenizer(), set()
    for r in range(len(rows)):
        for number in range(int(rows.segments[r].max()) + 1):
            inside = rows.segments[r] == number
            wanted = rows.tokens[r][inside & rows.answer[r]].tolist()
            assert wanted[-1] == IM_END_ID
            answers.add(tokenizer.decode(wanted[:-1], skip_special_tokens=False))
    assert answers == {e.answer for e in examples("train", "3.0", 200)} & answers
    assert len(answers) > 180


def test_schema_check_refuses_wrong_answers() -> None:
    schema = schema_of({"name": "x", "count": 1, "tags": ["a"], "ok": True})
    good = {"name": "y", "count": 2, "tags": [], "ok": False}
    assert matches(good, schema)
    for wrong in (
        {**good, "count": "2"}, {**good, "count": True}, {**good, "tags": [1]},
        {**good, "more": 1}, {k: v for k, v in good.items() if k != "ok"}, [good],
    ):  # fmt: skip
        assert not matches(wrong, schema)


def test_scores_tell_parsing_validity_and_exactness_apart() -> None:
    schema = schema_of({"a": 1})
    prompts = [Prompt(str(i), "extract", "", schema, '{"a": 1}') for i in range(4)]
    prompts.append(Prompt("chat", "chat", "", None, "hello"))
    score = score_json(prompts, ['{"a": 1}', '{"a": 2}', '{"a": "2"}', '{"a": ', "x"])
    assert (score.count, score.parses, score.schema_valid, score.exact) == (4, 0.75, 0.5, 0.25)
    with pytest.raises(ValueError, match="no prompt asks for JSON"):
        score_json(prompts[-1:], ["hello"])
