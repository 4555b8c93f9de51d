"""Which cached block gives up its content first.

A policy orders the *cached* blocks only (unreferenced and findable). Blocks without content never reach it: the pool
hands those out before it evicts anything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol


class EvictionPolicy(Protocol):
    """The order of eviction. Every call is O(1) or O(log n); the pool calls each with blocks it has checked."""

    def insert(self, block: int, published: int) -> None:
        """`block` has become cached. A sequence's blocks arrive tail first, so that a parent outlives its children.

        `published` says when its content became findable, by the pool's clock: it stays the same when the block is hit
        and released again, and is never smaller than that of content that was published before.
        """

    def remove(self, block: int) -> None:
        """`block` is cached no longer: it was hit, or lost its content."""

    def pop(self) -> int:
        """Remove and return the block to evict. Called only when there is one."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """The cached blocks, first to be evicted first."""
        ...


class LRU:
    """Evicts the least recently released block."""

    def __init__(self) -> None:
        # Not a plain dict: finding its first key is O(deleted keys), OrderedDict's linked list is O(1).
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, block: int, published: int) -> None:
        self._order[block] = None

    def remove(self, block: int) -> None:
        del self._order[block]

    def pop(self) -> int:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)


class FIFO:
    """Evicts the block whose content became findable first, however often it was hit since.

    A block that was filled before its children is evicted before them, and takes them along. Only among those of one
    age, such as the blocks of one prompt, do the children go first: the order of their release decides.
    """

    def __init__(self) -> None:
        # A heap of (published, order of insertion, block). What was removed stays in it until it comes to the top.
        self._heap: list[tuple[int, int, int]] = []
        self._entries: dict[int, tuple[int, int, int]] = {}
        self._num_inserted = 0

    def insert(self, block: int, published: int) -> None:
        if len(self._heap) > 2 * len(self._entries) + 16:  # mostly of blocks that were hit since
            self._heap = list(self._entries.values())
            heapify(self._heap)
        self._entries[block] = entry = (published, self._num_inserted, block)
        self._num_inserted += 1
        heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        del self._entries[block]

    def pop(self) -> int:
        while True:
            entry = heappop(self._heap)
            if self._entries.get(entry[2]) is entry:
                del self._entries[entry[2]]
                return entry[2]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return (block for *_, block in sorted(self._entries.values()))
