"""Which arms run side by side on one GPU: as many as its memory holds beside the adaptive one.

A ratio of two engines is of one run only where both ran in it, so the adaptive arm is in every
group. An arm that does not fit at the largest load is measured at the smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# arm -> its largest load
Group = dict[str, int]
# GiB that an arm takes if it serves up to so many requests
Memory = Callable[[str, int], float]


def packed(
    arms: Sequence[str], beside: str, loads: Sequence[int], room: float, memory: Memory
) -> list[Group]:
    """Groups that hold every arm of `arms` once, each with the arm `beside` at all loads.

    room: GiB of a GPU. Arms keep their order, and go into the first group that has room for them.

    Raises:
        ValueError: an arm fits at no load.
    """
    most = max(loads)
    groups: list[Group] = []
    for arm in arms:
        largest = _largest(arm, beside, loads, room, memory)
        for group in groups:
            taken = sum(memory(name, load) for name, load in group.items())
            if taken + memory(arm, largest) <= room:
                group[arm] = largest
                break
        else:
            groups.append({beside: most, arm: largest})
    return groups


def _largest(arm: str, beside: str, loads: Sequence[int], room: float, memory: Memory) -> int:
    taken = memory(beside, max(loads))
    for load in sorted(loads, reverse=True):
        if taken + memory(arm, load) <= room:
            return load
    raise ValueError(
        f"{arm} at {min(loads)} requests takes {memory(arm, min(loads)):.0f} GiB and {beside} at "
        f"{max(loads)} takes {taken:.0f}, more than the {room:.0f} GiB of a GPU together: lower "
        "--loads, --layers or --prompt-tokens"
    )


def parsed(text: str, most: int) -> list[Group]:
    """Groups as given: arms by commas, groups by semicolons, "K = 7:64" for loads up to 64."""
    return [_members(group, most) for group in text.split(";") if group.strip()]


def _members(group: str, most: int) -> Group:
    parts = [part.strip().partition(":") for part in group.split(",") if part.strip()]
    return {name.strip(): int(limit or most) for name, _, limit in parts}
