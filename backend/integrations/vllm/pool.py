"""Our block pool in the place of vLLM's, below vLLM's own KV-cache manager and its hybrid groups.

vLLM finds content by its own hashes, by group and below the size of a block, so that stays vLLM's. What is ours is the
state of every block: one owner count, one free list, and transitions that are checked. vLLM's pool counts below zero
without a word, and a block that is freed twice is then handed out twice; here that is refused, and nothing has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from kvproof.allocator import BlockPool as OurPool
from kvproof.allocator import IllegalTransition, InvariantViolation
from kvproof.backend.integrations.vllm import seam
from kvproof.backend.integrations.vllm.errors import UnsupportedFeature
from kvproof.backend.integrations.vllm.seam import Scheduler

FINDABLE = 1
"""The content, for our pool, of every block that vLLM can find by a hash."""

READ_UNTIL_REUSED = 2
"""That of blocks that nothing finds and somebody reads: it keeps them among the last to be handed out."""


class Block(seam.KVCacheBlock):  # type: ignore[misc]  # vLLM has no types here
    """A block as vLLM sees it. Its owners are counted by our pool, which also knows whether it has content."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, block_id: int, pool: BlockPool) -> None:
        self.block_id = block_id
        self.pool = pool
        self.is_null = block_id == 0
        self.prev_free_block = self.next_free_block = None
        self._block_hash = self._block_hash_num_tokens = None

    @property
    def ref_cnt(self) -> int:
        return self.pool.null_refs if self.is_null else self.pool.states.refs(self.block_id)

    @ref_cnt.setter
    def ref_cnt(self, count: int) -> None:
        if self.is_null:
            self.pool.null_refs = count
            return
        states, more = self.pool.states, count - self.ref_cnt
        if count < 0:
            raise IllegalTransition(f"block {self.block_id} can't have {count} references")
        states.share_all([self.block_id] * more)
        states.release_all([self.block_id] * -more)

    def set_block_hash(self, *args: Any, **kwargs: Any) -> None:
        super().set_block_hash(*args, **kwargs)
        self.pool.states.publish(self.block_id, FINDABLE)

    def reset_hash(self) -> None:
        super().reset_hash()
        if not self.is_null and self.pool.states.content(self.block_id) is not None:
            self.pool.states.withdraw(self.block_id)


class FreeBlocks:
    """vLLM's free queue, for those who look."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def num_free_blocks(self) -> int:
        return self._pool.states.num_free

    def get_all_free_blocks(self) -> list[Block]:
        """In the order in which they will be handed out."""
        empty, cached = self._pool.states.free_lists()
        return [self._pool.blocks[block] for block in empty + cached]


class BlockPool(seam.BlockPool):  # type: ignore[misc]
    """vLLM's `BlockPool` on ours, `states`. Block 0 is the null block, as there."""

    def __init__(self, num_gpu_blocks: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(1, *args, **kwargs)  # its own blocks are not used
        self.num_gpu_blocks = num_gpu_blocks
        self.states = OurPool(num_gpu_blocks, num_reserved=1)
        self.null_refs = 0  # vLLM counts them, and minds them nowhere
        self.blocks = [Block(block, self) for block in range(num_gpu_blocks)]
        self.null_block = self.blocks[0]
        self.free_block_queue = FreeBlocks(self)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Blocks with one reference each, without content. Raises ValueError when there are not as many."""
        if not 0 <= num_blocks <= self.get_num_free_blocks():
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        blocks = [self.blocks[block] for block in self.states.take(num_blocks)]
        if self._reuse_watchers:
            self._notify_reuse(blocks)
        for block in blocks:
            if self.enable_caching:
                self._maybe_evict_cached_block(block)
            if self.metrics_collector:
                self.metrics_collector.on_block_allocated(block)
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """One reference more on each. Raises `IllegalTransition` for a block that is free."""
        for block in blocks:
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """One reference less on each; the first of them is handed out first, those without content before all others.

        Raises `IllegalTransition`, and changes nothing, when a block is given back more often than it is referenced.
        """
        given = list(ordered_blocks)
        own = [block for block in given if block.pool is self]
        self._require_references(own)
        # What is handed out first comes last onto the stack of blocks without content.
        self.states.release_all(block.block_id for block in reversed(own) if self._is_empty(block))
        self.states.release_all(block.block_id for block in own if not block.is_null and not self._is_empty(block))
        others: dict[Any, list[Any]] = {}
        for block in given:
            if block.is_null or block.pool is None:  # nobody's
                block.ref_cnt -= 1
            elif block.pool is not self:
                others.setdefault(block.pool, []).append(block)
        for pool, blocks in others.items():
            pool.free_blocks(blocks)

    def unpin_blocks(self, blocks: Iterable[Block], on_reuse: Callable[[Block], None]) -> None:
        """Give up references to blocks that stay readable until `on_reuse` is called: they are reused last."""
        given = list(blocks)
        self._require_references(given)
        for block in given:
            self._reuse_watchers[block.block_id] = on_reuse
            if block.ref_cnt == 1 and self._is_empty(block):
                self.states.publish(block.block_id, READ_UNTIL_REUSED)
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return self.states.num_free

    def check(self) -> None:
        """Raise `InvariantViolation` unless a block is findable just while our pool holds content for it. O(pool)."""
        empty, cached = self.states.free_lists()
        unreferenced = [block.block_id for block in self.blocks[1:] if block.ref_cnt == 0]
        if sorted(empty + cached) != unreferenced:
            raise InvariantViolation("I2", f"free are {sorted(empty + cached)}, unreferenced {unreferenced}")
        for block in self.blocks[1:]:
            content, key = self.states.content(block.block_id), block.block_hash
            if (content == FINDABLE) != (key is not None):
                raise InvariantViolation("I3", f"block {block.block_id} has content {content}, and the hash {key}")
            if key is not None and not self.cached_block_hash_to_block.contain(key, block.block_id):
                raise InvariantViolation("I3", f"block {block.block_id} can't be found by its hash")

    def _is_empty(self, block: Block) -> bool:
        return not block.is_null and self.states.content(block.block_id) is None

    def _require_references(self, blocks: list[Block]) -> None:
        for block, times in Counter(block for block in blocks if not block.is_null).items():
            if times > block.ref_cnt:
                raise IllegalTransition(
                    f"block {block.block_id} is given back {times} times, it has {block.ref_cnt} references"
                )


def use_pool(scheduler: Scheduler) -> BlockPool:
    """Put our pool below a new scheduler's KV-cache manager. Raises `UnsupportedFeature` where that is too late."""
    manager, coordinator = scheduler.kv_cache_manager, scheduler.kv_cache_manager.coordinator
    old = manager.block_pool
    if scheduler.connector is not None:
        raise UnsupportedFeature("KV connectors, which keep the pool they were given", "use vLLM's scheduler")
    if any(group.block_pool is not old for group in coordinator.single_type_managers):
        raise UnsupportedFeature("a group with a pool of its own (HiSparse)", "use vLLM's scheduler")
    if old.get_num_free_blocks() != old.num_gpu_blocks - 1:
        raise UnsupportedFeature("blocks that are taken at start (attention sinks)", "use vLLM's scheduler")
    pool = BlockPool(
        old.num_gpu_blocks,
        old.enable_caching,
        old.hash_block_size,
        old.enable_kv_cache_events,
        old.metrics_collector,
        old.medium,
    )
    manager.block_pool = coordinator.block_pool = pool
    for group in coordinator.single_type_managers:
        group.block_pool, group._null_block = pool, pool.null_block
    return pool
