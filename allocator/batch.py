"""Decoding many sequences together, at a cost that follows what changed and not how many they are."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvproof.allocator import loops
from kvproof.allocator.errors import InvalidArgument, SequenceStateError, require_int
from kvproof.allocator.pool import MAX_BLOCKS
from kvproof.allocator.sequence import Sequence, token_array

if TYPE_CHECKING:
    from kvproof.allocator.manager import BlockManager


class RowMerge(NamedTuple):
    """Entry `entry` of `seq`'s block table named `old`, a duplicate that is free again, and now names `new`."""

    seq: Sequence
    entry: int
    old: int
    new: int


class DecodeBatch:
    """Sequences that decode in step, one token each. Made by `BlockManager.decode_batch`.

        batch.add(seq)            a prefilled sequence, its next token known; False when there is no block for it
        batch.reserve()           a slot for every row's next token; returns the rows for which there is no block
        batch.commit(sampled)     every row's KV is written, and these tokens come next
        batch.remove(seq)         or `manager.release(seq)`

    It does what `reserve`, `commit` and `append` do for each sequence, but counts the step once for all of them. A
    sequence is brought up to date when there is something to do for it, which is when it has used its slots up or its
    window leaves a block behind, and when somebody looks at it. Until then its tokens lie in the batch's log.

    While a sequence is in a batch, other operations that would move it raise `SequenceStateError`; `pin`, `launch` and
    `release` are allowed. To look at a row may bring it up to date, so that it is an operation too: not for a second
    thread. `capacity` costs 4 bytes of log for each step of a block, `max_log_steps` at most.
    """

    max_log_steps = 64

    def __init__(self, manager: BlockManager, capacity: int) -> None:
        require_int("capacity", capacity, 1, MAX_BLOCKS)
        self._capacity = capacity
        self._manager = manager
        self._rows: list[Sequence] = []
        self._num_steps = 0
        # Sequences by the step after which there is something to do for them.
        self._due: dict[int, dict[Sequence, None]] = {}
        self._starved: dict[Sequence, None] = {}  # those without a slot for their next token
        # `capacity` tokens for each of the last steps, written around and around; a column is a row's tokens. No row is
        # further behind than a block, nor than the log goes back.
        self._log_steps = min(manager.block_size, self.max_log_steps)
        self._log = array("i", bytes(4 * capacity * self._log_steps))
        self._num_columns = 1
        self._tables = array("i", bytes(4 * capacity))

    @property
    def capacity(self) -> int:
        """The most rows there can be."""
        return self._capacity

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences in the order of their rows."""
        return iter(tuple(self._rows))

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and seq._batch is self

    @property
    def block_tables(self) -> memoryview:
        """The block tables of the rows, int32 [capacity, columns], kept up to date entry by entry. For reading.

        Row r belongs to the r-th sequence; rows from `len(batch)` on, and entries past the end of a sequence's own
        table, mean nothing. The array is replaced when a table outgrows its columns.
        """
        return memoryview(self._tables).cast("B").cast("i", (self._capacity, self._num_columns))

    def add(self, seq: Sequence) -> bool:
        """Give `seq` the last row, and slots to the end of the block that its next token is in.

        False, and no change, when the pool has no block for that. After a fork it may order a copy, see
        `BlockManager.take_copies`. Raises `SequenceStateError` unless the sequence is admitted with exactly one token
        left to compute, and there is a row for it; `InvalidArgument` for one that has its `max_length` of tokens.
        """
        manager = self._manager
        manager._movable(seq)
        if len(seq._tokens) != seq._num_computed + 1:
            raise SequenceStateError(f"{seq} can't decode in a batch: it must have exactly one token left to compute")
        if len(self._rows) == self._capacity:
            raise SequenceStateError(f"the batch is full: it has {self._capacity} rows")
        if seq._num_computed == seq.max_length:
            raise InvalidArgument(f"{seq} has its max_length {seq.max_length} of tokens: nothing is left to decode")
        # To the end of a block, also of slots that were reserved ahead: later ones come by whole blocks.
        num_blocks = manager._blocks_for(max(seq._num_computed + 1, seq._num_reserved))
        self._fit(num_blocks)
        if not manager._reserve(seq, manager._within(seq, num_blocks * manager.block_size)):
            return False
        seq._batch = self  # pyright: ignore[reportAttributeAccessIssue] - by folder, it sees this class twice
        seq._row, seq._settled_at = len(self._rows), self._num_steps
        self._rows.append(seq)
        self._write_row(seq)
        self._schedule(seq)
        return True

    def remove(self, seq: Sequence) -> None:
        """Give `seq` back to the operations on one sequence; slots that it has not used are given up.

        The last row takes its place. Raises `SequenceStateError` when it is not in this batch.
        """
        if seq not in self:
            raise SequenceStateError(f"{seq} is not in this batch")
        self._remove(seq)

    def _remove(self, seq: Sequence) -> None:
        self._settle(seq)
        if seq in self._starved:
            del self._starved[seq]
        else:
            del self._due[seq._due][seq]
        last = self._rows.pop()
        if last is not seq:
            self._settle(last)
            last._row = seq._row
            self._rows[last._row] = last
            self._write_row(last)
        seq._batch = None
        self._manager._keep_slots(seq, seq._num_computed)

    def reserve(self) -> list[Sequence]:
        """Give every row a slot for its next token, in order, and return those for which the pool has no block.

        When there are some, `remove` or release sequences and ask again. Raises `InvalidArgument`, and changes nothing,
        when a sequence is at its `max_length`. Such a one has a token more than that, the last one sampled, which needs
        no slot: `truncate` it before it is admitted again.
        """
        if not self._starved:
            return []
        manager = self._manager
        if loops.compiled is not None and manager.window is None:
            left: list[Sequence] | None = loops.compiled.reserve_batch(self, manager.pool, manager.block_size)
            if left is not None:
                return left
        for seq in self._starved:
            if seq._num_computed == seq.max_length:
                raise InvalidArgument(f"{seq} has its max_length {seq.max_length} of tokens: it must leave the batch")
        self._fit(1 + max(len(seq._table) for seq in self._starved))
        starved = sorted(self._starved, key=_row)
        served = starved[: manager.pool.num_free]
        for seq, block in zip(served, manager.pool.take(len(served)), strict=True):
            self._serve_row(seq, block)
        starved = starved[len(served) :]
        self._starved = dict.fromkeys(starved)
        return starved

    def _serve_row(self, seq: Sequence, block: int) -> None:
        """Slots for a row that has used its last block up."""
        self._manager._add_blocks(seq, [block])
        seq._num_reserved = self._manager._within(seq, seq._num_reserved + self._manager.block_size)
        self._tables[seq._row * self._num_columns + len(seq._table) - 1] = block
        self._schedule(seq)

    def commit(self, tokens: Iterable[int]) -> list[RowMerge]:
        """The KV of every row's next token is written, and `tokens`, one for each row in order, come after them.

        Blocks that are full now are published. Returns the table entries that now name another block of the same
        content, see `BlockManager.commit`. Raises `InvalidArgument` for tokens that are none or too many or too few,
        and `SequenceStateError` while a row has no slot.
        """
        manager = self._manager
        if loops.compiled is not None:
            hash_block = manager._prefixes.hash_block if manager.prefix_caching else None
            plain = manager.window is None and manager._prefixes.events is None
            merges: list[RowMerge] | None = loops.compiled.commit_batch(
                self, tokens, manager.index, manager.pool, hash_block, manager.block_size, manager._counters, plain
            )
            if merges is not None:
                return merges
        sampled = token_array(tokens)
        if len(sampled) != len(self._rows):
            raise InvalidArgument(f"{len(sampled)} tokens for a batch of {len(self._rows)} rows")
        if self._starved:
            raise SequenceStateError(f"{len(self._starved)} rows have no slot for their next token: reserve first")
        rows = sorted(self._due.get(self._num_steps + 1, ()), key=_row)
        manager.index.make_room(2 * len(rows))  # as many blocks, and perhaps roots
        for seq in rows:
            self._prepare_row(seq)
        at = self._num_steps % self._log_steps * self._capacity
        self._log[at : at + len(sampled)] = sampled
        self._num_steps += 1
        self._due.pop(self._num_steps, None)
        merges = []
        for seq in rows:
            self._publish_row(seq, merges)
        return merges

    def _prepare_row(self, seq: Sequence) -> None:
        """Bring a row up to date, and make ready for its next token. What can fail fails here."""
        self._settle(seq)
        size = self._manager.block_size
        self._manager._prepare(seq, seq._num_computed // size, (seq._num_computed + 1) // size)

    def _publish_row(self, seq: Sequence, merges: list[RowMerge]) -> None:
        """A row has got the token that there was to do something for; adds to `merges`."""
        manager, size = self._manager, self._manager.block_size
        self._settle(seq)
        for merge in manager._publish(seq, (seq._num_computed - 1) // size, seq._num_computed // size):
            merges.append(RowMerge(seq, *merge))
            self._tables[seq._row * self._num_columns + merge.entry] = merge.new
        if manager.window is not None:
            self._write_row(seq)
        if seq._num_reserved == seq._num_computed:
            self._starved[seq] = None
        else:
            self._schedule(seq)

    def _is_in_order(self, seq: Sequence) -> bool:
        """Whether the batch knows where one of its sequences is, when it is due, and what its table is. For audits."""
        filed = seq in self._starved or seq in self._due.get(seq._due, ())
        start = seq._row * self._num_columns
        return self._rows[seq._row] is seq and filed and self._tables[start : start + len(seq._table)] == seq._table

    def _look_at(self, seq: Sequence) -> None:
        """Somebody looks at one of the batch's sequences: bring it up to date."""
        guard = self._manager._guard
        if guard is not None:
            guard.check_thread("a look at a sequence in a decode batch")
        self._settle(seq)

    def _settle(self, seq: Sequence) -> None:
        """Bring one of the batch's sequences up to date."""
        behind = self._num_steps - seq._settled_at
        if behind:
            column, start = self._log[seq._row :: self._capacity], seq._settled_at % self._log_steps
            seq._tokens += (column + column)[start : start + behind]
            seq._num_computed += behind
            seq._settled_at = self._num_steps

    def _schedule(self, seq: Sequence) -> None:
        window, size = self._manager.window, self._manager.block_size
        left = min(seq._num_reserved - seq._num_computed, size - seq._num_computed % size, self._log_steps)
        if window is not None:
            invisible = seq._num_computed - window + 1
            left = min(left, max(size, (invisible // size + 1) * size) - invisible)
        seq._due = self._num_steps + left
        bucket = self._due.get(seq._due)
        if bucket is None:
            self._due[seq._due] = {seq: None}
        else:
            bucket[seq] = None

    def _write_row(self, seq: Sequence) -> None:
        start = seq._row * self._num_columns
        self._tables[start : start + len(seq._table)] = seq._table

    def _fit(self, num_blocks: int) -> None:
        """Columns for tables of `num_blocks`, and some more."""
        if num_blocks <= self._num_columns:
            return
        width, num_columns = self._num_columns, num_blocks + num_blocks // 2
        tables = array("i", bytes(4 * self._capacity * num_columns))
        for row in range(len(self._rows)):
            start = row * num_columns
            tables[start : start + width] = self._tables[row * width : (row + 1) * width]
        self._tables, self._num_columns = tables, num_columns


def _row(seq: Sequence) -> int:
    return seq._row
