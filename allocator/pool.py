"""Physical blocks: reference counts, content marks and the free list."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from enum import StrEnum

from kvproof.allocator import loops
from kvproof.allocator.errors import IllegalTransition, InvalidArgument, require_int, shown
from kvproof.allocator.policy import LRU, EvictionPolicy

MAX_BLOCKS = 2**28  # block ids are int32 in every block table, and the index has 8 words for each


class BlockState(StrEnum):
    """FREE and ACTIVE blocks hold nothing findable, PUBLISHED and CACHED ones do; FREE and CACHED are unreferenced.

    A RESERVED block takes no part: it is never handed out and has no transition.
    """

    FREE = "free"
    ACTIVE = "active"
    PUBLISHED = "published"
    CACHED = "cached"
    RESERVED = "reserved"


class BlockPool:
    """Blocks 0 to `num_blocks - 1`, each in exactly one `BlockState`.

    A block's reference count and its content are the only state; `BlockState` and the free list follow from them.
    The transitions are methods, and one that a block's state does not have raises `IllegalTransition`:

        take      FREE -> ACTIVE, or CACHED -> ACTIVE by evicting
        share     one reference more; CACHED -> PUBLISHED
        release   one reference less; at zero ACTIVE -> FREE, PUBLISHED -> CACHED
        publish   ACTIVE -> PUBLISHED
        withdraw  PUBLISHED -> ACTIVE, CACHED -> FREE

    A block's content is a number, not 0, by which its owner finds it; the pool only carries it. All that is lost to
    make room leaves through `on_evict(block, content)`, called when the block has already lost it. An owner who can do
    both for many blocks at once gives `take_run(n)` too, which takes blocks as `take` does and returns them: `n` at
    most, none when there are not as many, and perhaps fewer, for it leaves alone what could fail.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        num_reserved: int = 0,
        policy: EvictionPolicy | None = None,
        on_evict: Callable[[int, int], None] | None = None,
        take_run: Callable[[object], list[int]] | None = None,
    ) -> None:
        require_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
        require_int("num_reserved", num_reserved, 0, num_blocks - 1)
        self.num_blocks = num_blocks
        self.num_reserved = num_reserved
        # Arrays of machine integers: 24 bytes a block.
        self._refs = array("i", bytes(4 * num_blocks))
        self._content = array("Q", bytes(8 * num_blocks))  # 0 is none
        self._published = array("q", bytes(8 * num_blocks))  # when it got its content
        self.clock = 0  # blocks taken so far
        # Blocks without content, a stack: the last released is the likeliest to be in a processor's cache.
        self._empty = array("i", range(num_blocks - 1, num_reserved - 1, -1))
        self._cached = policy if policy is not None else LRU()
        if len(self._cached):
            raise InvalidArgument(
                f"the eviction policy has {len(self._cached)} blocks already: each pool needs its own"
            )
        self._on_evict = on_evict
        self._take_run = take_run

    @property
    def num_free(self) -> int:
        """Blocks that `take` could hand out: FREE and CACHED ones."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def free_lists(self) -> tuple[list[int], list[int]]:
        """The FREE blocks and the CACHED ones, each in the order in which they will be taken."""
        return self._empty.tolist()[::-1], list(self._cached)

    def refs(self, block: int) -> int:
        """References held on `block`."""
        if not self.num_reserved <= block < self.num_blocks:  # a negative index would find the last block
            what = "block {} is reserved" if 0 <= block < self.num_reserved else "there is no block {}"
            usable = f"{self.num_reserved} to {self.num_blocks - 1}"
            raise IllegalTransition(f"{what.format(shown(block))}, the pool has {usable}")
        return self._refs[block]

    def content(self, block: int) -> int | None:
        """What `block` is findable by, or None."""
        if not self.num_reserved <= block < self.num_blocks:
            self.refs(block)  # there is no such block
        return self._content[block] or None

    def age(self, block: int) -> int:
        """How many blocks were taken since `block` last got content."""
        self.refs(block)  # there is such a block
        return self.clock - self._published[block]

    def state(self, block: int) -> BlockState:
        if 0 <= block < self.num_reserved:
            return BlockState.RESERVED
        findable = self.content(block) is not None
        if self._refs[block]:
            return BlockState.PUBLISHED if findable else BlockState.ACTIVE
        return BlockState.CACHED if findable else BlockState.FREE

    def take(self, n: int = 1) -> list[int]:
        """Reference `n` unreferenced blocks, contentless ones first. Ask `num_free` before: fewer is an error here."""
        taken = [] if self._take_run is None else self._take_run(n)
        if len(taken) == n and type(n) is int:
            return taken
        require_int("n", n, 0, MAX_BLOCKS)
        if n > len(taken) + self.num_free:
            raise IllegalTransition(f"cannot take {n} blocks, {self.num_free} are free")
        clock = self.clock - len(taken)
        try:
            while len(taken) < n:
                self.clock += 1
                if not self._empty:
                    self._evict()
                block = self._empty.pop()
                self._refs[block] = 1
                taken.append(block)
        except BaseException:  # a policy that fails: what it has evicted stays so, nothing else has happened
            for block in reversed(taken):
                self._refs[block] = 0
                self._empty.append(block)
            self.clock = clock
            raise
        return taken

    def _evict(self) -> None:
        block = self._cached.pop()
        content = self.content(block)
        if content is None or self._refs[block]:
            raise IllegalTransition(f"the eviction policy chose block {block}, which is {self.state(block)}")
        self._content[block] = 0
        self._empty.append(block)
        if self._on_evict is not None:
            self._on_evict(block, content)

    def evict_all(self) -> None:
        """Every CACHED block becomes FREE."""
        while len(self._cached):
            self._evict()

    def share(self, block: int) -> None:
        """One reference more on a block that has an owner or content."""
        if self.refs(block) == 0:
            if not self._content[block]:
                raise IllegalTransition(f"block {block} is free: there is nothing to share")
            self._cached.remove(block)
        self._refs[block] += 1

    def share_all(self, blocks: Iterable[int]) -> None:
        """`share` each of them, up to the first that can't be."""
        blocks = list(blocks)
        done = 0 if loops.compiled is None else loops.compiled.share_run(self, LRU, blocks)
        for block in blocks[done:]:
            self.share(block)

    def release_all(self, blocks: Iterable[int]) -> None:
        """`release` each of them, in this order, up to the first that can't be."""
        blocks = list(blocks)
        done = 0 if loops.compiled is None else loops.compiled.release_run(self, LRU, blocks)
        for block in blocks[done:]:
            self.release(block)

    def release(self, block: int) -> None:
        """One reference less; the last one returns the block to the free list, with its content if it has any."""
        refs = self.refs(block)
        if refs == 0:
            raise IllegalTransition(f"block {block} is {self.state(block)}: there is no reference to release")
        if refs == 1:  # on the list first: should that fail, nothing has happened
            if not self._content[block]:
                self._empty.append(block)
            else:
                self._cached.insert(block, self._published[block])
        self._refs[block] = refs - 1

    def publish(self, block: int, content: int) -> None:
        """Make a referenced block findable by `content`, from 1 to 2**64 - 1."""
        require_int("content", content, 1, 2**64 - 1)
        if self.refs(block) == 0 or self._content[block]:
            raise IllegalTransition(f"block {block} is {self.state(block)}: only an active block can be published")
        self._content[block] = content
        self._published[block] = self.clock

    def withdraw(self, block: int) -> None:
        """Take a block's content away, whoever references it."""
        refs = self.refs(block)
        if not self._content[block]:
            raise IllegalTransition(f"block {block} is {self.state(block)}: it has no content to withdraw")
        self._content[block] = 0
        if refs == 0:
            self._cached.remove(block)
            self._empty.append(block)
