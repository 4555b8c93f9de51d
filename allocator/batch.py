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
    thread. `capacity` costs 4 bytes of log a step, written anew each step and kept for a block's worth of steps.
    """

    def __init__(self, manager: BlockManager, capacity: int) -> None:
        require_int("capacity", capacity, 1, MAX_BLOCKS)
        self.capacity = capacity
        self._manager = manager
        self._rows: list[Sequence] = []
        self._num_steps = 0
        # Sequences by the step after which there is something to do for them.
        self._due: dict[int, dict[Sequence, None]] = {}
        self._starved: dict[Sequence, None] = {}  # those without a slot for their next token
        # `capacity` tokens for each step since `_log_start`; a column is a row's tokens.
        self._log = array("i")
        self._log_start = 0
        self._padding = array("i", bytes(4 * capacity))
        self._tables = array("i")
        self._num_columns = 0
        self._fit(1)

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
        return memoryview(self._tables).cast("B").cast("i", (self.capacity, self._num_columns))

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
        if len(self._rows) == self.capacity:
            raise SequenceStateError(f"the batch is full: it has {self.capacity} rows")
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
            bucket = self._due[seq._due]
            del bucket[seq]
            if not bucket:
                del self._due[seq._due]
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
        longest = -1 if loops.compiled is None else loops.compiled.longest_table(self._starved)
        if longest < 0:  # or one is at its end
            for seq in self._starved:
                if seq._num_computed == seq.max_length:
                    raise InvalidArgument(
                        f"{seq} has its max_length {seq.max_length} of tokens: it must leave the batch"
                    )
            longest = max(len(seq._table) for seq in self._starved)
        self._fit(1 + longest)
        manager = self._manager
        starved = sorted(self._starved, key=_row)
        served = starved[: manager.pool.num_free]
        blocks = manager.pool.take(len(served))
        done = 0
        if loops.compiled is not None and manager.window is None:
            done = loops.compiled.serve_rows(self, served, blocks, manager.block_size)
        for seq, block in zip(served[done:], blocks[done:], strict=True):
            manager._add_block(seq, block)
            self._tables[seq._row * self._num_columns + len(seq._table) - 1] = block
            self._schedule(seq)
        starved = starved[len(served) :]
        self._starved = dict.fromkeys(starved)
        return starved

    def commit(self, tokens: Iterable[int]) -> list[RowMerge]:
        """The KV of every row's next token is written, and `tokens`, one for each row in order, come after them.

        Blocks that are full now are published. Returns the table entries that now name another block of the same
        content, see `BlockManager.commit`. Raises `InvalidArgument` for tokens that are none or too many or too few,
        and `SequenceStateError` while a row has no slot.
        """
        sampled = token_array(tokens)
        if len(sampled) != len(self._rows):
            raise InvalidArgument(f"{len(sampled)} tokens for a batch of {len(self._rows)} rows")
        if self._starved:
            raise SequenceStateError(f"{len(self._starved)} rows have no slot for their next token: reserve first")
        manager, step = self._manager, self._num_steps + 1
        rows = sorted(self._due.get(step, ()), key=_row)
        manager.index.make_room(2 * len(rows))  # as many blocks, and perhaps roots
        due = self._prepared(rows)
        self._write_log(sampled)
        self._due.pop(step, None)
        self._num_steps = step
        merges: list[RowMerge] = []
        for seq, keys in self._not_compiled(due, sampled):
            self._settle(seq)
            for merge in manager._publish(seq, keys):
                merges.append(RowMerge(seq, *merge))
                self._tables[seq._row * self._num_columns + merge.entry] = merge.new
            if manager.window is not None:
                self._write_row(seq)
            if seq._num_reserved == seq._num_computed:
                self._starved[seq] = None
            else:
                self._schedule(seq)
        return merges

    def _prepared(self, rows: list[Sequence]) -> list[tuple[Sequence, list[bytes]]]:
        """The rows, brought up to date, with the keys of the blocks that their next token fills."""
        manager = self._manager
        due: list[tuple[Sequence, list[bytes]]] = []
        hash_block = manager._prefixes.hash_block if manager.prefix_caching else None
        while len(due) < len(rows):
            if loops.compiled is not None:
                due += loops.compiled.prepare_rows(self, rows, len(due), hash_block, manager.block_size)
            for seq in rows[len(due) : len(due) + 1]:
                self._settle(seq)
                due.append((seq, manager._prepare(seq, 1)))
        return due

    def _not_compiled(
        self, due: list[tuple[Sequence, list[bytes]]], sampled: array[int]
    ) -> Iterator[tuple[Sequence, list[bytes]]]:
        """The pairs that `commit` has to see to itself, one by one as it comes to them."""
        manager = self._manager
        plain = manager.window is None and manager._prefixes.events is None
        done = 0
        while done < len(due):
            if loops.compiled is not None and plain:
                done = loops.compiled.commit_rows(
                    self, manager.index, manager.pool, due, done, sampled, manager.block_size, manager._counters
                )
            yield from due[done : done + 1]
            done += 1

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
            first = (seq._settled_at - self._log_start) * self.capacity + seq._row
            seq._tokens += self._log[first :: self.capacity]
            seq._num_computed += behind
            seq._settled_at = self._num_steps

    def _write_log(self, sampled: array[int]) -> None:
        block_of_steps = self.capacity * self._manager.block_size
        if len(self._log) >= 2 * block_of_steps:  # no row is further behind than a block
            del self._log[:-block_of_steps]
            self._log_start = self._num_steps - self._manager.block_size
        self._log += sampled + self._padding[len(sampled) :]

    def _schedule(self, seq: Sequence) -> None:
        window, size = self._manager.window, self._manager.block_size
        left = min(seq._num_reserved - seq._num_computed, size - seq._num_computed % size)
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
        tables = array("i", bytes(4 * self.capacity * num_columns))
        for row in range(len(self._rows)):
            start = row * num_columns
            tables[start : start + width] = self._tables[row * width : (row + 1) * width]
        self._tables, self._num_columns = tables, num_columns


def _row(seq: Sequence) -> int:
    return seq._row
