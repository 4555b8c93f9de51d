"""The prefix cache: computed blocks become findable, and computed prefixes are found again."""

from __future__ import annotations

from array import array

from kvproof.allocator import loops
from kvproof.allocator.errors import InvalidArgument, shown
from kvproof.allocator.events import EventLog
from kvproof.allocator.hashing import HashBlock
from kvproof.allocator.index import NONE, Node, PrefixIndex
from kvproof.allocator.policy import LRU, EvictionPolicy
from kvproof.allocator.pool import BlockPool
from kvproof.allocator.sequence import TOKEN_BYTES, Sequence
from kvproof.allocator.stats import Counters


class PrefixCache:
    """Keeps pool and index in agreement: a block has content exactly while the index can find it by that content."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_reserved: int,
        policy: EvictionPolicy | None,
        hash_block: HashBlock,
        events: bool,
    ) -> None:
        self.pool = BlockPool(
            num_blocks, num_reserved=num_reserved, policy=policy, on_evict=self._evicted, take_run=self._take_run
        )
        self.events = EventLog(block_size) if events else None
        self.index = PrefixIndex(TOKEN_BYTES * block_size, self.events)
        self.counters = Counters()
        self.block_size = block_size
        self.hash_block = hash_block

    def content(self, block: int) -> Node | None:
        """What `block` is findable by."""
        node = self.pool.content(block)
        return None if node is None else self.index.node(node)

    def find(self, seq: Sequence, limit: int) -> list[int]:
        """The nodes of the sequence's longest findable prefix of at most `limit` blocks."""
        nodes: list[int] = []
        node = self.index.root(seq.namespace)
        while node and len(nodes) < limit:
            i = len(nodes)
            # What is hashed ahead is needed at the latest when it is published.
            hashes = self._hashes(seq, i + 1 if i < len(seq._hashes) else min(2 * i + 1, limit))
            if loops.compiled is not None and not seq.media:
                known = min(len(hashes), limit)
                nodes += loops.compiled.find_run(self.index, node, seq, i, known, self.block_size)
                if len(nodes) < known:
                    break
                node = nodes[-1]
                continue
            node = self.index.find(node, seq.key(i, self.block_size), hashes[i])
            if node:
                nodes.append(node)
        return nodes

    def carrier(self, node: int) -> int:
        """One of the blocks that carry a node's content, a referenced one if possible: it costs no free block."""
        blocks = self.index.blocks(node)
        return blocks[0] if len(blocks) == 1 else max(blocks, key=lambda block: self.pool.refs(block) > 0)

    def prepare(self, seq: Sequence, first: int, stop: int) -> None:
        """Make ready for `publish` with the same arguments. What can fail, such as a hash function, fails here."""
        self.index.make_room(stop - first + 1)  # one may be a root
        self._hashes(seq, stop)

    def publish(self, seq: Sequence, first: int, stop: int) -> dict[int, int]:
        """Make the sequence's computed blocks `first` to `stop`, for which `prepare` was called, findable.

        Returns those entries whose content is findable already, with its node: nothing has happened to their blocks.
        None are published, and none returned, when their prefix can't be found: then neither could they; nor when
        identities have run out, which only `clear` ends.
        """
        duplicates: dict[int, int] = {}
        if self.index.numbers_left <= stop - first:  # one may be a root's
            return duplicates
        parent = self._node_before(seq, first)
        if not parent:
            return duplicates
        done = first
        if loops.compiled is not None and self.events is None and not seq.media:
            done, parent = loops.compiled.publish_run(self.index, self.pool, parent, seq, first, stop, duplicates)
        for i in range(done, stop):
            key, hash = seq.key(i, self.block_size), seq._hashes[i]
            node = self.index.find(parent, key, hash)
            if node:
                duplicates[i] = node
            else:
                block = seq._table[i]
                node = self.index.add(block, parent, key, hash)
                self.pool.publish(block, node)
            parent = node
        self.counters.published += stop - first - len(duplicates)
        return duplicates

    def publish_duplicate(self, block: int, node: int) -> None:
        """Make `block` one more carrier of content that is findable already."""
        self.index.carry(block, node)
        self.pool.publish(block, node)
        self.counters.published += 1

    def withdraw(self, block: int) -> None:
        """`block` is about to be written: its content, if it has any, can't be found any more."""
        node = self.pool.content(block)
        if node is not None:
            self.pool.withdraw(block)
            self._forget(block, node)

    def clear(self) -> None:
        """Make nothing findable. No block may be referenced."""
        counted = self.counters.evictions, self.counters.residency
        if self.events is not None:
            self.events.clearing = True
        try:
            self.pool.evict_all()
            self.index.restart()
        finally:
            self.counters.evictions, self.counters.residency = counted  # not to make room
            if self.events is not None:
                self.events.clearing = False
        if self.events is not None:
            self.events.cleared()

    def _node_before(self, seq: Sequence, i: int) -> int:
        """The node of the block before the sequence's block `i`, or `NONE`."""
        if i == 0:
            return self.index.plant(seq.namespace)
        before = seq._table[i - 1]
        node = self.pool.content(before) if before >= self.pool.num_reserved else None
        if node is not None:
            return node
        # The block before is not this sequence's any more (a window moved past it). Its content may live on elsewhere.
        nodes = self.find(seq, i)
        return nodes[-1] if len(nodes) == i else NONE

    def _evicted(self, block: int, node: int) -> None:
        for lost in (block, *self._forget(block, node)):
            self.counters.evictions += 1
            self.counters.residency += self.pool.age(lost)

    def _take_run(self, n: object) -> list[int]:
        """What `BlockPool` calls by this name."""
        if loops.compiled is None or self.events is not None:
            return []
        taken: list[int] = loops.compiled.take_run(self.pool, self.index, self.counters, LRU, n)
        return taken

    def _forget(self, block: int, node: int) -> list[int]:
        """`block` has lost its content. Returns the blocks that lost theirs with it."""
        orphans = self.index.remove(block, node)
        for orphan in orphans:
            self.pool.withdraw(orphan)
        return orphans

    def _hashes(self, seq: Sequence, stop: int) -> array[int]:
        """The chained hashes of the sequence's blocks, at least up to `stop`, each computed once in its life."""
        hashes = seq._hashes
        if loops.compiled is not None and hashes and not seq.media:
            loops.compiled.hash_run(self.hash_block, seq, stop, self.block_size)
        for i in range(len(hashes), stop):
            parent_hash = hashes[-1] if hashes else seq.namespace.root_hash(self.hash_block)
            hash = self.hash_block(seq.key(i, self.block_size), parent_hash)
            try:
                hashes.append(hash)
            except (OverflowError, TypeError):
                raise InvalidArgument(
                    f"hash_block returned {shown(hash)}, must be an integer from 0 to 2**64 - 1"
                ) from None
        return hashes
