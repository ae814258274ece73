"""Which samples go together: packed into micro-batches, balanced over ranks. Every index is used exactly once."""

import heapq
from bisect import bisect_left, insort
from typing import NamedTuple


def pack(lengths: list[int], max_tokens: int) -> list[list[int]]:
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


def pack_padded(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Like `pack`, for samples padded to the longest of their bin: samples times longest is at most `max_tokens`."""
    _check(lengths, "max_tokens", max_tokens)
    bins: list[list[int]] = []
    for index in _longest_first(lengths):
        if bins and lengths[bins[-1][0]] * (len(bins[-1]) + 1) <= max_tokens:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins


def balance(lengths: list[int], parts: int) -> list[list[int]]:
    """Indices of `lengths` in `parts` lists whose token sums differ by at most the longest length.

    The largest differencing method of Karmarkar and Karp: the two most uneven partitions are merged, the heavy parts of
    one with the light parts of the other. No part is empty while another holds two.
    """
    _check(lengths, "parts", parts)
    if not lengths:
        return [[] for _ in range(parts)]
    heap = [
        (-length, index, [_Part(length, [index]), *(_Part(0, []) for _ in range(parts - 1))])
        for index, length in enumerate(lengths)
    ]
    heapq.heapify(heap)
    for order in range(len(lengths), 2 * len(lengths) - 1):
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [_join(heavy, light) for heavy, light in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: (part.tokens, len(part.indices)), reverse=True)
        heapq.heappush(heap, (merged[-1].tokens - merged[0].tokens, order, merged))
    return sorted(sorted(part.indices) for part in heap[0][2])


class _Part(NamedTuple):
    tokens: int
    indices: list[int]


def _join(one: _Part, other: _Part) -> _Part:
    # The short list is appended to the long one in place: copying both would be quadratic over thousands of merges.
    short, long = sorted((one.indices, other.indices), key=len)
    long.extend(short)
    return _Part(one.tokens + other.tokens, long)


def _longest_first(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def _check(lengths: list[int], name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}, it must be at least 1")
    if lengths and min(lengths) < 0:
        raise ValueError(f"a length is {min(lengths)}, lengths are token counts of 0 or more")
