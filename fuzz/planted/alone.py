"""Faults in guards that the manager never runs into: found by the machines that drive a pool or an index alone."""

from __future__ import annotations

from kvproof.allocator import BlockPool, PrefixIndex
from kvproof.fuzz.planted.fault import Fault

POOL_FAULTS = (
    Fault(
        "block released at zero",
        BlockPool,
        "release",
        "if refs == 0:",
        "if False:",
        "a double free: the count goes negative, the block is queued twice (vllm#42571)",
    ),
    Fault(
        "free block shared",
        BlockPool,
        "share",
        "if not self._content[block]:\n            raise",
        "if False:\n            raise",
        "a reference to a block that is still on the free list",
    ),
    Fault(
        "published twice",
        BlockPool,
        "publish",
        " or self._content[block]",
        "",
        "a findable block gets other content under those who read it",
    ),
    Fault(
        "unreferenced block published",
        BlockPool,
        "publish",
        "self.refs(block) == 0 or ",
        "",
        "a block on the free list becomes findable",
    ),
    Fault(
        "negative block is the last",
        BlockPool,
        "refs",
        " <= block < self.num_blocks:",
        " <= abs(block) < self.num_blocks:",
        "slot -1 used as an index hits the last slot (sglang#35351)",
    ),
    Fault(
        "take is not atomic",
        BlockPool,
        "take",
        "if n > len(taken) + self.num_free:",
        "if self.num_free == 0 < n:",
        "the third pop fails and two blocks stay taken (nano-vllm)",
    ),
)
"""For `PoolMachine`."""

INDEX_FAULTS = (
    Fault(
        "uid reused",
        PrefixIndex,
        "_new",
        "self._last_number += 1",
        "self._last_number = len(list(self.nodes())) + 1",
        "an identity has a second life (nano-vllm#163)",
    ),
    Fault(
        "the gap of a removed node is not closed",
        PrefixIndex,
        "_forget",
        "if (at - (entry >> 32)) & mask >= (at - gap) & mask:",
        "if False:",
        "what collided with an evicted block can't be found any more",
    ),
    Fault(
        "namespaces kept for ever",
        PrefixIndex,
        "_close_gap",
        "del self._roots[self._namespaces.pop(parent)]\n            self._free(parent << 3 & _PLACE)",
        "pass",
        "every salt that was ever seen stays in memory",
    ),
)
"""For `IndexMachine`."""
