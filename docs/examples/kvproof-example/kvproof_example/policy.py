"""An eviction policy: segmented LRU, which a stream of prompts that are seen once does not flush."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain


class SegmentedLRU:
    """Evicts what was never hit before what was. Content that was hit is protected, in up to half of the cached blocks.

    Each segment is in order of release, and the pool releases a sequence's last block first, so that in either a prefix
    outlives its continuations.
    """

    def __init__(self) -> None:
        # By block, with the time of its publication, which tells its content from what it held before.
        self._probation: OrderedDict[int, int] = OrderedDict()
        self._protected: OrderedDict[int, int] = OrderedDict()
        self._removed: dict[int, int] = {}

    def insert(self, block: int, published: int) -> None:
        was_hit = self._removed.pop(block, None) == published
        (self._protected if was_hit else self._probation)[block] = published
        if len(self._protected) > len(self._probation) + 1:
            self._probation.update([self._protected.popitem(last=False)])

    def remove(self, block: int) -> None:
        segment = self._probation if block in self._probation else self._protected
        self._removed[block] = segment.pop(block)

    def pop(self) -> int:
        block, _ = (self._probation or self._protected).popitem(last=False)
        return block

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[int]:
        return chain(self._probation, self._protected)
