"""What identifies a captured graph, and a store that cannot mix two of them up.

vllm-ascend keeps the parameters of captured attention calls in tables keyed by the row count. Two
graphs of 128 rows, say 16 requests of 8 and 128 of 1, then append to one list, and an update
meant for one reaches the other. Here the key is the whole identity, and a bare number is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Role(str, Enum):
    """Whose forward pass it is: target and drafter have graphs of their own."""

    TARGET = "target"
    DRAFTER = "drafter"


class Phase(str, Enum):
    """What the rows of one request are, whatever their number."""

    PREFILL = "prefill"  # prompt tokens, also the last chunk of a prompt
    DECODE = "decode"  # one row, and the state of a recurrent layer lies where decoding left it
    VERIFY = "verify"  # the last token and 0 to K draft tokens
    DRAFT = "draft"  # the drafter's query tokens: anchor and masks, or one token


class Kind(str, Enum):
    """What a launch computes. A graph serves a kind because it was captured for its meaning."""

    DECODE = "decode"
    VERIFY = "verify"
    DRAFT = "draft"
    MIXED = "mixed"  # prompt tokens are among the rows


@dataclass(frozen=True, order=True)
class GraphKey:
    """Identity of a captured graph; rows and requests count its padding."""

    role: Role
    kind: Kind
    rows: int
    requests: int

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= self.rows:
            raise ValueError(
                f"a graph of {self.rows} rows cannot be of {self.requests} requests: "
                "each captured request has a row or more"
            )

    def __str__(self) -> str:
        size = f"{self.rows} rows, {self.requests} requests"
        return f"{self.role.value} {self.kind.value} graph of {size}"


class GraphStore(Generic[T]):
    """What belongs to one captured graph each: task handles, workspaces, buffers."""

    def __init__(self) -> None:
        self._kept: dict[GraphKey, T] = {}

    def put(self, key: GraphKey, value: T) -> None:
        """Keep `value` for the graph `key`.

        Raises:
            TypeError: the key is not a GraphKey; a row count names several graphs.
            ValueError: the graph has a value already; what it captured would be lost.
        """
        self._require_key(key)
        if key in self._kept:
            raise ValueError(f"the {key} was captured twice: drop the first one before")
        self._kept[key] = value

    def __getitem__(self, key: GraphKey) -> T:
        self._require_key(key)
        if key not in self._kept:
            raise KeyError(f"nothing was captured for the {key}")
        return self._kept[key]

    def pop(self, key: GraphKey) -> T:
        """Forget the graph `key` and hand its value back."""
        value = self[key]
        del self._kept[key]
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[GraphKey]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @staticmethod
    def _require_key(key: object) -> None:
        if not isinstance(key, GraphKey):
            raise TypeError(
                f"{key!r} does not name a graph: target and drafter, verify and mixed steps have "
                "graphs of equal row counts. Use a GraphKey."
            )
