"""The executable model of `BlockManager`: the same behaviour in the plainest words, however slow.

It shares no code and no idea with the implementation. Content is the whole prefix, written out, so there are no hashes,
no parents and no identities to get wrong; the free list is two Python lists. Whatever the implementation does must be
what this does, down to which block is handed out next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Prefix = tuple[object, tuple[int, ...]]
"""What a block holds: a namespace, and every token from the sequence's start to the block's end."""


@dataclass
class ModelSequence:
    namespace: object
    tokens: list[int]
    max_length: int | None = None
    table: list[int] = field(default_factory=list)
    computed: int = 0
    reserved: int = 0
    admitted: bool = False

    def prefix(self, stop: int) -> Prefix:
        return self.namespace, tuple(self.tokens[:stop])


class ModelManager:
    """`newest_first` models a policy that evicts the latest released block: the worst choice, parents first."""

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool = True, merge: bool = True, newest_first: bool = False
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.caching, self.merge, self.newest_first = caching, merge, newest_first
        self.refs = [0] * num_blocks
        self.holds: dict[int, Prefix] = {}  # findable content by block, in order of publication
        self.empty = list(range(num_blocks))[::-1]  # taken from the end
        self.cached: list[int] = []  # taken from the start (from the end when newest_first)

    def blocks_for(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

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

    def answer(self, seq: ModelSequence, limit: int | None = None) -> str:
        if self.blocks_for(seq.max_length or len(seq.tokens)) > self.num_blocks:
            return "never"
        hits = self.hits(seq)
        needed = self.blocks_for(self.first_reserve(seq, limit)) - len(hits)
        free = len(self.empty) + len([block for block in self.cached if block not in hits])
        return "now" if needed <= free else "later"

    def first_reserve(self, seq: ModelSequence, limit: int | None) -> int:
        cached = len(self.hits(seq)) * self.block_size
        return len(seq.tokens) if limit is None else min(len(seq.tokens), cached + limit)

    def admit(self, seq: ModelSequence, limit: int | None = None) -> str:
        answer = self.answer(seq, limit)
        if answer == "now":
            hits, seq.reserved = self.hits(seq), self.first_reserve(seq, limit)
            for block in hits:
                self.share(block)
            fresh = [self.take() for _ in range(self.blocks_for(seq.reserved) - len(hits))]
            seq.table, seq.computed, seq.admitted = hits + fresh, len(hits) * self.block_size, True
        return answer

    def reserve(self, seq: ModelSequence, n: int) -> bool:
        needed = self.blocks_for(seq.reserved + n) - len(seq.table)
        if needed > len(self.empty) + len(self.cached):
            return False
        seq.table += [self.take() for _ in range(needed)]
        seq.reserved += n
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
                    self.release_block(block)
                    seq.table[entry] = keeper
                    merges.append((entry, block, keeper))
                else:
                    self.holds[block] = prefix
        return merges

    def release(self, seq: ModelSequence) -> None:
        for block in seq.table[::-1]:
            self.release_block(block)
        seq.table, seq.computed, seq.reserved, seq.admitted = [], 0, 0, False

    def share(self, block: int) -> None:
        if self.refs[block] == 0:
            self.cached.remove(block)
        self.refs[block] += 1

    def release_block(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            (self.cached if block in self.holds else self.empty).append(block)

    def take(self) -> int:
        if not self.empty:
            victim = self.cached[-1 if self.newest_first else 0]
            self.forget(victim)
            for block in sorted(self.holds):
                if not self.reachable(block):
                    self.forget(block)
        block = self.empty.pop()
        self.refs[block] = 1
        return block

    def reachable(self, block: int) -> bool:
        """Whether every block-aligned beginning of what `block` holds is held by some block."""
        namespace, tokens = self.holds[block]
        stops = range(self.block_size, len(tokens), self.block_size)
        return all((namespace, tokens[:stop]) in self.holds.values() for stop in stops)

    def forget(self, block: int) -> None:
        del self.holds[block]
        if self.refs[block] == 0:
            self.cached.remove(block)
            self.empty.append(block)
