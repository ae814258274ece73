"""Which numbers go together: packed into bins, balanced over parts. Every index is used exactly once.

It stands here and not with the engines because what it gives is stored with a step, and worked out again to verify it.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

# Merging costs as much as there are numbers times parts: only the largest numbers are worth it.
_MERGED = 2048


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `max_tokens` tokens each, by best fit decreasing.

    A length over the budget goes alone. Equal input gives equal output, whatever the platform.
    """
    _check(lengths, "max_tokens", max_tokens)
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for index in _longest_first(lengths):
        length = lengths[index]
        position = bisect_left(room, (length, -1))
        if position < len(room):
            left, chosen = room.pop(position)
            bins[chosen].append(index)
        else:
            left, chosen = max_tokens, len(bins)
            bins.append([index])
        if left - length > 0:
            insort(room, (left - length, chosen))
    return bins


def pack_padded(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Like `pack`, for samples padded to the longest of their bin: samples times longest is at most `max_tokens`."""
    _check(lengths, "max_tokens", max_tokens)
    bins: list[list[int]] = []
    for index in _longest_first(lengths):
        if bins and lengths[bins[-1][0]] * (len(bins[-1]) + 1) <= max_tokens:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `lengths` in `parts` lists whose sums differ by at most the longest length.

    The largest differencing method of Karmarkar and Karp: the two most uneven partitions are merged, the heavy parts of
    one with the light parts of the other. What is left of very many lengths, the shortest, goes one by one to the part
    with the least. No part is empty while another holds two.
    """
    _check(lengths, "parts", parts)
    if parts == 1:
        return [list(range(len(lengths)))]
    longest_first = _longest_first(lengths)
    merged = max(parts, _MERGED // parts)
    found = _differencing(lengths, longest_first[:merged], parts)
    lightest = [(part.tokens, len(part.indices), order, part.indices) for order, part in enumerate(found)]
    heapq.heapify(lightest)
    for index in longest_first[merged:]:
        tokens, count, order, indices = lightest[0]
        indices.append(index)
        heapq.heapreplace(lightest, (tokens + lengths[index], count + 1, order, indices))
    return sorted(sorted(indices) for *_, indices in lightest)


class _Part(NamedTuple):
    tokens: int
    indices: list[int]


def _differencing(lengths: Sequence[int], indices: list[int], parts: int) -> list[_Part]:
    if not indices:
        return [_Part(0, []) for _ in range(parts)]
    heap = [
        (-lengths[index], index, [_Part(lengths[index], [index]), *(_Part(0, []) for _ in range(parts - 1))])
        for index in indices
    ]
    heapq.heapify(heap)
    for order in range(len(lengths), len(lengths) + len(indices) - 1):
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [_join(heavy, light) for heavy, light in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: (part.tokens, len(part.indices)), reverse=True)
        heapq.heappush(heap, (merged[-1].tokens - merged[0].tokens, order, merged))
    return heap[0][2]


def _join(one: _Part, other: _Part) -> _Part:
    # The short list is appended to the long one in place: copying both would be quadratic over thousands of merges.
    short, long = sorted((one.indices, other.indices), key=len)
    long.extend(short)
    return _Part(one.tokens + other.tokens, long)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def _check(lengths: Sequence[int], name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}, it must be at least 1")
    if lengths and min(lengths) < 0:
        raise ValueError(f"a length is {min(lengths)}, lengths are token counts of 0 or more")
