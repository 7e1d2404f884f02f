"""Training rows for drafters: the target's answers, its hidden states and packed batches.

Hidden states are computed once from the frozen target when training starts and stay on the
device (0.8 KB a token), which is cheaper than reading them from files for models of this size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.zoo.config import PAD_ID
from tools.zoo.modeling import Target


@dataclass
class Answers:
    """Prompts with the target's answers, concatenated.

    `tokens` [N] int64; document `i` is `tokens[starts[i]:starts[i + 1]]` and its first
    `prompt_lengths[i]` tokens are the prompt.
    """

    tokens: Tensor
    starts: Tensor
    prompt_lengths: Tensor

    def __len__(self) -> int:
        return self.prompt_lengths.numel()

    @property
    def lengths(self) -> Tensor:
        return self.starts[1:] - self.starts[:-1]

    def document(self, index: int) -> Tensor:
        return self.tokens[int(self.starts[index]) : int(self.starts[index + 1])]

    def answer_counts(self, vocab: int) -> Tensor:
        """How often each token occurs in the answers: [vocab] int64."""
        owner = torch.repeat_interleave(torch.arange(len(self)), self.lengths)
        offset = torch.arange(self.tokens.numel()) - self.starts[owner]
        return torch.bincount(self.tokens[offset >= self.prompt_lengths[owner]], minlength=vocab)

    def slice(self, first: int, last: int) -> Answers:
        """Documents `first` to `last - 1`."""
        starts = self.starts[first : last + 1]
        return Answers(
            self.tokens[int(starts[0]) : int(starts[-1])],
            starts - starts[0],
            self.prompt_lengths[first:last],
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {
                "tokens": self.tokens.to(torch.int32),
                "starts": self.starts,
                "prompt_lengths": self.prompt_lengths.to(torch.int32),
            },
            path,
        )


def pack_answers(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Answers:
    """Join prompts and answers (token ids) into one `Answers`; empty answers are left out."""
    pairs = [(list(p), list(a)) for p, a in zip(prompts, answers, strict=True) if len(a) > 0]
    lengths = torch.tensor([0] + [len(p) + len(a) for p, a in pairs])
    return Answers(
        torch.tensor([t for p, a in pairs for t in p + a], dtype=torch.int64),
        lengths.cumsum(0),
        torch.tensor([len(p) for p, _ in pairs], dtype=torch.int64),
    )


def load_answers(path: Path) -> Answers:
    """Read a file written by `Answers.save` (see `distill.py`)."""
    if not path.is_file():
        raise FileNotFoundError(f"--answers {path}: no such file; write it with tools.zoo.distill")
    try:
        data = load_file(path)
        return Answers(data["tokens"].long(), data["starts"], data["prompt_lengths"].long())
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"--answers {path}: not an answers file of tools.zoo.distill") from error


@dataclass
class HiddenStates:
    """Target states of every token of an `Answers`, in its order, bf16 on the device.

    `aux`: [N, len(aux ids) * hidden], the streams of the auxiliary layers side by side.
    `last`: [N, hidden], the stream before the final norm.
    """

    aux: Tensor
    last: Tensor


@torch.no_grad()
def collect_hidden_states(
    target: Target, answers: Answers, aux_layer_ids: Sequence[int], tokens_per_batch: int = 65536
) -> HiddenStates:
    """Run the frozen target over every document (right-padded batches of similar length)."""
    device = target.lm_head.weight.device
    width = target.lm_head.weight.shape[1]
    total = answers.tokens.numel()
    aux = torch.empty(total, len(aux_layer_ids) * width, dtype=torch.bfloat16, device=device)
    last = torch.empty(total, width, dtype=torch.bfloat16, device=device)
    tokens, starts = answers.tokens.to(device), answers.starts.to(device)
    lengths = answers.lengths
    order = torch.argsort(lengths, descending=True, stable=True)
    first = 0
    while first < len(answers):
        longest = int(lengths[order[first]])
        chosen = order[first : first + max(1, tokens_per_batch // longest)]
        first += chosen.numel()
        offsets = torch.arange(longest, device=device)
        valid = offsets < lengths[chosen].to(device)[:, None]
        where = (starts[chosen.to(device)][:, None] + offsets).clamp(max=total - 1)
        # Padding follows the document, so a causal model's earlier rows never read it.
        hidden = target(torch.where(valid, tokens[where], PAD_ID)).hidden
        rows = where[valid]
        aux[rows] = torch.cat([hidden[i] for i in aux_layer_ids], -1)[valid].to(aux.dtype)
        last[rows] = hidden[-1][valid].to(last.dtype)
    return HiddenStates(aux, last)


@dataclass
class Batch:
    """One packed row of `T` tokens in the layout of `speculators`' models (all [1, T, ...]).

    `loss_mask` marks rows whose token may start a draft. `document_ids` is -1 on padding.
    """

    input_ids: Tensor
    hidden_states: Tensor
    verifier_last_hidden_states: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    position_ids: Tensor

    def items(self) -> dict[str, Tensor]:
        return dict(vars(self))


class Packer:
    """Draws documents at random and packs them into batches.

    `shifted` is the layout of MTP and EAGLE-3: row `t` holds the token at `t + 1` beside the
    hidden state at `t`. Otherwise token and hidden state share a row (block drafters).
    `targets_in_place` says that a row's loss mask counts for the token in that row (DFlash)
    and not for the next one (DSpark, MTP, EAGLE-3), whose last answer token predicts nothing.
    """

    def __init__(
        self,
        answers: Answers,
        hidden: HiddenStates,
        *,
        shifted: bool,
        targets_in_place: bool,
        tokens_per_batch: int,
        seed: int,
    ) -> None:
        self.answers, self.hidden = answers, hidden
        self.shifted, self.targets_in_place = shifted, targets_in_place
        self.size = tokens_per_batch
        self.device = hidden.last.device
        self.tokens = answers.tokens.to(self.device)
        self.generator = torch.Generator().manual_seed(seed)
        self.queue: list[int] = []
        longest = int(answers.lengths.max())
        if longest > tokens_per_batch:
            raise ValueError(f"--tokens {tokens_per_batch}: the longest document has {longest}")

    def _next_document(self) -> int:
        if not self.queue:
            self.queue = torch.randperm(len(self.answers), generator=self.generator).tolist()
        return self.queue.pop()

    def random_batch(self) -> Batch:
        """A batch of whole documents drawn without replacement within an epoch."""
        chosen: list[int] = []
        used = 0
        while True:
            document = self._next_document()
            used += int(self.answers.lengths[document])
            if used > self.size:
                self.queue.append(document)
                return self.batch(chosen)
            chosen.append(document)

    def batch(self, documents: Sequence[int]) -> Batch:
        """Pack the documents named by index, in that order, and pad to `tokens_per_batch`."""
        drop = int(self.shifted)
        token_rows, positions, mask, ids = [], [], [], []
        for number, document in enumerate(documents):
            length, prompt = (
                int(self.answers.lengths[document]),
                int(self.answers.prompt_lengths[document]),
            )
            row = torch.arange(length - drop)
            token_rows.append(row + int(self.answers.starts[document]) + drop)
            positions.append(row)
            token = row + drop
            end = length if self.targets_in_place else length - 1
            mask.append((token >= prompt) & (token < end))
            ids.append(torch.full((length - drop,), number))
        where = torch.cat(token_rows)
        pad = self.size - where.numel()
        valid = torch.cat([torch.ones_like(where), torch.zeros(pad, dtype=torch.long)]).bool()
        where = torch.nn.functional.pad(where, (0, pad), value=drop).to(self.device)
        flags = torch.stack([_padded(mask, pad, 0), _padded(ids, pad, -1), _padded(positions, pad)])
        flags, valid = flags.to(self.device), valid.to(self.device)
        return Batch(
            torch.where(valid, self.tokens[where], PAD_ID)[None],
            self.hidden.aux[where - drop][None],
            self.hidden.last[where][None],
            flags[0:1].bool(),
            flags[1:2],
            flags[2:3],
        )


def _padded(parts: Sequence[Tensor], pad: int, value: int = 0) -> Tensor:
    return torch.nn.functional.pad(torch.cat([p.long() for p in parts]), (0, pad), value=value)
