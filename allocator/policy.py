"""Which cached block gives up its content first.

A policy orders the *cached* blocks only (unreferenced and findable). Blocks without content never reach it: the pool
hands those out before it evicts anything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """The order of eviction. Every call is O(1) or O(log n); the pool calls each with blocks it has checked."""

    def insert(self, block: int) -> None:
        """`block` has become cached. A sequence's blocks arrive tail first, so that a parent outlives its children."""

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

    def insert(self, block: int) -> None:
        self._order[block] = None

    def remove(self, block: int) -> None:
        del self._order[block]

    def pop(self) -> int:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)
