"""Which cached block gives up its content first.

A policy orders the *cached* blocks only (unreferenced and findable). Blocks without content never reach it: the pool
hands those out before it evicts anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol


class EvictionPolicy(Protocol):
    """The order of eviction. Every call is O(1) or O(log n); the pool calls each with blocks it has checked.

    `pop` may raise: content that was evicted before stays lost, and nothing else has happened. The others must not.
    """

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
    """Evicts the least recently released block.

    A ring of blocks, linked in an array: 8 bytes a block, where an OrderedDict takes over a hundred. It trusts its
    caller, the pool: a `remove` of what was not inserted breaks the ring.
    """

    def __init__(self) -> None:
        # Two for each place, the next one and the previous. A block's place is its number plus one: place 0 is the
        # ring's own, and after it comes the first to be evicted.
        self._links = array("i", (0, 0))
        self._length = 0

    def insert(self, block: int, published: int) -> None:
        place = block + 1
        missing = 2 * (place + 1) - len(self._links)
        if missing > 0:
            self._links = self._links + array("i", bytes(self._links.itemsize * (missing + 2 * (place // 2))))
        last = self._links[1]
        self._links[2 * last] = self._links[1] = place
        self._links[2 * place], self._links[2 * place + 1] = 0, last
        self._length += 1

    def remove(self, block: int) -> None:
        after, before = self._links[2 * block + 2], self._links[2 * block + 3]
        self._links[2 * before] = after
        self._links[2 * after + 1] = before
        self._length -= 1

    def pop(self) -> int:
        block = self._links[0] - 1
        self.remove(block)
        return block

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        place = self._links[0]
        while place:
            yield place - 1
            place = self._links[2 * place]


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
