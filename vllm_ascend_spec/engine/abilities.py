"""What a speculator of vLLM's can leave out, told by its class."""

from __future__ import annotations

from typing import Any

from vllm_ascend_spec.errors import UserError
from vllm_ascend_spec.options import CONFIG_KEY, Options

# Speculators whose drafting can be left out while their cache is kept.
_SKIPPING = {"TargetDependentARSpeculator", "DFlashSpeculator"}
_RECURRING = {"MTPSpeculator", "EagleSpeculator"}


def method_of(speculator: Any) -> str:
    """The drafting method by its class; vLLM names DFlash 2 `dflash`, too."""
    name = type(speculator).__name__.lower()
    for method in ("dflash2", "dflash", "dspark", "eagle", "mtp", "ngram"):
        if method in name:
            return {"eagle": "eagle3"}.get(method, method)
    return "draft_model"


def can_skip(speculator: Any) -> bool:
    """Whether a round can leave out the drafting and keep the drafter's cache."""
    return bool(bases(speculator) & _SKIPPING)


def bases(speculator: Any) -> set[str]:
    """Names of its class and of every class that it derives from."""
    return {base.__name__ for base in type(speculator).__mro__}


def can_draft_part(speculator: Any) -> bool:
    """Whether a round can draft for some requests of the batch and leave the others out."""
    known = bases(speculator)
    if getattr(speculator, "pcp_manager", None) is not None:
        return False
    # vLLM 0.33 stores the context elsewhere (`_store_hidden_states`): read, not run.
    block = "DFlashSpeculator" in known and not hasattr(speculator, "_store_hidden_states")
    return block or bool(known & _RECURRING)


def draft_lengths(options: Options, speculator: Any, most: int) -> tuple[int, ...]:
    """Draft lengths that the planner may choose, ascending; empty for K alone.

    Raises:
        UserError: the drafter gains nothing by a shorter draft, or one is longer than K (`most`).
    """
    lengths = options.draft_lengths
    if not lengths:
        return ()
    if not bases(speculator) & _RECURRING:
        raise UserError(
            f"{CONFIG_KEY}.draft_lengths: {method_of(speculator)} drafts its tokens at once, so a "
            "shorter draft saves nothing. Leave it out."
        )
    if max(lengths) > most:
        raise UserError(
            f"{CONFIG_KEY}.draft_lengths holds {max(lengths)}, more than num_speculative_tokens = "
            f"{most}."
        )
    return tuple(sorted({*lengths, most}))
