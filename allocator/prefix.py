"""The prefix cache: computed blocks become findable, and computed prefixes are found again."""

from __future__ import annotations

from kvproof.allocator.events import EventLog
from kvproof.allocator.hashing import HashBlock
from kvproof.allocator.index import Node, PrefixIndex
from kvproof.allocator.policy import EvictionPolicy
from kvproof.allocator.pool import BlockPool
from kvproof.allocator.sequence import Sequence
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
        self.pool: BlockPool[Node] = BlockPool(
            num_blocks, num_reserved=num_reserved, policy=policy, on_evict=self._evicted
        )
        self.events = EventLog(block_size) if events else None
        self.index = PrefixIndex(self.events)
        self.counters = Counters()
        self.block_size = block_size
        self._hash_block = hash_block

    def find(self, seq: Sequence, limit: int) -> list[Node]:
        """The nodes of the sequence's longest findable prefix of at most `limit` blocks."""
        nodes: list[Node] = []
        parent = self.index.root(seq.namespace)
        for i in range(limit):
            node = self.index.find(parent, seq.key(i, self.block_size), self._hash(seq, i))
            if node is None:
                break
            nodes.append(node)
            parent = node
        return nodes

    def carrier(self, node: Node) -> int:
        """One of the blocks that carry a node's content, a referenced one if possible: it costs no free block."""
        return max(node.blocks, key=lambda block: self.pool.refs(block) > 0)

    def prepare(self, seq: Sequence, num_blocks: int) -> None:
        """Hash the sequence's first blocks, so that a hash function that fails does so before anything has changed."""
        if num_blocks:
            self._hash(seq, num_blocks - 1)

    def publish(self, seq: Sequence, i: int) -> Node | None:
        """Make the sequence's computed block `i` findable, unless equal content is: then its node, unchanged."""
        parent = self._parent(seq, i)
        if parent is None:
            return None  # its prefix can't be found, so neither could it
        key, hash = seq.key(i, self.block_size), self._hash(seq, i)
        node = self.index.find(parent, key, hash)
        if node is None:
            block = seq.block_table[i]
            self.pool.publish(block, self.index.add(block, parent, key, hash))
            self.counters.published += 1
        return node

    def publish_duplicate(self, block: int, node: Node) -> None:
        """Make `block` one more carrier of content that is findable already."""
        node.blocks.append(block)
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
        if self.events is not None:
            self.events.cleared()
        counted = self.counters.evictions, self.counters.residency
        self.pool.evict_all()
        self.counters.evictions, self.counters.residency = counted  # not to make room

    def _parent(self, seq: Sequence, i: int) -> Node | None:
        if i == 0:
            return self.index.root(seq.namespace)
        before = seq.block_table[i - 1]
        node = self.pool.content(before) if before >= self.pool.num_reserved else None
        if node is not None:
            return node
        # The block before is not this sequence's any more (a window moved past it). Its content may live on elsewhere.
        nodes = self.find(seq, i)
        return nodes[-1] if len(nodes) == i else None

    def _evicted(self, block: int, node: Node) -> None:
        for lost in (block, *self._forget(block, node)):
            self.counters.evictions += 1
            self.counters.residency += self.pool.age(lost)

    def _forget(self, block: int, node: Node) -> list[int]:
        """`block` has lost its content. Returns the blocks that lost theirs with it."""
        orphans = self.index.remove(block, node)
        for orphan in orphans:
            self.pool.withdraw(orphan)
        return orphans

    def _hash(self, seq: Sequence, i: int) -> int:
        """The chained hash of the sequence's block `i`, computed once in the sequence's life."""
        hashes = seq._hashes
        while len(hashes) <= i:
            parent_hash = hashes[-1] if hashes else seq.namespace.root_hash(self._hash_block)
            hashes.append(self._hash_block(seq.key(len(hashes), self.block_size), parent_hash))
        return hashes[i]
