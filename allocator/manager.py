"""Sequences on blocks: admission with prefix-cache hits, slots before writing, publication after it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from typing import NamedTuple

from kvproof.allocator.audit import audit
from kvproof.allocator.batch import DecodeBatch
from kvproof.allocator.errors import InvalidArgument, SequenceStateError, require_int, shown
from kvproof.allocator.events import Event
from kvproof.allocator.flight import Flights
from kvproof.allocator.guard import Guard, watch
from kvproof.allocator.hashing import SHARED, HashBlock, Namespace, xxh3_chained
from kvproof.allocator.index import Node
from kvproof.allocator.media import MediaItem, checked_media, clip_media
from kvproof.allocator.policy import EvictionPolicy
from kvproof.allocator.prefix import PrefixCache
from kvproof.allocator.sequence import MAX_LENGTH, Sequence
from kvproof.allocator.snapshot import snapshot
from kvproof.allocator.stats import Stats

NULL_BLOCK = 0
"""The block that stands for what is not there, in managers that reserve it; never handed out."""


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


class Pin:
    """A receipt of `BlockManager.pin`, good for one `unpin`."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: tuple[int, ...]) -> None:
        self.blocks = blocks


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

    and, for those who need them, `fork`, `truncate`, `pin`, and `launch` and `retire` for steps that run beside the
    caller. Nothing is findable before its KV is committed, and every hit is verified token by token, so the hash
    decides about speed only. At least one token of a sequence is always left to compute: someone wants its logits.

    num_blocks          blocks in the cache, at least 1
    block_size          token slots in a block, at least 1
    prefix_caching      False: nothing is hashed, published or found
    merge_duplicates    True: a block that turns out to hold what a findable one holds is given back at commit and its
                        table entry rewritten (see `commit`); False: tables only grow, and both copies are findable
    window              tokens that attention sees, the newest included, for models whose every layer has a sliding
                        window: blocks that fell out of it are given back, their table entries become `NULL_BLOCK`;
                        admission counts as if they were not
    reserve_null_block  keep block 0 for the caller's padding; always so with a window
    watermark           free blocks that an admission must leave, unless nothing else is running
    policy              which cached block is evicted first, LRU by default
    hash_block          the prefix hash, see `HashBlock`
    debug               raise `ConcurrencyError` when a second thread calls, or a callback calls back. A manager is not
                        thread-safe: one thread drives it, and debug mode holds it to the first one that does
    events              keep a log of what becomes findable and what no longer is, for `take_events`
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        merge_duplicates: bool = True,
        window: int | None = None,
        reserve_null_block: bool = False,
        watermark: int = 0,
        policy: EvictionPolicy | None = None,
        hash_block: HashBlock = xxh3_chained,
        events: bool = False,
        debug: bool = False,
    ) -> None:
        require_int("block_size", block_size, 1, MAX_LENGTH)
        if window is not None:
            require_int("window", window, 1, MAX_LENGTH)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.merge_duplicates = merge_duplicates
        self.window = window
        self.watermark = watermark
        self._prefixes = PrefixCache(
            num_blocks,
            block_size,
            num_reserved=1 if reserve_null_block or window is not None else 0,
            policy=policy,
            hash_block=hash_block,
            events=events,
        )
        self.pool = self._prefixes.pool
        self.index = self._prefixes.index
        self._counters = self._prefixes.counters
        require_int("watermark", watermark, 0, self.num_blocks)
        self._admitted: dict[Sequence, None] = {}  # a set that keeps its order
        self._flights = Flights(self.pool)
        self._pins: set[Pin] = set()
        self._copies: dict[int, int] = {}  # source by destination: a destination that is used again has one order
        self._guard = Guard() if debug else None
        if self._guard is not None:
            watch(self, self._guard)  # pyright: ignore[reportArgumentType] - by folder, it sees this class twice

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out."""
        return self.pool.num_blocks - self.pool.num_reserved

    @property
    def num_free(self) -> int:
        """Blocks that nobody references, cached ones included."""
        return self.pool.num_free

    @property
    def num_used(self) -> int:
        """Blocks that a sequence, a pin or a step in flight references; 0 when idle."""
        return self.num_blocks - self.pool.num_free

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences that are admitted at this moment, in order of admission."""
        return tuple(self._admitted)

    def content(self, block: int) -> Node | None:
        """What `block` is findable by, for those who look."""
        return self._prefixes.content(block)

    @property
    def held_otherwise(self) -> list[int]:
        """The blocks that pins and steps in flight hold, each as often as it is held."""
        return [*self._flights.parked, *(block for pin in self._pins for block in pin.blocks)]

    def sequence(
        self,
        tokens: Iterable[int],
        *,
        max_length: int | None = None,
        namespace: Namespace = SHARED,
        media: Iterable[MediaItem] = (),
    ) -> Sequence:
        """A sequence that starts with `tokens` (at least one; copied) and takes no block yet.

        `max_length` declares how many tokens' KV it will ever hold. With it, `admit` refuses from the start what could
        not finish even alone. Without it, a sequence that outgrows the pool finds out at `reserve`.
        """
        if not isinstance(namespace, Namespace):
            raise InvalidArgument(f"namespace is {shown(namespace)}, must be a Namespace")
        return Sequence(self, tokens, max_length, namespace, checked_media(media))

    def match(self, seq: Sequence) -> int:
        """How many of the sequence's tokens are in the prefix cache now. Changes nothing, promises nothing."""
        self._own(seq)
        return len(self._hits(seq)) * self.block_size

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
            seq._table = self._take_after(quote.hits, quote.num_new_blocks)
            seq._num_cached = seq._num_computed = len(quote.hits) * self.block_size
            seq._num_reserved = quote.num_reserved
            self._admitted[seq] = None
            self._count_admission(seq)
        return quote.answer

    def reserve(self, seq: Sequence, n: int = 1, *, lookahead: int = 0) -> bool:
        """Make sure that the next `n` tokens have slots, and up to `lookahead` more within `max_length`.

        False, and no change, when the pool has too few free blocks. Slots that are reserved already count, so asking
        twice is asking once. The first of them may lie in a block that others share: it is replaced by a copy, see
        `take_copies`. Raises `InvalidArgument` when `n` is negative or reaches past the sequence's `max_length`.
        """
        if seq._batch is not None or seq not in self._admitted:
            self._movable(seq)
        if type(n) is type(lookahead) is int and lookahead == 0 <= n <= seq._num_reserved - seq._num_computed:
            return True
        limit = MAX_LENGTH if seq.max_length is None else seq.max_length
        if type(n) is not int or not 0 <= n <= limit - seq._num_computed:
            require_int("n", n, 0, limit - seq._num_computed)
        if type(lookahead) is not int or lookahead:
            require_int("lookahead", lookahead, 0, MAX_LENGTH)
        return self._reserve(seq, min(seq._num_computed + n + lookahead, limit))

    def commit(self, seq: Sequence, n: int = 1) -> list[Merge]:
        """The KV of the next `n` tokens is written. Blocks that are full now are published.

        Returns the table entries that now name another block of the same content (`merge_duplicates`), usually none.
        Raises `InvalidArgument` when `n` is negative or reaches past the known or the reserved tokens.
        """
        if seq._batch is not None or seq not in self._admitted:
            self._movable(seq)
        computed = seq._num_computed
        if type(n) is not int or not 0 <= n <= seq._num_reserved - computed or n > len(seq._tokens) - computed:
            require_int("n", n, 0, min(len(seq._tokens), seq._num_reserved) - computed)
        first, stop = computed // self.block_size, (computed + n) // self.block_size
        self._prepare(seq, first, stop)
        seq._num_computed = computed + n
        return self._publish(seq, first, stop)

    def fork(self, seq: Sequence) -> Sequence:
        """A sequence that begins as a copy of `seq`, on the same blocks. Takes no block; the first write copies one.

        Raises `SequenceStateError` while slots are reserved that are not computed: they can have one owner only. Raises
        `InvalidArgument` for a sequence that has outgrown its `max_length`.
        """
        self._movable(seq)
        if seq._num_reserved != seq._num_computed:
            raise SequenceStateError(f"{seq} can't be forked: it has reserved slots that are not computed")
        self._lifetime(seq)
        child = seq._fork()
        self.pool.share_all(self._real(seq._table))
        self._admitted[child] = None
        return child

    def truncate(self, seq: Sequence, length: int) -> None:
        """Forget the tokens from `length` on, with their slots and KV; blocks past the last slot are given back.

        Raises `InvalidArgument` unless 1 <= `length` <= `len(seq)`, and `SequenceStateError` when blocks that the
        shorter sequence's window needs are gone.
        """
        self._movable(seq)
        require_int("length", length, 1, len(seq))
        num_computed, num_reserved = min(seq._num_computed, length), min(seq._num_reserved, length)
        if self.window is not None:
            visible = slice(self._first_visible(num_computed, self.window), self._blocks_for(num_computed))
            if NULL_BLOCK in seq._table[visible]:
                raise SequenceStateError(f"{seq} can't be cut to {length}: its window has moved past those blocks")
        del seq._tokens[length:], seq._hashes[length // self.block_size :]
        seq.media = clip_media(seq.media, length)
        seq._num_computed = num_computed
        self._keep_slots(seq, num_reserved)

    def release(self, seq: Sequence) -> None:
        """Give all the sequence's blocks back; what is published stays findable until it is evicted.

        Raises `SequenceStateError` when the sequence is not admitted, a second release among them.
        """
        self._admitted_here(seq)
        if seq._batch is not None:
            seq._batch._remove(seq)
        del self._admitted[seq]
        # Tail first, so that under LRU a parent outlives its children.
        self._flights.drop(seq, reversed(self._real(seq._table)))
        seq._table = array("i")
        seq._num_computed = seq._num_reserved = 0
        seq._flight = None

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies that `reserve` has ordered since the last call, as (source, destination).

        They must be carried out, all sources read before any destination is written, before the next step writes.
        """
        orders = [(source, destination) for destination, source in self._copies.items()]
        self._copies.clear()
        return orders

    def pin(self, seq: Sequence) -> Pin:
        """Keep the sequence's full computed blocks from eviction, whatever becomes of the sequence, until `unpin`."""
        self._admitted_here(seq)
        pin = Pin(tuple(self._real(seq._table[: seq.num_computed // self.block_size])))
        self.pool.share_all(pin.blocks)
        self._pins.add(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Give up what `pin` holds. Raises `SequenceStateError` for a receipt that is used up or another manager's."""
        if pin not in self._pins:
            raise SequenceStateError("this pin holds nothing here: it was given up before, or is another manager's")
        self._pins.remove(pin)
        self.pool.release_all(reversed(pin.blocks))

    def decode_batch(self, capacity: int) -> DecodeBatch:
        """An empty batch for at most `capacity` sequences of this manager, see `DecodeBatch`."""
        batch = DecodeBatch(self, capacity)  # pyright: ignore[reportArgumentType] - as above
        if self._guard is not None:
            watch(batch, self._guard)
        return batch

    def launch(self, seqs: Iterable[Sequence]) -> int:
        """A step that uses the blocks of `seqs` has been sent off. Returns its number, for `retire`.

        What these sequences give up from now on is handed out again only when the step has retired.
        """
        seqs = list(seqs)
        for seq in seqs:
            if seq not in self._admitted:
                self._admitted_here(seq)  # which says what is wrong
        return self._flights.launch(seqs)

    def retire(self, step: int) -> None:
        """The oldest step in flight has finished. Raises `SequenceStateError` for any other, a second time included."""
        self._flights.retire(step)

    def reset_prefix_cache(self) -> None:
        """Make nothing findable, as when the model's weights have changed.

        Raises `SequenceStateError` while any block is in use: its content would be found again later.
        """
        if self.num_used:
            raise SequenceStateError(
                f"the prefix cache can't be reset: {self.num_used} blocks are held by {len(self._admitted)} sequences, "
                f"{len(self._pins)} pins and {len(self._flights)} steps in flight"
            )
        self._prefixes.clear()

    def take_events(self) -> list[Event]:
        """What became findable and what no longer is since the last call, in order; see `kvproof.allocator.events`.

        The log grows until it is taken. Always empty without `events=True`.
        """
        events = self._prefixes.events
        return [] if events is None else events.take()

    def stats(self) -> Stats:
        """How full the pool is and what the prefix cache has been good for. O(1), changes nothing."""
        return Stats(
            num_blocks=self.num_blocks,
            num_used=self.num_used,
            num_free=self.num_free,
            num_cached=self.pool.num_cached,
            num_sequences=len(self._admitted),
            **asdict(self._counters),
        )

    def snapshot(self) -> dict[str, object]:
        """The whole state as plain data that `json.dumps` takes, for debugging; see `kvproof.allocator.snapshot`."""
        return snapshot(self)  # pyright: ignore[reportArgumentType] - by folder, it sees this class twice

    def check(self) -> None:
        """Verify every invariant that can be seen from here; raises `InvariantViolation`. O(pool), for tests."""
        audit(self)  # pyright: ignore[reportArgumentType] - by folder, it sees this class twice

    def _quote(self, seq: Sequence, limit: int | None) -> _Quote:
        self._own(seq)
        if seq in self._admitted:
            raise SequenceStateError(f"{seq} is admitted already")
        if limit is not None:
            require_int("limit", limit, 1, MAX_LENGTH)
        lifetime = self._lifetime(seq)
        if self._blocks_for(lifetime) > self.num_blocks:
            return _Quote(Admission.NEVER, [], 0, 0)
        hits = self._hits(seq)
        num_cached = len(hits) * self.block_size
        num_reserved = len(seq) if limit is None else min(len(seq), num_cached + limit)
        num_new_blocks = self._blocks_for(num_reserved) - len(hits)
        # A hit that nobody references is on the free list: taking it leaves one block less for the rest.
        num_revived = sum(1 for block in hits if self.pool.refs(block) == 0)
        spare = self.watermark if self._admitted else 0
        fits = num_new_blocks + num_revived + spare <= self.pool.num_free
        return _Quote(Admission.NOW if fits else Admission.LATER, hits, num_reserved, num_new_blocks)

    def _hits(self, seq: Sequence) -> list[int]:
        """The blocks of the sequence's longest findable prefix, short of its last token."""
        if not self.prefix_caching:
            return []
        nodes = self._prefixes.find(seq, (len(seq) - 1) // self.block_size)
        return [self._prefixes.carrier(node) for node in nodes]

    def _take_after(self, hits: list[int], num_new_blocks: int) -> array[int]:
        """A block table of these hits and new blocks."""
        self.pool.share_all(hits)  # first: a hit must not be evicted to make room for its own successor
        try:
            return array("i", hits + self.pool.take(num_new_blocks))
        except BaseException:  # an eviction policy that fails
            self.pool.release_all(reversed(hits))
            raise

    def _reserve(self, seq: Sequence, target: int) -> bool:
        """Slots up to `target` tokens, or False and no change."""
        if target <= seq._num_reserved:
            return True
        entry, offset = divmod(seq._num_computed, self.block_size)
        # Slots that were reserved before are this sequence's alone. Without any, a tail that is partly computed may
        # still be shared (after a fork) or findable (after a truncation), and must not be written as it is.
        tail = seq._table[entry] if offset and seq._num_computed == seq._num_reserved else None
        copy = tail is not None and self.pool.refs(tail) > 1
        num_new_blocks = self._blocks_for(target) - len(seq._table) + copy
        if num_new_blocks and num_new_blocks > self.pool.num_free:
            return False
        if tail is not None and not copy:
            self._prefixes.withdraw(tail)  # a copy would need a block, which a lone sequence may not find
        if num_new_blocks:
            fresh = self.pool.take(num_new_blocks)
            if tail is not None and copy:
                seq._table[entry] = fresh[0]
                # The tail may be waiting for its own copy still: all sources are read before any is written.
                self._copies[fresh[0]] = self._copies.get(tail, tail)
                self._flights.drop(seq, (tail,))
            self._add_blocks(seq, fresh[copy:])
        seq._num_reserved = target
        return True

    def _prepare(self, seq: Sequence, first: int, stop: int) -> None:
        """The blocks `first` to `stop` are about to be full. What can fail fails here."""
        if stop > first and self.prefix_caching:
            self._prefixes.prepare(seq, first, stop)

    def _publish(self, seq: Sequence, first: int, stop: int) -> list[Merge]:
        """Publish the blocks that were prepared and are computed now, and give up those that left the window."""
        merges: list[Merge] = []
        if stop > first and self.prefix_caching:
            for entry, node in self._prefixes.publish(seq, first, stop).items():
                if self.merge_duplicates:
                    merges.append(self._merge(seq, entry, node))
                else:
                    self._prefixes.publish_duplicate(seq._table[entry], node)
        if self.window is not None:
            self._leave_window(seq, self.window)
        return merges

    def _merge(self, seq: Sequence, entry: int, node: int) -> Merge:
        """This entry's block holds what `node` stands for: name a block that carries it, and give this one back."""
        block, keeper = seq._table[entry], self._prefixes.carrier(node)
        self._counters.merged += 1
        self.pool.share(keeper)
        seq._table[entry] = keeper
        self._flights.drop(seq, (block,))
        return Merge(entry, block, keeper)

    def _add_blocks(self, seq: Sequence, blocks: list[int]) -> None:
        more = array("i", blocks)
        try:
            seq._table.extend(more)
        except BufferError:  # someone reads the array through its buffer: it can't grow
            seq._table = seq._table + more

    def _keep_slots(self, seq: Sequence, num_reserved: int) -> None:
        """Give up the slots beyond so many."""
        kept = self._blocks_for(num_reserved)
        dropped, seq._table = seq._table[kept:], seq._table[:kept]
        seq._num_reserved = num_reserved
        self._flights.drop(seq, reversed(self._real(dropped)))

    def _count_admission(self, seq: Sequence) -> None:
        if seq._was_admitted:
            self._counters.readmissions += 1
            return
        seq._was_admitted = True
        self._counters.admissions += 1
        if self.prefix_caching:
            self._counters.tokens_queried += len(seq)
            self._counters.tokens_hit += seq._num_cached

    def _leave_window(self, seq: Sequence, window: int) -> None:
        stop = first = min(self._first_visible(seq._num_computed, window), len(seq._table))
        while first and seq._table[first - 1] != NULL_BLOCK:
            first -= 1
        left = seq._table[first:stop]
        if not left:
            return  # an array that someone reads through its buffer refuses even to put nothing in place of nothing
        seq._table[first:stop] = array("i", bytes(left.itemsize * len(left)))
        self._flights.drop(seq, left)

    def _first_visible(self, num_computed: int, window: int) -> int:
        """The first table entry that the next token sees: its own position is `num_computed`."""
        return max(0, num_computed - window + 1) // self.block_size

    def _real(self, table: array[int]) -> list[int]:
        """The blocks that a table names, null entries left out."""
        return [block for block in table if block >= self.pool.num_reserved]

    def _within(self, seq: Sequence, num_tokens: int) -> int:
        """So many tokens, or the sequence's `max_length`."""
        return num_tokens if seq.max_length is None else min(num_tokens, seq.max_length)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _lifetime(self, seq: Sequence) -> int:
        """How many tokens the sequence will hold, as far as is known now. Raises `InvalidArgument` if it holds more."""
        if seq.max_length is None:
            return len(seq)
        if len(seq) > seq.max_length:
            raise InvalidArgument(f"{seq} has outgrown its max_length {seq.max_length}")
        return seq.max_length

    def _own(self, seq: Sequence) -> None:
        if seq._manager is not self:
            raise SequenceStateError(f"{seq} belongs to another manager")

    def _admitted_here(self, seq: Sequence) -> None:
        self._own(seq)
        if seq not in self._admitted:
            raise SequenceStateError(f"{seq} is not admitted")

    def _movable(self, seq: Sequence) -> None:
        """It is admitted, and no decode batch moves it."""
        if seq._batch is not None or seq not in self._admitted:
            self._admitted_here(seq)
            raise SequenceStateError(f"{seq} is in a decode batch, which must remove it first")
