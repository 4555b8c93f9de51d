"""Faults in which block is taken next, and what is counted of it."""

from __future__ import annotations

from kvproof.allocator import FIFO, BlockPool
from kvproof.allocator.prefix import PrefixCache
from kvproof.fuzz.planted.fault import Fault

EVICTION_FAULTS = (
    Fault(
        "release forgets a reference",
        BlockPool,
        "release",
        "if refs == 1:",
        "refs = 1\n    if True:",
        "a shared block is freed under its other owner",
    ),
    Fault(
        "cached hit left on the free list",
        BlockPool,
        "share",
        "self._cached.remove(block)",
        "pass",
        "a revived block is handed out again (nano-vllm 9fa256a)",
    ),
    Fault(
        "contentless blocks last",
        BlockPool,
        "take",
        "clock = self.clock - len(taken)",
        "[self._evict() for _ in range(min(n, len(self._cached)))]\n    clock = self.clock - len(taken)",
        "cached blocks are evicted while useless ones lie free (vllm#42656)",
    ),
    Fault(
        "most recently used first",
        BlockPool,
        "_evict",
        "self._cached.pop()",
        "max(self._cached, key=list(self._cached).index); self._cached.remove(block)",
        "eviction takes the block that was freed last (transformers)",
    ),
    Fault(
        "null block handed out",
        BlockPool,
        "__init__",
        "range(num_blocks - 1, num_reserved - 1, -1)",
        "range(num_blocks - 1, -1, -1)",
        "padding writes where a sequence reads (sglang#32477)",
    ),
    Fault(
        "a hit makes a block young again",
        BlockPool,
        "release",
        "self._published[block])",
        "self.clock)",
        "first in, first out becomes least recently used",
    ),
    Fault(
        "new content is as old as the block's last",
        BlockPool,
        "publish",
        "self._published[block] = self.clock",
        "self._published[block] = self._published[block] or self.clock",
        "FIFO evicts what has just been computed",
    ),
    Fault(
        "parents first among equals",
        FIFO,
        "insert",
        "(published, self._num_inserted, block)",
        "(published, -self._num_inserted, block)",
        "a prompt loses its head, and everything with it",
    ),
    Fault(
        "orphans not counted as evicted",
        PrefixCache,
        "_evicted",
        "(block, *self._forget(block, node))",
        "(block, self._forget(block, node))[:1]",
        "more is lost than the figures say",
    ),
    Fault(
        "reset counts as eviction",
        PrefixCache,
        "clear",
        "self.counters.evictions, self.counters.residency = counted",
        "pass",
        "a reset looks like a pool that is too small",
    ),
)
