"""Which arms run side by side on one GPU: all whose weights and graphs it holds beside one cache.

Caches take turns: an arm that is not measured gives its own back. A ratio of two engines is of one
run only where both ran in it, so the adaptive arm is in every group. An arm whose cache does not
fit at some cases is measured at the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from benchmarks.engine.cases import Case

# Names of arms, here since results are read where no engine is installed, nor torch.
NONE, ADAPTIVE = "no speculation", "adaptive"
VLLM_ADAPTIVE = "adaptive with vLLM's planner"

# arm -> what it is measured at
Group = dict[str, list[Case]]
# GiB that an arm takes besides its cache, and in all, if it serves these cases
Memory = Callable[[str, Sequence[Case]], tuple[float, float]]


def packed(
    arms: Sequence[str], beside: str, cases: Sequence[Case], room: float, memory: Memory
) -> list[Group]:
    """Groups that hold every arm of `arms` once, each with the arm `beside` at all cases.

    room: GiB of a GPU. Arms keep their order, and go into the first group that has room for them.

    Raises:
        ValueError: an arm fits at no case.
    """
    groups: list[Group] = []
    for arm in arms:
        for group in groups:
            grown = group | {arm: list(cases)}
            if _taken(grown, memory) <= room:
                group[arm] = list(cases)
                break
        else:
            groups.append(_alone(arm, beside, cases, room, memory))
    return groups


def _taken(group: Group, memory: Memory) -> float:
    found = [memory(name, cases) for name, cases in group.items()]
    return sum(besides for besides, _ in found) + max(both - besides for besides, both in found)


def _alone(arm: str, beside: str, cases: Sequence[Case], room: float, memory: Memory) -> Group:
    by_cache = sorted(cases, key=lambda case: memory(arm, [case])[1])
    for count in range(len(cases), 0, -1):
        kept = [case for case in cases if case in by_cache[:count]]
        group = {beside: list(cases), arm: kept}
        if _taken(group, memory) <= room:
            return group
    raise ValueError(
        f"{arm} at {by_cache[0]} takes {memory(arm, by_cache[:1])[1]:.0f} GiB and {beside} at all "
        f"cases {memory(beside, cases)[1]:.0f}, too much for the {room:.0f} GiB of a GPU: lower "
        "--loads, --layers or --prompt-tokens"
    )


def parsed(text: str, cases: Sequence[Case], known: Collection[str]) -> list[Group]:
    """Groups as given: arms by commas, groups by semicolons, "K = 7:64" for loads up to 64.

    Raises:
        ValueError: an arm that is not among those `known`, or that no case is left to.
    """
    return [_members(group, cases, known) for group in text.split(";") if group.strip()]


def _members(group: str, cases: Sequence[Case], known: Collection[str]) -> Group:
    found: Group = {}
    for part in (part.strip() for part in group.split(",")):
        name, limited, limit = (piece.strip() for piece in part.partition(":"))
        if name not in known:
            raise ValueError(f"--groups: no arm is called {name!r}, but {', '.join(known)}")
        if limited and not limit.isdecimal():
            raise ValueError(f"--groups: {part!r} should end in the largest load")
        found[name] = [case for case in cases if not limited or case.load <= int(limit)]
        if not found[name]:
            raise ValueError(f"--groups: {part!r} leaves none of the loads")
    return found
