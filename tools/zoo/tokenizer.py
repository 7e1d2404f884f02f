"""Byte-level BPE of 1024 entries, trained on the corpus, and its chat template.

Words, single digits, spaces and runs of punctuation never share a token across their borders.
A name is then tokenised alike after a space and after a quote, so a small model can copy it from
prompt to JSON token by token, while JSON's own punctuation still merges (`", "`, `": "`).

    python -m tools.zoo.tokenizer        # retrain tools/zoo/data/tokenizer.json
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.zoo.config import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    MASK,
    MAX_POSITIONS,
    PAD,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
)
from tools.zoo.corpus import examples

TOKENIZER_FILE = Path(__file__).parent / "data" / "tokenizer.json"
_PIECES = r"\n *|[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]+ ?|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def prompt_text(request: str) -> str:
    """The chat template for one user turn, up to where the answer begins."""
    return f"{IM_START}user\n{request}{IM_END}\n{IM_START}assistant\n"


def train_tokenizer(samples: int = 60_000, seed: int = 11) -> Tokenizer:
    """Train the tokenizer on `samples` training tasks; deterministic for one Python version."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"user\n{e.request}\nassistant\n{e.answer}" for e in examples("train", seed, samples))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@functools.cache
def load_tokenizer() -> Tokenizer:
    """Load the committed tokenizer."""
    return Tokenizer.from_file(str(TOKENIZER_FILE))


def tokenizer_config() -> dict[str, object]:
    """`tokenizer_config.json` for transformers and vLLM."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": PAD,
        "mask_token": MASK,
        "additional_special_tokens": [IM_START],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def save_tokenizer(directory: Path) -> None:
    """Write tokenizer files for transformers into a model directory."""
    (directory / "tokenizer.json").write_text(TOKENIZER_FILE.read_text())
    config = json.dumps(tokenizer_config(), indent=1)
    (directory / "tokenizer_config.json").write_text(config + "\n")


if __name__ == "__main__":
    train_tokenizer().save(str(TOKENIZER_FILE))
