"""Faults in what is found in the prefix cache, and under which name."""

from __future__ import annotations

from kvproof.allocator import BlockManager, PrefixIndex, Sequence
from kvproof.allocator.prefix import PrefixCache
from kvproof.fuzz.planted.fault import Fault

PREFIX_FAULTS = (
    Fault(
        "hash alone decides",
        PrefixIndex,
        "find",
        "if self._records[place + _PARENT] == parent and self._key(node) == key:",
        "if True:",
        "a collision serves another sequence's KV",
    ),
    Fault(
        "parent not verified",
        PrefixIndex,
        "find",
        "self._records[place + _PARENT] == parent and ",
        "",
        "own tokens match, the ancestry does not (vllm GHSA-rm76-4mrf-v9r8)",
    ),
    Fault(
        "tokens not verified",
        PrefixIndex,
        "find",
        " and self._key(node) == key",
        "",
        "a collision among the children of one parent",
    ),
    Fault(
        "index outlives the block",
        PrefixCache,
        "_forget",
        "self.index.remove(block, node)",
        "()",
        "an evicted block is still in the map (nano-vllm#163, vllm#4761)",
    ),
    Fault(
        "orphans stay cached",
        PrefixCache,
        "_forget",
        "self.pool.withdraw(orphan)",
        "pass",
        "a parent is evicted while its child stays cached (TensorRT-LLM#3735)",
    ),
    Fault(
        "namespaces share",
        PrefixIndex,
        "root",
        "self._roots.get(namespace, NONE)",
        "next(iter(self._roots.values()), NONE)",
        "one tenant hits what another computed (vllm#17045)",
    ),
    Fault(
        "chain restarts after a hit",
        PrefixCache,
        "_hashes",
        "hashes[-1] if hashes else",
        "hashes[-1] if len(hashes) > seq._num_cached // self.block_size else",
        "hashing starts from the root again behind a cached prefix (vllm#12415)",
    ),
    Fault(
        "duplicate freed, table kept",
        BlockManager,
        "_merge",
        "seq._table[entry] = keeper",
        "pass",
        "the freed duplicate is still named by the table (mini-sglang#142)",
    ),
    Fault(
        "live duplicate lost",
        BlockManager,
        "_publish",
        "self._prefixes.publish_duplicate(seq._table[entry], node)",
        "pass",
        "the newer copy can't be found when the older is evicted (nano-vllm#219)",
    ),
    Fault(
        "media ignored",
        Sequence,
        "key",
        " + media_in(self.media, start, stop) if self.media else key",
        "",
        "equal placeholders, other image (vllm#12603)",
    ),
    Fault(
        "media without their place",
        BlockManager,
        "sequence",
        "checked_media(media)",
        "tuple(MediaItem(m.key, 0, 1) for m in checked_media(media))",
        "the same image at another offset (vllm#36708)",
    ),
)
