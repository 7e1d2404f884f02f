"""The arms of the demo: which methods run, on which prompts, with which engine settings."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_spec.demo.records import ArmRequest, PromptRecord
from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.zoo import DRAFT_TOKENS, Prompt, Zoo

REFERENCE = "none"
MAX_TOKENS = 160
MAX_NUM_SEQS = 8
ENGINE = {
    "max_model_len": 512,
    "kv_cache_memory_bytes": 256 << 20,
    "enable_prefix_caching": False,
}


@dataclass(frozen=True)
class Arm:
    """One arm. note: what a reader of its row must know."""

    name: str
    method: str
    title: str
    adaptive: bool = False
    note: str = ""


ARMS: tuple[Arm, ...] = (
    Arm(REFERENCE, "none", "no speculation"),
    Arm(
        "ngram",
        "ngram",
        "n-gram",
        note="on this engine a step without a match proposes the last token again, so every step "
        "counts as drafted",
    ),
    Arm("suffix", "suffix", "suffix"),
    Arm("mtp", "mtp", "MTP"),
    Arm("eagle3", "eagle3", "EAGLE-3"),
    Arm("dflash", "dflash", "DFlash"),
    Arm("dspark", "dspark", "DSpark"),
    Arm("dflash2", "dflash2", "DFlash 2"),
    Arm(
        "dspark-adaptive",
        "dspark",
        "DSpark adaptive",
        adaptive=True,
        note="plans with assumed step costs: a CPU has none that would say anything about a device",
    ),
)
NOT_YET = ("suffix",)


def choose(names: Sequence[str] | None) -> list[Arm]:
    """The named arms in the order of the table, all of them without names.

    The arm without speculation always runs: it is what the others are compared with.
    """
    if not names:
        return list(ARMS)
    known = [arm.name for arm in ARMS]
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {nearest[0]!r}?" if nearest else ""
            raise UserError(f"--methods: unknown method {name!r}{hint} Known: {', '.join(known)}")
    return [arm for arm in ARMS if arm.name in (*names, REFERENCE)]


def sample(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, taken from each kind in turn so that a few prompts cover every kind."""
    if count > len(prompts):
        raise UserError(f"--prompts {count}: there are {len(prompts)} held-out prompts")
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    turns = max(map(len, by_kind.values()))
    in_turn = [kind[turn] for turn in range(turns) for kind in by_kind.values() if turn < len(kind)]
    return in_turn[:count]


def request(arm: Arm, zoo: Zoo, target: str, prompts: Sequence[Prompt]) -> ArmRequest:
    """What the arm's process needs; UserError when the zoo has no such drafter."""
    return ArmRequest(
        name=arm.name,
        model=str(zoo.target(target)),
        speculative_config=zoo.speculative_config(
            target, arm.method, DRAFT_TOKENS, adaptive=arm.adaptive
        ),
        prompts=[prompt_record(prompt) for prompt in prompts],
        max_tokens=MAX_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        engine=dict(ENGINE),
    )


def prompt_record(prompt: Prompt) -> PromptRecord:
    return PromptRecord(
        id=prompt.id, kind=prompt.kind, text=prompt.text, answer_schema=prompt.schema
    )
