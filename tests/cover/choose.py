"""Chooses few and short cases that do together what all cases do: a weighted cover by greed.

A set of lines or functions is an integer with a bit for each, so that millions of memberships are joined and counted
quickly. The cover by greed takes the case that adds most for each second until nothing is missing, which is at most
ln(n) times as long as the shortest cover, and then leaves out what later cases have made needless.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping

CASE_S = 0.02  # what pytest spends on a case besides


def cover(
    sets: Mapping[str, int],
    seconds: Mapping[str, float],
    taken: Iterable[str] = (),
    budget_s: float = float("inf"),
) -> list[str]:
    """Returns the cases that are added to ``taken`` so that together they have all bits of all sets, or most of them.

    A case that does not fit into ``budget_s``, the seconds of all that are added, is left out.

    >>> sets = {"a": 0b111, "b": 0b011, "c": 0b100}
    >>> cover(sets, {"a": 9.0, "b": 1.0, "c": 1.0})
    ['b', 'c']
    >>> cover(sets, {"a": 1.0, "b": 1.0, "c": 1.0}, budget_s=2)
    ['a']
    """
    has = 0
    for case in taken:
        has |= sets.get(case, 0)
    cost = {case: seconds[case] + CASE_S for case in sets}
    heap = [(-(bits & ~has).bit_count() / cost[case], case) for case, bits in sets.items()]
    heapq.heapify(heap)
    added: list[str] = []
    spent = 0.0
    while heap:
        _, case = heapq.heappop(heap)
        gain = -(sets[case] & ~has).bit_count() / cost[case]
        if not gain or spent + cost[case] > budget_s:
            continue
        if heap and gain > heap[0][0]:  # it was better before others were taken
            heapq.heappush(heap, (gain, case))
            continue
        added.append(case)
        has |= sets[case]
        spent += cost[case]
    return without_needless(sets, cost, added, taken)


def without_needless(
    sets: Mapping[str, int], cost: Mapping[str, float], added: Collection[str], taken: Iterable[str]
) -> list[str]:
    """Returns the added cases without those whose bits others have, the longest left out first."""
    kept = list(added)
    taken = list(taken)
    for case in sorted(added, key=lambda case: -cost[case]):
        others = 0
        for other in [*taken, *kept]:
            if other != case:
                others |= sets.get(other, 0)
        if not sets[case] & ~others:
            kept.remove(case)
    return kept


def as_bits(sets: Mapping[str, Iterable[object]]) -> dict[str, int]:
    """Returns each set as an integer with a bit for each of its members, and a common place for equal members."""
    place: dict[object, int] = {}
    found = {}
    for case, members in sets.items():
        bits = bytearray()
        for member in members:
            index = place.setdefault(member, len(place))
            bits.extend(bytes(max(0, index // 8 + 1 - len(bits))))
            bits[index // 8] |= 1 << index % 8
        found[case] = int.from_bytes(bits, "little")
    return found
