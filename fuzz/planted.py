"""Faults to plant in our own code, each a failure that some engine really had.

A check that has never failed proves nothing, so every guard we wrote can be broken by name here, and the tests show
that a machine notices. A fault is one replacement in the source of one function, applied in memory.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType

from kvproof.allocator import BlockManager, BlockPool, PrefixIndex, Sequence


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in the source of `owner.function`."""

    name: str
    owner: type
    function: str
    old: str
    new: str
    why: str

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is in force inside the `with` block. Not for use beside other threads."""
        original = inspect.getattr_static(self.owner, self.function)
        setattr(self.owner, self.function, self._broken(original))
        try:
            yield
        finally:
            setattr(self.owner, self.function, original)

    def _broken(self, original: FunctionType) -> FunctionType:
        source = textwrap.dedent(inspect.getsource(original))
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {source.count(self.old)} times in {self.function}")
        scope: dict[str, FunctionType] = {}
        exec("from __future__ import annotations\n" + source.replace(self.old, self.new), original.__globals__, scope)
        return scope[self.function]


FAULTS = (
    Fault(
        "hash alone decides",
        PrefixIndex,
        "find",
        "not (node.parent is parent and node.tokens == tokens)",
        "False",
        "a collision serves another sequence's KV",
    ),
    Fault(
        "parent not verified",
        PrefixIndex,
        "find",
        "not (node.parent is parent and node.tokens == tokens)",
        "node.tokens != tokens",
        "own tokens match, the ancestry does not (vllm GHSA-rm76-4mrf-v9r8)",
    ),
    Fault(
        "tokens not verified",
        PrefixIndex,
        "find",
        "and node.tokens == tokens",
        "",
        "a collision among the children of one parent",
    ),
    Fault(
        "index outlives the block",
        BlockManager,
        "_forget",
        "self.index.remove(block, node)",
        "()",
        "an evicted block is still in the map (nano-vllm#163, vllm#4761)",
    ),
    Fault(
        "orphans stay cached",
        BlockManager,
        "_forget",
        "self.pool.withdraw(orphan)",
        "pass",
        "a parent is evicted while its child stays cached (TensorRT-LLM#3735)",
    ),
    Fault(
        "published before it is written",
        BlockManager,
        "admit",
        "self._admitted[seq] = None",
        "self._admitted[seq] = None; [self._publish(seq, i) for i in "
        "range(seq._num_computed // self.block_size, seq._num_reserved // self.block_size)]",
        "a request hits a block that nobody has written yet (vllm#29387, nano-vllm#208)",
    ),
    Fault(
        "namespaces share",
        PrefixIndex,
        "root",
        "self._roots.get(namespace) or Node(0, namespace,",
        "next(iter(self._roots.values()), None) or Node(0, namespace,",
        "one tenant hits what another computed (vllm#17045)",
    ),
    Fault(
        "revived hits cost nothing",
        BlockManager,
        "_quote",
        "num_new_blocks + num_revived",
        "num_new_blocks",
        "the check forgets that a free hit leaves the free list (vllm#11565)",
    ),
    Fault(
        "exact fit refused",
        BlockManager,
        "_quote",
        "num_revived <= self.pool.num_free",
        "num_revived < self.pool.num_free",
        "admission and allocation count differently (sglang#5081)",
    ),
    Fault(
        "hit evicted for its successor",
        BlockManager,
        "admit",
        "for block in quote.hits:",
        "[self.pool.release(b) for b in self.pool.take(quote.num_new_blocks)]\n        for block in quote.hits:",
        "blocks are taken before the hits are held (vllm#37076)",
    ),
    Fault(
        "nothing left to compute",
        BlockManager,
        "_find_prefix",
        "(len(seq) - 1) // self.block_size",
        "len(seq) // self.block_size",
        "a prompt of whole blocks, all cached, has no token to compute (vllm#11186, nano-vllm#114)",
    ),
    Fault(
        "chain restarts after a hit",
        BlockManager,
        "_hash",
        "hashes[-1] if hashes else",
        "hashes[-1] if len(hashes) > seq._num_cached // self.block_size else",
        "hashing starts from the root again behind a cached prefix (vllm#12415)",
    ),
    Fault(
        "lifetime not declared",
        BlockManager,
        "_quote",
        "if self._blocks_for(lifetime) > self.num_blocks:",
        "if self._blocks_for(len(seq)) > self.num_blocks:",
        "the only running sequence needs one block more than there are (nano-vllm#274)",
    ),
    Fault(
        "one block at most per reserve",
        BlockManager,
        "reserve",
        "self.pool.take(num_new_blocks)",
        "self.pool.take(1)",
        "several tokens at once cross more than one boundary (sglang#7130)",
    ),
    Fault(
        "boundary by remainder",
        BlockManager,
        "reserve",
        "self._blocks_for(num_reserved) - len(seq._table)",
        "int(num_reserved % self.block_size == 1)",
        "block size 1 never has remainder 1 (nano-vllm)",
    ),
    Fault(
        "refused reserve keeps its slots",
        BlockManager,
        "reserve",
        "return False",
        "seq._num_reserved = num_reserved; return False",
        "a refusal is not atomic (nano-vllm)",
    ),
    Fault(
        "duplicate freed, table kept",
        BlockManager,
        "_publish",
        "seq._table[i] = keeper",
        "pass",
        "the freed duplicate is still named by the table (mini-sglang#142)",
    ),
    Fault(
        "live duplicate lost",
        BlockManager,
        "_publish",
        "node.blocks.append(block)",
        "return None",
        "the newer copy can't be found when the older is evicted (nano-vllm#219)",
    ),
    Fault(
        "head released before tail",
        BlockManager,
        "release",
        "reversed(seq._table)",
        "seq._table",
        "a parent is evicted before its child",
    ),
    Fault(
        "second release accepted",
        BlockManager,
        "release",
        "self._admitted_here(seq)\n    del self._admitted[seq]",
        "self._admitted.pop(seq, None)",
        "an abort and a late output both free (vllm#33377)",
    ),
    Fault(
        "release forgets a reference",
        BlockPool,
        "release",
        "self._refs[block] -= 1",
        "self._refs[block] = 0",
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
        "_take",
        "if not self._empty:",
        "if len(self._cached):",
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
        "extended by half",
        Sequence,
        "extend",
        "self._tokens.extend(_token_array(tokens))",
        "[self._tokens.extend(_token_array([token])) for token in tokens]",
        "a bad token is refused after good ones were added",
    ),
)
