"""Sequences on blocks: admission with prefix-cache hits, slots before writing, publication after it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from kvproof.allocator.audit import audit
from kvproof.allocator.errors import InvalidArgument, SequenceStateError, require_int
from kvproof.allocator.hashing import SHARED, HashBlock, Namespace, xxh3_chained
from kvproof.allocator.index import Node, PrefixIndex
from kvproof.allocator.policy import EvictionPolicy
from kvproof.allocator.pool import BlockPool
from kvproof.allocator.sequence import MAX_LENGTH, Sequence


class Admission(StrEnum):
    """NOW: it fits. LATER: it will fit when others have finished. NEVER: not even alone, up to its `max_length`."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


class Merge(NamedTuple):
    """Entry `entry` of a block table named `old`, a duplicate that is free again, and now names `new`."""

    entry: int
    old: int
    new: int


class _Quote(NamedTuple):
    """What admitting a sequence would take, the one computation behind both the question and the deed."""

    answer: Admission
    hits: list[int]
    num_reserved: int
    num_new_blocks: int


class BlockManager:
    """Gives sequences the blocks their KV is written to, and finds computed prefixes again.

    A sequence's life, each operation atomic (refused means unchanged):

        seq = manager.sequence(prompt, max_length=...)
        manager.admit(seq)      takes cached blocks and reserves slots for the rest of its tokens
        manager.commit(seq, n)  the KV of n more tokens is written; blocks that are full now become findable
        seq.append(token)       a token was sampled
        manager.reserve(seq)    a slot for it; False when there is no block: release a sequence and try again
        manager.release(seq)    finished, aborted or preempted

    Nothing is findable before its KV is committed, and every hit is verified token by token, so the hash decides
    about speed only. At least one token of a sequence is always left to compute, since someone wants its logits.

    num_blocks        blocks in the pool, at least 1
    block_size        token slots in a block, at least 1
    prefix_caching    False: nothing is hashed, published or found
    merge_duplicates  True: a block that turns out to hold what a published one holds is given back at commit and its
                      table entry rewritten (see `commit`); False: tables only ever grow, and both copies are findable
    policy            which cached block is evicted first, LRU by default
    hash_block        the prefix hash, see `HashBlock`
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        merge_duplicates: bool = True,
        policy: EvictionPolicy | None = None,
        hash_block: HashBlock = xxh3_chained,
    ) -> None:
        require_int("block_size", block_size, 1, MAX_LENGTH)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.merge_duplicates = merge_duplicates
        self.pool: BlockPool[Node] = BlockPool(num_blocks, policy=policy, on_evict=self._forget)
        self.index = PrefixIndex()
        self._hash_block = hash_block
        self._admitted: dict[Sequence, None] = {}  # a set that keeps its order

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody references, cached ones included."""
        return self.pool.num_free

    @property
    def num_used(self) -> int:
        """Blocks that some sequence references; 0 when idle."""
        return self.pool.num_blocks - self.pool.num_free

    @property
    def sequences(self) -> Iterator[Sequence]:
        """The admitted sequences, in order of admission."""
        return iter(self._admitted)

    def sequence(
        self, tokens: Iterable[int], *, max_length: int | None = None, namespace: Namespace = SHARED
    ) -> Sequence:
        """A sequence that starts with `tokens` (at least one; copied) and takes no block yet.

        `max_length` declares how many tokens' KV it will ever hold. With it, `admit` refuses from the start what could
        not finish even alone. Without it, a sequence that outgrows the pool finds out at `reserve`.
        """
        return Sequence(self, tokens, max_length, namespace)

    def match(self, seq: Sequence) -> int:
        """How many of the sequence's tokens are in the prefix cache now. Changes nothing, promises nothing."""
        self._own(seq)
        return len(self._find_prefix(seq)) * self.block_size

    def can_admit(self, seq: Sequence, limit: int | None = None) -> Admission:
        """What `admit` would answer now. Changes nothing."""
        return self._quote(seq, limit).answer

    def admit(self, seq: Sequence, limit: int | None = None) -> Admission:
        """Take the blocks of the cached prefix, and slots for at most `limit` tokens after it (default: all known).

        Only `Admission.NOW` changes anything; `seq.num_cached` then says how much was found. Raises
        `SequenceStateError` when the sequence is admitted already.
        """
        quote = self._quote(seq, limit)
        if quote.answer is Admission.NOW:
            # Shared first: a hit must not be evicted to make room for its own successor.
            for block in quote.hits:
                self.pool.share(block)
            seq._table = array("i", quote.hits + self.pool.take(quote.num_new_blocks))
            seq._num_cached = seq._num_computed = len(quote.hits) * self.block_size
            seq._num_reserved = quote.num_reserved
            self._admitted[seq] = None
        return quote.answer

    def reserve(self, seq: Sequence, n: int = 1) -> bool:
        """Slots for `n` more tokens; False, and no change, when the pool has too few free blocks.

        Raises `InvalidArgument` when `n` is negative or reaches past the sequence's `max_length`.
        """
        self._admitted_here(seq)
        require_int("n", n, 0, (MAX_LENGTH if seq.max_length is None else seq.max_length) - seq._num_reserved)
        num_reserved = seq._num_reserved + n
        num_new_blocks = self._blocks_for(num_reserved) - len(seq._table)
        if num_new_blocks > self.pool.num_free:
            return False
        if num_new_blocks:
            # A new array: one whose buffer a reader holds can't grow, and would refuse after the blocks are taken.
            seq._table = seq._table + array("i", self.pool.take(num_new_blocks))
        seq._num_reserved = num_reserved
        return True

    def commit(self, seq: Sequence, n: int = 1) -> list[Merge]:
        """The KV of the next `n` tokens is written. Blocks that are full now are published.

        Returns the table entries that now name another block of the same content (`merge_duplicates`), usually none.
        Raises `InvalidArgument` when `n` is negative or reaches past the known or the reserved tokens.
        """
        self._admitted_here(seq)
        require_int("n", n, 0, min(len(seq), seq._num_reserved) - seq._num_computed)
        num_computed = seq._num_computed + n
        first, stop = seq._num_computed // self.block_size, num_computed // self.block_size
        seq._num_computed = num_computed
        merges = []
        if self.prefix_caching:
            for i in range(first, stop):
                merge = self._publish(seq, i)
                if merge is not None:
                    merges.append(merge)
        return merges

    def release(self, seq: Sequence) -> None:
        """Give all the sequence's blocks back; what is published stays findable until it is evicted.

        Raises `SequenceStateError` when the sequence is not admitted, a second release among them.
        """
        self._admitted_here(seq)
        del self._admitted[seq]
        # Tail first, so that under LRU a parent outlives its children.
        for block in reversed(seq._table):
            self.pool.release(block)
        seq._table = array("i")
        seq._num_computed = seq._num_reserved = 0

    def check(self) -> None:
        """Verify every invariant that can be seen from here; raises `InvariantViolation`. O(pool), for tests."""
        audit(self)

    def _quote(self, seq: Sequence, limit: int | None) -> _Quote:
        self._own(seq)
        if seq in self._admitted:
            raise SequenceStateError(f"{seq} is admitted already")
        if limit is not None:
            require_int("limit", limit, 1, MAX_LENGTH)
        lifetime = len(seq) if seq.max_length is None else seq.max_length
        if len(seq) > lifetime:
            raise InvalidArgument(f"{seq} has outgrown its max_length {lifetime}")
        if self._blocks_for(lifetime) > self.num_blocks:
            return _Quote(Admission.NEVER, [], 0, 0)
        hits = [self._carrier(node) for node in self._find_prefix(seq)]
        num_cached = len(hits) * self.block_size
        num_reserved = len(seq) if limit is None else min(len(seq), num_cached + limit)
        num_new_blocks = self._blocks_for(num_reserved) - len(hits)
        # A hit that nobody references is on the free list: taking it leaves one block less for the rest.
        num_revived = sum(1 for block in hits if self.pool.refs(block) == 0)
        fits = num_new_blocks + num_revived <= self.pool.num_free
        return _Quote(Admission.NOW if fits else Admission.LATER, hits, num_reserved, num_new_blocks)

    def _find_prefix(self, seq: Sequence) -> list[Node]:
        """The nodes of the sequence's longest cached prefix, short of its last token."""
        nodes: list[Node] = []
        if not self.prefix_caching:
            return nodes
        parent = self.index.root(seq.namespace)
        for i in range((len(seq) - 1) // self.block_size):
            node = self.index.find(parent, self._chunk(seq, i), self._hash(seq, i))
            if node is None:
                break
            nodes.append(node)
            parent = node
        return nodes

    def _carrier(self, node: Node) -> int:
        """One of the blocks that carry a node's content, a referenced one if possible: it costs no free block."""
        return max(node.blocks, key=lambda block: self.pool.refs(block) > 0)

    def _publish(self, seq: Sequence, i: int) -> Merge | None:
        block = seq._table[i]
        parent = self.pool.content(seq._table[i - 1]) if i else self.index.root(seq.namespace)
        if parent is None:
            return None  # its prefix was withdrawn: nothing could reach it
        tokens, hash = self._chunk(seq, i), self._hash(seq, i)
        node = self.index.find(parent, tokens, hash)
        if node is None:
            self.pool.publish(block, self.index.add(block, parent, tokens, hash))
        elif self.merge_duplicates:
            keeper = self._carrier(node)
            self.pool.share(keeper)
            self.pool.release(block)
            seq._table[i] = keeper
            return Merge(i, block, keeper)
        else:
            node.blocks.append(block)
            self.pool.publish(block, node)
        return None

    def _forget(self, block: int, node: Node) -> None:
        for orphan in self.index.remove(block, node):
            self.pool.withdraw(orphan)

    def _chunk(self, seq: Sequence, i: int) -> bytes:
        return seq._tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()

    def _hash(self, seq: Sequence, i: int) -> int:
        """The chained hash of the sequence's block `i`, computed once in the sequence's life."""
        hashes = seq._hashes
        while len(hashes) <= i:
            parent_hash = hashes[-1] if hashes else seq.namespace.root_hash(self._hash_block)
            hashes.append(self._hash_block(self._chunk(seq, len(hashes)), parent_hash))
        return hashes[i]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _own(self, seq: Sequence) -> None:
        if seq._manager is not self:
            raise SequenceStateError(f"{seq} belongs to another manager")

    def _admitted_here(self, seq: Sequence) -> None:
        self._own(seq)
        if seq not in self._admitted:
            raise SequenceStateError(f"{seq} is not admitted")
