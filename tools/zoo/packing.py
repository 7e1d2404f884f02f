"""Tokenised, packed training rows: documents side by side, none cut, none seeing another.

The rows fit in one int16 tensor on the device, so training never waits for the host.

    python -m tools.zoo.packing --samples 400000 --seed 0 --workers 16 --out rows.pt
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.zoo.config import IM_END, PAD_ID
from tools.zoo.corpus import Split, examples, fits
from tools.zoo.tokenizer import load_tokenizer, prompt_text

ROW_TOKENS = 512
_SHARD = 5000


@dataclass
class PackedRows:
    """`N` rows of 512 tokens.

    `tokens`: [N, 512] int16. `segments`: [N, 512] int16, document number within the row.
    `answer`: [N, 512] bool, tokens of an answer (its `<|im_end|>` included), the wanted targets.
    """

    tokens: Tensor
    segments: Tensor
    answer: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> PackedRows:
        return PackedRows(self.tokens.to(device), self.segments.to(device), self.answer.to(device))


Document = tuple[list[int], int]  # tokens of prompt and answer, length of the prompt


def tokenise_shard(job: tuple[Split, str, int]) -> list[Document]:
    """Draw and tokenise one shard of the corpus."""
    split, seed, count = job
    tokenizer = load_tokenizer()
    drawn = list(examples(split, seed, count))
    prompts = tokenizer.encode_batch([prompt_text(e.request) for e in drawn])
    answers = tokenizer.encode_batch([e.answer + IM_END for e in drawn])
    return [
        (p.ids + a.ids, len(p.ids))
        for p, a in zip(prompts, answers, strict=True)
        if fits(len(p.ids), len(a.ids))
    ]


def pack(documents: Sequence[Document]) -> PackedRows:
    """Pack documents first-fit into the last few open rows."""
    rows: list[list[Document]] = []
    open_rows: list[tuple[int, int]] = []  # (row, free tokens), few of them: packing stays linear
    for document in documents:
        length = len(document[0])
        spot = next((i for i, (_, free) in enumerate(open_rows) if free >= length), None)
        if spot is None:
            rows.append([document])
            open_rows = [*open_rows[-15:], (len(rows) - 1, ROW_TOKENS - length)]
        else:
            row, free = open_rows[spot]
            rows[row].append(document)
            open_rows[spot] = (row, free - length)
    tokens = np.full((len(rows), ROW_TOKENS), PAD_ID, dtype=np.int16)
    segments = np.full((len(rows), ROW_TOKENS), -1, dtype=np.int16)
    answer = np.zeros((len(rows), ROW_TOKENS), dtype=bool)
    for r, row_documents in enumerate(rows):
        begin = 0
        for number, (ids, prompt) in enumerate(row_documents):
            end = begin + len(ids)
            tokens[r, begin:end] = ids
            segments[r, begin:end] = number
            answer[r, begin + prompt : end] = True
            begin = end
    return PackedRows(*(torch.from_numpy(x) for x in (tokens, segments, answer)))


def _pack_shard(job: tuple[Split, str, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = pack(tokenise_shard(job))
    return rows.tokens.numpy(), rows.segments.numpy(), rows.answer.numpy()


def build_rows(split: Split, seed: int, samples: int, workers: int) -> PackedRows:
    """Draw, tokenise and pack `samples` tasks; the result does not depend on `workers`."""
    shards = -(-samples // _SHARD)
    jobs = [(split, f"{seed}.{i}", min(_SHARD, samples - i * _SHARD)) for i in range(shards)]
    if workers <= 1:
        parts = [_pack_shard(job) for job in jobs]
    else:
        # spawn, because torch's threads do not survive a fork
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            parts = pool.map(_pack_shard, jobs, chunksize=1)
    columns = zip(*parts, strict=True)
    return PackedRows(*(torch.from_numpy(np.concatenate(c)) for c in columns))


def save_rows(rows: PackedRows, path: Path) -> None:
    """Write rows to a file for several training runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"tokens": rows.tokens, "segments": rows.segments, "answer": rows.answer}, path)


def load_rows(path: Path) -> PackedRows:
    """Read rows that `save_rows` wrote."""
    if not path.exists():
        raise SystemExit(f"--rows {path}: no such file; make it with python -m tools.zoo.packing")
    return PackedRows(**torch.load(path, weights_only=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    begin = time.monotonic()
    rows = build_rows("train", args.seed, args.samples, args.workers)
    save_rows(rows, args.out)
    filled = float((rows.segments >= 0).float().mean())
    seconds = time.monotonic() - begin
    print(
        f"{len(rows)} rows of {ROW_TOKENS}, {filled:.1%} filled, {rows.answer.float().mean():.1%}"
        f" answer tokens, {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
