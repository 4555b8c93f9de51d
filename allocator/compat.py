"""nano-vllm's `BlockManager`, on top of ours: the same interface, so that nano-vllm runs on it with one import changed.

The interface is that of nano-vllm up to April 2026 and of nano-vllm-fork 20260210, in which blocks become findable
without a call of their own (upstream has `hash_blocks` since). See docs/nano-vllm.md.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol, TypeVar

from xxhash import xxh64_intdigest

from kvproof.allocator.errors import InvalidArgument, KvproofError, SequenceStateError
from kvproof.allocator.manager import Admission
from kvproof.allocator.manager import BlockManager as Allocator
from kvproof.allocator.sequence import Sequence as Allocation

Item = TypeVar("Item")


class OutOfBlocks(KvproofError, RuntimeError):
    """More blocks were asked for than there are free ones: `can_allocate` or `can_append` was not asked, or too early.

    nano-vllm's interface has no other way to say no; elsewhere in kvproof this is an answer and not an error.
    """


class NanoSequence(Protocol):
    """What is read and written of nano-vllm's `Sequence`. Its own block size, a class attribute, is left alone."""

    num_tokens: int
    token_ids: list[int]
    block_table: list[int]
    num_cached_tokens: int


class _Entry(NamedTuple):
    """An allocated sequence: in our allocator, which hears of a token when its block is full, and those with slots."""

    allocation: Allocation
    tokens: list[int]


class Block:
    """One block as it is now. Read-only. A block has a hash and tokens while it is findable, else -1 and none."""

    __slots__ = ("_block_id", "_manager")

    def __init__(self, manager: Allocator, block_id: int) -> None:
        self._manager = manager
        self._block_id = block_id

    @property
    def block_id(self) -> int:
        return self._block_id

    @property
    def ref_count(self) -> int:
        return self._manager.pool.refs(self._block_id)

    @property
    def hash(self) -> int:
        node = self._manager.content(self._block_id)
        return -1 if node is None else node.hash

    @property
    def token_ids(self) -> list[int]:
        """A copy."""
        node = self._manager.content(self._block_id)
        return [] if node is None else list(_token_ids(node.tokens))


