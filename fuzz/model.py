"""The executable model of `BlockManager`: the same behaviour in the plainest words, however slow.

It shares no code and no idea with the implementation. Content is the whole prefix, written out, so there are no hashes,
no parents and no identities to get wrong; the free list is two Python lists. Whatever the implementation does must be
what this does, down to which block is handed out next.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

Media = tuple[tuple[str, int, int], ...]
"""Media items as (key, start, length)."""

Prefix = tuple[object, tuple[int, ...], Media]
"""What a block holds: a namespace, and every token and medium from the sequence's start to the block's end."""


@dataclass
class ModelSequence:
    namespace: object
    tokens: list[int]
    max_length: int | None = None
    media: Media = ()
    table: list[int] = field(default_factory=list)
    computed: int = 0
    reserved: int = 0
    admitted: bool = False
    was_admitted: bool = False
    flight: int | None = None  # the step it was last launched in

    def prefix(self, stop: int) -> Prefix:
        """What KV computed at `stop` - 1 depends on; media beyond `stop` do not count."""
        return self.namespace, tuple(self.tokens[:stop]), clip(self.media, stop)


def clip(media: Media, stop: int) -> Media:
    return tuple((key, start, min(length, stop - start)) for key, start, length in media if start < stop)


class ModelManager:
    """`policy` is the order of eviction: "lru", "fifo", or "newest first", which evicts the latest released block: the
    worst choice, parents first."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        merge: bool = True,
        policy: str = "lru",
        null_block: bool = False,
        window: int | None = None,
        watermark: int = 0,
    ) -> None:
        self.block_size = block_size
        self.caching, self.merge, self.policy = caching, merge, policy
        self.window, self.watermark = window, watermark
        first = 1 if null_block or window else 0  # block 0 stands for what is not there
        self.usable = num_blocks - first
        self.refs = [0] * num_blocks
        self.holds: dict[int, Prefix] = {}  # findable content by block, in order of publication
        self.empty = list(range(first, num_blocks))[::-1]  # taken from the end
        self.cached: list[int] = []  # in order of release
        self.taken = 0  # blocks so far: the clock
        self.published: dict[int, int] = {}  # when a block last got content
        self.sequences: list[ModelSequence] = []  # admitted
        self.copies: dict[int, int] = {}  # destination: source
        self.flights: dict[int, list[int]] = {}  # steps in flight, with the blocks parked until they retire
        self.launched = 0
        self.counts: Counter[str] = Counter()  # by the names of `Stats`

    # ---- sequences

    def answer(self, seq: ModelSequence, limit: int | None = None) -> str:
        if self.blocks_for(seq.max_length or len(seq.tokens)) > self.usable:
            return "never"
        hits = self.hits(seq)
        needed = self.blocks_for(self.first_reserve(seq, limit)) - len(hits)
        needed += self.watermark if self.sequences else 0
        free = len(self.empty) + len([block for block in self.cached if block not in hits])
        return "now" if needed <= free else "later"

    def admit(self, seq: ModelSequence, limit: int | None = None) -> str:
        answer = self.answer(seq, limit)
        if answer == "now":
            hits, seq.reserved = self.hits(seq), self.first_reserve(seq, limit)
            for block in hits:
                self.share(block)
            fresh = [self.take() for _ in range(self.blocks_for(seq.reserved) - len(hits))]
            seq.table, seq.computed, seq.admitted = hits + fresh, len(hits) * self.block_size, True
            self.sequences.append(seq)
            self.counts["readmissions" if seq.was_admitted else "admissions"] += 1
            if self.caching and not seq.was_admitted:
                self.counts["tokens_queried"] += len(seq.tokens)
                self.counts["tokens_hit"] += seq.computed
            seq.was_admitted = True
        return answer

    def hits(self, seq: ModelSequence) -> list[int]:
        """The blocks of the longest findable prefix that leaves a token to compute."""
        found: list[int] = []
        for stop in range(self.block_size, len(seq.tokens), self.block_size):
            block = self.holder(seq.prefix(stop))
            if block is None:
                break
            found.append(block)
        return found

    def holder(self, prefix: Prefix) -> int | None:
        """A block that holds `prefix`: the oldest with an owner, else the oldest."""
        holders = [block for block, held in self.holds.items() if held == prefix]
        owned = [block for block in holders if self.refs[block]]
        return next(iter(owned + holders), None)

    def first_reserve(self, seq: ModelSequence, limit: int | None) -> int:
        cached = len(self.hits(seq)) * self.block_size
        return len(seq.tokens) if limit is None else min(len(seq.tokens), cached + limit)

    def reserve(self, seq: ModelSequence, n: int, lookahead: int = 0) -> bool:
        target = seq.computed + n + lookahead
        if seq.max_length is not None:
            target = min(target, seq.max_length)
        if target <= seq.reserved:
            return True
        entry = seq.computed // self.block_size
        tail = seq.table[entry] if seq.computed % self.block_size and seq.computed == seq.reserved else None
        copy = tail is not None and self.refs[tail] > 1
        needed = self.blocks_for(target) - len(seq.table) + copy
        if needed > self.num_free:
            return False
        if tail is not None and copy:
            seq.table[entry] = self.take()
            self.copies[seq.table[entry]] = self.copies.get(tail, tail)
        elif tail in self.holds:
            self.forget(tail)
            self.forget_unreachable()
        seq.table += [self.take() for _ in range(self.blocks_for(target) - len(seq.table))]
        if tail is not None and copy:
            self.drop(seq, tail)
        seq.reserved = target
        return True

    def commit(self, seq: ModelSequence, n: int) -> list[tuple[int, int, int]]:
        merges = []
        for _ in range(n):
            seq.computed += 1
            if self.caching and seq.computed % self.block_size == 0:
                entry = seq.computed // self.block_size - 1
                block, prefix = seq.table[entry], seq.prefix(seq.computed)
                keeper = self.holder(prefix)
                if keeper is not None and self.merge:
                    self.share(keeper)
                    self.drop(seq, block)
                    seq.table[entry] = keeper
                    merges.append((entry, block, keeper))
                    self.counts["merged"] += 1
                elif entry == 0 or self.holder(seq.prefix(seq.computed - self.block_size)) is not None:
                    self.holds[block] = prefix
                    self.published[block] = self.taken
                    self.counts["published"] += 1
        if self.window:
            for entry in range(min(len(seq.table), max(0, seq.computed - self.window + 1) // self.block_size)):
                block, seq.table[entry] = seq.table[entry], 0
                if block:
                    self.drop(seq, block)
        return merges

    def fork(self, seq: ModelSequence) -> ModelSequence:
        child = replace(seq, tokens=list(seq.tokens), table=list(seq.table), flight=None)
        for block in self.real(child.table):
            self.share(block)
        self.sequences.append(child)
        return child

    def truncate(self, seq: ModelSequence, length: int) -> None:
        seq.tokens = seq.tokens[:length]
        seq.media = clip(seq.media, length)
        seq.computed = min(seq.computed, length)
        self.keep_slots(seq, min(seq.reserved, length))

    def keep_slots(self, seq: ModelSequence, reserved: int) -> None:
        """The others are given up."""
        kept = self.blocks_for(reserved)
        for block in self.real(seq.table[kept:])[::-1]:
            self.drop(seq, block)
        del seq.table[kept:]
        seq.reserved = reserved

    def has_window(self, seq: ModelSequence, computed: int) -> bool:
        """Whether all blocks are there that a token after `computed` others sees."""
        if not self.window:
            return True
        first = max(0, computed - self.window + 1) // self.block_size
        return 0 not in seq.table[first : self.blocks_for(computed)]

    def release(self, seq: ModelSequence) -> None:
        for block in self.real(seq.table)[::-1]:
            self.drop(seq, block)
        seq.table, seq.computed, seq.reserved, seq.admitted, seq.flight = [], 0, 0, False, None
        self.sequences = [other for other in self.sequences if other is not seq]

    # ---- holding on to blocks

    def pin(self, seq: ModelSequence) -> list[int]:
        pinned = self.real(seq.table[: seq.computed // self.block_size])
        for block in pinned:
            self.share(block)
        return pinned

    def unpin(self, pinned: list[int]) -> None:
        for block in pinned[::-1]:
            self.release_block(block)

    def launch(self, seqs: list[ModelSequence]) -> int:
        for seq in seqs:
            seq.flight = self.launched
        self.flights[self.launched] = []
        self.launched += 1
        return self.launched - 1

    def retire(self, step: int) -> None:
        for block in self.flights.pop(step):
            self.release_block(block)

    def drop(self, seq: ModelSequence, block: int) -> None:
        """`seq` gives `block` up: at once, or when the step that may still use it has retired."""
        if seq.flight in self.flights:
            self.flights[seq.flight].append(block)
        else:
            self.release_block(block)

    def reset(self) -> None:
        while self.cached:
            self.evict()

    # ---- blocks

    @property
    def num_free(self) -> int:
        return len(self.empty) + len(self.cached)

    def blocks_for(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def real(self, table: list[int]) -> list[int]:
        """A table without the entries that fell out of the window."""
        return [block for block in table if block or not self.window]

    def share(self, block: int) -> None:
        if self.refs[block] == 0:
            self.cached.remove(block)
        self.refs[block] += 1

    def release_block(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            (self.cached if block in self.holds else self.empty).append(block)

    def take(self) -> int:
        self.taken += 1
        if not self.empty:
            held = set(self.holds)
            self.evict()
            lost = held - set(self.holds)
            self.counts["evictions"] += len(lost)
            self.counts["residency"] += sum(self.taken - self.published[block] for block in lost)
        block = self.empty.pop()
        self.refs[block] = 1
        return block

    def evict(self) -> None:
        self.forget(self.to_evict()[0])
        self.forget_unreachable()

    def to_evict(self) -> list[int]:
        """The cached blocks, next victim first."""
        if self.policy == "fifo":
            return sorted(self.cached, key=lambda block: self.published[block])  # stable: ties in order of release
        return self.cached[::-1] if self.policy == "newest first" else self.cached

    def forget_unreachable(self) -> None:
        for block in sorted(self.holds):
            if not self.reachable(block):
                self.forget(block)

    def reachable(self, block: int) -> bool:
        """Whether every block-aligned beginning of what `block` holds is held by some block."""
        namespace, tokens, media = self.holds[block]
        stops = range(self.block_size, len(tokens), self.block_size)
        return all((namespace, tokens[:stop], clip(media, stop)) in self.holds.values() for stop in stops)

    def forget(self, block: int) -> None:
        del self.holds[block]
        if self.refs[block] == 0:
            self.cached.remove(block)
            self.empty.append(block)
