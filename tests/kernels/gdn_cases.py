"""One GDN layer driven like an engine drives it, beside a replay of the committed tokens.

`Layer` holds the state pools and runs steps through the operators under test. `Replay` knows only
the tokens that a request has kept, and computes them one by one from nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

HEADS_K, HEADS_V, DK, DV, WIDTH = 1, 2, 4, 4, 4
DIM = 2 * HEADS_K * DK + HEADS_V * DV
CONV_DTYPE = torch.float64


@dataclass
class Token:
    """Inputs of one token: x [DIM] before the convolution; log_decay, beta [HEADS_V]."""

    x: Tensor
    log_decay: Tensor
    beta: Tensor


def random_token(generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Token:
    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return Token(
        normal(DIM).to(dtype),
        (-normal(HEADS_V).abs()).to(torch.float64),
        normal(HEADS_V).sigmoid(),
    )


@dataclass
class Layer:
    """The pools of one layer and the operators of a package (`naive` or `host`)."""

    conv: ModuleType
    gdn: ModuleType
    draft_tokens: int
    slots: int
    seed: int = 0
    dtype: torch.dtype = torch.float64
    conv_dtype: torch.dtype = torch.float64
    states: Tensor = field(init=False)
    windows: Tensor = field(init=False)
    weight: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        # Pools start with rubbish: a recycled slot is never clean.
        self.states = normal(self.slots, HEADS_V, DV, DK).to(self.dtype)
        self.windows = normal(self.slots, WIDTH - 1 + self.draft_tokens, DIM).to(self.conv_dtype)
        self.weight = normal(DIM, WIDTH).to(self.conv_dtype)

    def verify(self, rows: list[list[Token]], columns: Tensor, accepted: list[int]) -> list[Tensor]:
        """Outputs [rows, HEADS_V, DV] of each request."""
        starts, x, log_decay, beta = self._pack(rows)
        counts = torch.tensor(accepted, dtype=torch.int32)
        mixed = self.conv.conv_verify(
            x, self.weight, None, self.windows, starts, columns[:, 0], counts
        )
        out = self.gdn.gdn_verify(
            *split(mixed), log_decay, beta, self.states, starts, columns, counts
        )
        return list(out.split([len(r) for r in rows]))

    def prefill(
        self, rows: list[list[Token]], slots: list[int], has_initial_state: list[bool]
    ) -> list[Tensor]:
        starts, x, log_decay, beta = self._pack(rows)
        where = (starts, torch.tensor(slots), torch.tensor(has_initial_state))
        mixed = self.conv.conv_prefill(x, self.weight, None, self.windows, *where)
        out = self.gdn.gdn_prefill(*split(mixed), log_decay, beta, self.states, *where)
        return list(out.split([len(r) for r in rows]))

    def snapshot(self) -> tuple[Tensor, Tensor]:
        return self.states.clone(), self.windows.clone()

    def _pack(self, rows: list[list[Token]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        starts = torch.tensor([0, *(len(r) for r in rows)], dtype=torch.int32).cumsum(0)
        tokens = [token for row in rows for token in row]
        if not tokens:
            empty = torch.zeros(0, HEADS_V, dtype=torch.float64)
            return starts, torch.zeros(0, DIM, dtype=self.conv_dtype), empty, empty
        return (
            starts,
            torch.stack([t.x for t in tokens]).to(self.conv_dtype),
            torch.stack([t.log_decay for t in tokens]),
            torch.stack([t.beta for t in tokens]),
        )


def split(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = HEADS_K * DK
    q, k, v = mixed.split([keys, keys, HEADS_V * DV], dim=-1)
    return q.unflatten(-1, (-1, DK)), k.unflatten(-1, (-1, DK)), v.unflatten(-1, (-1, DV))


def replay(weight: Tensor, tokens: list[Token]) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [T, HEADS_V, DV], state and convolution history after `tokens`, from nothing.

    Written from the equations, with none of the code under test.
    """
    history = [torch.zeros(DIM, dtype=torch.float64)] * (WIDTH - 1)
    state = torch.zeros(HEADS_V, DV, DK, dtype=torch.float64)
    outputs = []
    for token in tokens:
        window = torch.stack([*history, token.x.double()])
        mixed = torch.nn.functional.silu((window * weight.double().t()).sum(0))
        q, k, v = (part[0] for part in split(mixed[None]))
        q = q / (q.norm(dim=-1, keepdim=True) ** 2 + 1e-6).sqrt() / DK**0.5
        k = k / (k.norm(dim=-1, keepdim=True) ** 2 + 1e-6).sqrt()
        outputs.append(torch.empty(HEADS_V, DV, dtype=torch.float64))
        for head in range(HEADS_V):
            key, query = k[head * HEADS_K // HEADS_V], q[head * HEADS_K // HEADS_V]
            decayed = token.log_decay[head].exp() * state[head]
            state[head] = decayed + torch.outer(token.beta[head] * (v[head] - decayed @ key), key)
            outputs[-1][head] = state[head] @ query
        history = [*history[1:], token.x.double()]
    return torch.stack(outputs), state, torch.stack(history)
