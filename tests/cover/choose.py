"""Chooses few and short cases that together cover the lines of all cases: a weighted greedy cover.

A set of lines or functions is an integer with a bit for each member, so that millions of memberships are joined and
counted quickly. The greedy cover takes the case with the largest gain per second until nothing is missing, which is at
most ln(n) times as long as the shortest cover, and then removes cases that later cases have made redundant.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping

CASE_S = 0.02  # pytest's overhead per case


def cover(
    sets: Mapping[str, int],
    seconds: Mapping[str, float],
    taken: Iterable[str] = (),
    budget_s: float = float("inf"),
) -> list[str]:
    """Returns cases to add to ``taken``, so that together they have all bits of all sets, or most.

    A case that does not fit into ``budget_s``, the total seconds of added cases, is left out.

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
        if heap and gain > heap[0][0]:  # the gain shrank as other cases were taken
            heapq.heappush(heap, (gain, case))
            continue
        added.append(case)
        has |= sets[case]
        spent += cost[case]
    return without_needless(sets, cost, added, taken)


def without_needless(
    sets: Mapping[str, int], cost: Mapping[str, float], added: Collection[str], taken: Iterable[str]
) -> list[str]:
    """Returns the added cases without redundant cases, the longest removed first."""
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
    """Returns each set as an integer with a bit per member; equal members have the same bit in all sets."""
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