class BlockManager:
    """nano-vllm's interface. The life of a sequence:

        if manager.can_allocate(seq): manager.allocate(seq)     blocks for all its tokens, cached ones where possible
        (a step computes the KV of its tokens; seq.append_token once or several times)
        if manager.can_append(seq): manager.may_append(seq)     slots for the tokens appended since the last call
        manager.deallocate(seq)                                 finished, aborted or preempted

    Operations are atomic: one that raises has changed nothing. `SequenceStateError` is raised for a sequence that is
    allocated twice, or not at all: a second `deallocate` among them.

    The interface never says that KV has been written, so that is inferred: a token after them is known, hence the
    tokens that had slots before have been computed. Full blocks become findable when that is first seen: for all
    sequences at the start of `can_allocate` and `allocate`, whatever these then answer; for one in its `may_append`
    or `deallocate`. This cannot be guaranteed through such an interface: if an engine appends tokens to a sequence
    before it has issued the step that writes the earlier ones, blocks are findable too early.

    num_blocks  blocks in the cache, at least 1
    block_size  token slots in a block, at least 1; this manager's own, whatever other managers use
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        # Tables only grow, as this interface has it. Both copies of a duplicate are findable.
        self.manager = Allocator(num_blocks, block_size, merge_duplicates=False, hash_block=self._hash_block)
        self.block_size = block_size
        self._blocks = tuple(Block(self.manager, block_id) for block_id in range(num_blocks))
        self._entries: dict[NanoSequence, _Entry] = {}
        self._unpublished: OrderedDict[NanoSequence, _Entry] = OrderedDict()  # those with a full block to publish
        self._asked: tuple[NanoSequence, _Entry] | None = None  # a scheduler asks for one sequence again and again

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def hash_to_block_id(self) -> Mapping[int, int]:
        """A live read-only view, O(blocks) for each question: the manager itself finds blocks otherwise."""
        return _FindableBlocks(self.manager)

    @property
    def free_block_ids(self) -> Sequence[int]:
        """A live read-only view, in the order in which blocks will be taken. Its length is O(1), its items are not."""
        return _FreeBlocks(self.manager)

    @property
    def used_block_ids(self) -> Set[int]:
        """A live read-only view."""
        return _UsedBlocks(self.manager)

    @classmethod
    def compute_hash(cls, token_ids: Sequence[int], prefix: int = -1) -> int:
        """XXH64 of one block: its prefix's hash as 8 bytes (-1: no prefix), then its tokens as little-endian int64."""
        chained = b"" if prefix == -1 else prefix.to_bytes(8, "little")
        return xxh64_intdigest(chained + struct.pack(f"<{len(token_ids)}q", *token_ids))

    def can_allocate(self, seq: NanoSequence) -> bool:
        """Whether `allocate` would succeed now, cached blocks counted. It stays False when `seq` can never fit."""
        entry = self._candidate(seq)
        self._publish_written()
        return self.manager.can_admit(entry.allocation) is Admission.NOW

    def allocate(self, seq: NanoSequence) -> None:
        """Set the sequence's `block_table` and `num_cached_tokens`; at least one token is left to compute.

        Raises `OutOfBlocks` when `can_allocate` is False, `InvalidArgument` when its tokens aren't in 0 to 2^31 - 1.
        """
        entry = self._candidate(seq)
        self._publish_written()
        if self.manager.admit(entry.allocation) is not Admission.NOW:
            raise OutOfBlocks(f"{seq.num_tokens} tokens don't fit in {self._free()}")
        self._asked = None
        self._entries[seq] = entry
        seq.block_table.extend(entry.allocation.block_table)
        seq.num_cached_tokens = entry.allocation.num_cached
        if seq.num_tokens - seq.num_cached_tokens >= self.block_size:
            self._unpublished[seq] = entry

    def can_append(self, seq: NanoSequence) -> bool:
        """Whether `may_append` would find the blocks it needs."""
        return self._num_missing(seq, self._entry(seq)) <= self.manager.num_free

    def may_append(self, seq: NanoSequence) -> None:
        """Extend `block_table` to cover all known tokens. Without new tokens since the last call, nothing happens.

        Raises `OutOfBlocks` when `can_append` is False, and `SequenceStateError` when tokens have gone, or were
        changed before their block was published. Tokens are checked as in `allocate`, when they fill a block.
        """
        entry = self._entry(seq)
        num_written, num_tokens = len(entry.tokens), seq.num_tokens
        if num_tokens == num_written:
            return
        if num_tokens < num_written or not self._is_unchanged(seq, entry):
            raise SequenceStateError(f"{seq!r} has lost or changed some of the {num_written} tokens that have slots")
        num_missing = self._num_missing(seq, entry)
        if num_missing and num_missing > self.manager.num_free:
            raise OutOfBlocks(f"{num_tokens - num_written} more tokens don't fit in {self._free()}")
        tokens = _tokens(seq, num_written)
        fills_block = num_tokens // self.block_size > num_written // self.block_size
        if fills_block:
            entry.allocation.extend(entry.tokens[len(entry.allocation) :] + tokens)
        entry.tokens.extend(tokens)
        if num_missing:
            self.manager.reserve(entry.allocation, num_tokens - entry.allocation.num_computed)
            seq.block_table.extend(entry.allocation.block_table[-num_missing:])
        self._publish(seq, num_written)
        if fills_block:
            self._unpublished[seq] = entry

    def deallocate(self, seq: NanoSequence) -> None:
        """Give the sequence's blocks back, and clear its `block_table` and `num_cached_tokens`."""
        entry = self._entry(seq)
        if seq.num_tokens > len(entry.tokens) and self._is_unchanged(seq, entry):
            self._publish(seq, len(entry.tokens))
        self._unpublished.pop(seq, None)
        self.manager.release(entry.allocation)
        del self._entries[seq]
        seq.block_table.clear()
        seq.num_cached_tokens = 0

    # ---- one sequence

    def _entry(self, seq: NanoSequence) -> _Entry:
        try:
            return self._entries[seq]
        except KeyError:
            raise SequenceStateError(f"{seq!r} has no blocks here: deallocated before, or never allocated") from None

    def _candidate(self, seq: NanoSequence) -> _Entry:
        """What will be known of the sequence once it is allocated; that of the last call if it is the same still."""
        if seq in self._entries or seq.block_table:
            raise SequenceStateError(f"{seq!r} is allocated already: its block table is {seq.block_table}")
        tokens = _tokens(seq, 0)
        if self._asked is None or self._asked[0] is not seq or self._asked[1].tokens != tokens:
            self._asked = seq, _Entry(self.manager.sequence(tokens), tokens)
        return self._asked[1]

    def _num_missing(self, seq: NanoSequence, entry: _Entry) -> int:
        """How many blocks its known tokens need that it does not have."""
        return -(-seq.num_tokens // self.block_size) - len(entry.allocation.block_table)

    def _is_unchanged(self, seq: NanoSequence, entry: _Entry) -> bool:
        """Whether the tokens that wait to be published, if any, are those that had slots when they were written."""
        if seq not in self._unpublished:
            return True
        first, stop = entry.allocation.num_computed // self.block_size * self.block_size, len(entry.tokens)
        return seq.token_ids[first:stop] == entry.tokens[first:]

    # ---- publication

    def _publish_written(self) -> None:
        """Publish for all sequences that have moved on. Steps run in order, so the first that has not ends the search:
        each call does work for what it publishes, not for all that is running."""
        while self._unpublished:
            seq, entry = next(iter(self._unpublished.items()))
            if seq.num_tokens <= len(entry.tokens) or not self._is_unchanged(seq, entry):
                break
            self._publish(seq, len(entry.tokens))

    def _publish(self, seq: NanoSequence, num_written: int) -> None:
        """The first `num_written` tokens have been computed; does nothing unless that fills a block."""
        entry = self._unpublished.pop(seq, None)
        if entry is not None:
            num_new = num_written - entry.allocation.num_computed
            # The allocator counts slots one by one, this class only sees to it that the blocks are there.
            self.manager.reserve(entry.allocation, num_new)
            self.manager.commit(entry.allocation, num_new)

    def _free(self) -> str:
        return f"{self.manager.num_free} free blocks of {self.manager.num_blocks}, block size {self.block_size}"

    def _hash_block(self, tokens: bytes, prefix: int) -> int:
        """`compute_hash` as the allocator calls it: for the root with no tokens, then for each block."""
        return self.compute_hash(_token_ids(tokens), prefix) if tokens else -1


def _tokens(seq: NanoSequence, start: int) -> list[int]:
    tokens = seq.token_ids[start : seq.num_tokens]
    if start + len(tokens) != seq.num_tokens:
        raise InvalidArgument(f"num_tokens is {seq.num_tokens}, and there are {len(seq.token_ids)} token_ids")
    return tokens


def _token_ids(tokens: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(tokens) // 4}i", tokens)


class _View(Collection[int]):
    __slots__ = ("_manager",)

    def __init__(self, manager: Allocator) -> None:
        self._manager = manager

    def __repr__(self) -> str:
        return f"{type(self).__name__.lstrip('_')}({list(self)})"


class _FindableBlocks(_View, Mapping[int, int]):
    """Of blocks that a colliding hash or a duplicate makes many, one."""

    def __getitem__(self, hash: int) -> int:
        for node in self._manager.index.nodes():
            if node.hash == hash:
                return node.blocks[0]
        raise KeyError(hash)

    def __iter__(self) -> Iterator[int]:
        return iter({node.hash: None for node in self._manager.index.nodes()})

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _FreeBlocks(_View, Sequence[int]):
    def __getitem__(self, index: Any) -> Any:
        empty, cached = self._manager.pool.free_lists()
        return (empty + cached)[index]

    def __contains__(self, block: object) -> bool:
        return block in self[:]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __len__(self) -> int:
        return self._manager.num_free


class _UsedBlocks(_View, Set[int]):
    def __contains__(self, block: object) -> bool:
        return isinstance(block, int) and 0 <= block < self._manager.num_blocks and self._manager.pool.refs(block) > 0

    def __iter__(self) -> Iterator[int]:
        return (block for block in range(self._manager.num_blocks) if self._manager.pool.refs(block))

    def __len__(self) -> int:
        return self._manager.num_used

    @classmethod
    def _from_iterable(cls, blocks: Iterable[Item]) -> Set[Item]:
        """What `&`, `|` and `-` give."""
        return frozenset(blocks)
