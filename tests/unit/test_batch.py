"""Decode batches: what they say and refuse. The machine shows that they do what single operations do."""

from __future__ import annotations

from array import array

import pytest

from kvproof.allocator import (
    LRU,
    BlockManager,
    DecodeBatch,
    InvalidArgument,
    RowMerge,
    Sequence,
    SequenceStateError,
)


def prefilled(manager: BlockManager, length: int, *, start: int = 0, max_length: int | None = None) -> Sequence:
    """Tokens start, start + 1, ..., all computed, and one more."""
    seq = manager.sequence(range(start, start + length), max_length=max_length)
    manager.admit(seq)
    manager.commit(seq, length - seq.num_computed)
    seq.append(start + length)
    return seq


def batch_of(manager: BlockManager, *seqs: Sequence) -> DecodeBatch:
    batch = manager.decode_batch(len(seqs))
    assert [batch.add(seq) for seq in seqs] == [True] * len(seqs)
    return batch


def decode(batch: DecodeBatch, steps: int, tokens: list[int]) -> None:
    for _ in range(steps):
        assert batch.reserve() == []
        assert batch.commit(tokens) == []


def test_tokens_come_to_their_sequences_when_somebody_looks() -> None:
    manager = BlockManager(32, 4)
    first, second = prefilled(manager, 3), prefilled(manager, 6, start=50)
    batch = batch_of(manager, first, second)
    for i in range(10):
        assert batch.reserve() == []
        batch.commit([100 + i, 200 + i])
    assert first.tokens().tolist() == [*range(4), *range(100, 110)]
    assert second.tokens().tolist() == [*range(50, 57), *range(200, 210)]
    assert (first.num_computed, second.num_computed) == (13, 16)
    assert (len(first.block_table), len(second.block_table)) == (4, 4)
    assert list(batch) == [first, second]
    assert (len(batch), first in batch, prefilled(manager, 1) in batch, "first" in batch) == (2, True, False, False)
    manager.check()
    again = manager.sequence(second.tokens())
    assert manager.match(again) == 16  # published as they became full


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 64])
def test_long_runs_do_not_lose_the_log(block_size: int) -> None:
    """The log is cut again and again; what it still owes to a sequence stays."""
    manager = BlockManager(600 // block_size + 3, block_size)
    seqs = [prefilled(manager, 1 + i, start=1000 * i) for i in range(2)]
    batch = batch_of(manager, *seqs)
    for i in range(250):
        assert batch.reserve() == []
        batch.commit([i, 10_000 + i])
    assert len(batch._log) <= 2 * (2 * block_size + 1)
    assert seqs[0].tokens().tolist() == [0, 1, *range(250)]
    assert seqs[1].tokens().tolist() == [1000, 1001, 1002, *range(10_000, 10_250)]


def test_the_block_tables_are_kept_up_to_date() -> None:
    manager = BlockManager(64, 2)
    seqs = [prefilled(manager, n, start=100 * n) for n in (1, 4, 7)]
    batch = batch_of(manager, *seqs)
    for step in range(12):
        assert batch.reserve() == []
        tables = batch.block_tables
        assert (tables.format, tables.shape[0], tables.contiguous) == ("i", 3, True)
        for row, seq in enumerate(batch):
            assert [tables[row, entry] for entry in range(len(seq.block_table))] == list(seq.block_table)
        batch.commit([step] * len(batch))
        if step == 5:
            batch.remove(seqs[0])
            assert list(batch) == [seqs[2], seqs[1]]  # the last row takes the place
    held = batch.block_tables
    decode(batch, 30, [7, 7])  # wider than the array that is still being read
    assert batch.block_tables.shape[1] > held.shape[1]


def test_a_table_that_is_read_through_its_buffer_grows_all_the_same() -> None:
    manager = BlockManager(8, 2)
    seq = prefilled(manager, 1)
    batch = batch_of(manager, seq)
    view = memoryview(seq.block_table)
    decode(batch, 3, [7])
    assert (len(view), len(seq.block_table)) == (1, 2)


def test_rows_without_a_block_are_named_and_nobody_steps() -> None:
    manager = BlockManager(3, 2)
    seqs = [prefilled(manager, 1, start=i) for i in (10, 20)]
    batch = batch_of(manager, *seqs)
    decode(batch, 1, [1, 1])
    assert batch.reserve() == [seqs[1]]  # in order of rows: the first got the last block
    assert batch.reserve() == [seqs[1]]  # asking twice is asking once
    with pytest.raises(SequenceStateError, match=r"^1 rows have no slot for their next token: reserve first$"):
        batch.commit([1, 1])
    manager.release(seqs[1])
    assert list(batch) == [seqs[0]]
    decode(batch, 1, [1])
    assert (seqs[0].num_computed, seqs[0].num_reserved) == (3, 4)


def test_duplicates_of_one_step_are_merged() -> None:
    manager = BlockManager(16, 2)
    seqs = [prefilled(manager, 5) for _ in range(3)]
    batch = batch_of(manager, *seqs)
    assert batch.reserve() == []
    first, second, third = (seq.block_table[2] for seq in seqs)
    assert batch.commit([6, 6, 6]) == [RowMerge(seqs[1], 2, second, first), RowMerge(seqs[2], 2, third, first)]
    for row, seq in enumerate(batch):
        assert [batch.block_tables[row, entry] for entry in range(3)] == list(seq.block_table)
    assert {seq.block_table[2] for seq in seqs} == {first}


def test_leaving_gives_up_what_is_not_used() -> None:
    manager = BlockManager(8, 4)
    seq = prefilled(manager, 3)
    batch = batch_of(manager, seq)
    decode(batch, 1, [7])
    assert batch.reserve() == []  # a whole block ahead
    assert (seq.num_computed, seq.num_reserved, manager.num_used) == (4, 8, 2)
    batch.remove(seq)
    assert (seq.num_computed, seq.num_reserved, manager.num_used) == (4, 4, 1)
    manager.fork(seq)  # nothing is reserved that is not computed


def test_a_row_takes_its_tokens_along_to_another_place() -> None:
    manager = BlockManager(8, 8)
    first, last = prefilled(manager, 1), prefilled(manager, 1, start=50)
    batch = batch_of(manager, first, last)
    decode(batch, 1, [1, 2])
    decode(batch, 1, [3, 4])
    batch.remove(first)
    decode(batch, 1, [5])
    assert first.tokens().tolist() == [0, 1, 1, 3]
    assert last.tokens().tolist() == [50, 51, 2, 4, 5]


def test_slots_that_were_reserved_ahead_are_used_first() -> None:
    """They may end inside a block, which is this sequence's own to its end."""
    manager = BlockManager(3, 4)
    seq = prefilled(manager, 3, max_length=12)
    assert manager.reserve(seq, 1, lookahead=6)
    assert seq.num_reserved == 10
    batch = batch_of(manager, seq)
    for _ in range(9):
        assert batch.reserve() == []
        batch.commit([5])
        manager.check()
    assert (seq.num_computed, seq.num_reserved, len(seq.block_table)) == (12, 12, 3)


def test_who_looks_at_a_row_in_the_middle_of_a_step_changes_nothing() -> None:
    class Curious(LRU):
        def remove(self, block: int) -> None:
            seen.extend(len(seq) for seq in manager.sequences)
            super().remove(block)

    seen: list[int] = []
    manager = BlockManager(16, 2, policy=Curious())
    old = manager.sequence([0, 1])
    manager.admit(old)
    manager.commit(old, 2)
    manager.release(old)
    seqs = [prefilled(manager, 1), prefilled(manager, 1), prefilled(manager, 1, start=9)]
    for seq in seqs[:2]:
        manager.truncate(seq, 1)
        seq.append(1)
    batch = batch_of(manager, *seqs)
    seen.clear()
    assert batch.reserve() == []
    assert len(batch.commit([6, 7, 8])) == 2  # merged into what was cached, which leaves the list for that
    assert seen
    assert [seq.tokens().tolist() for seq in seqs] == [[0, 1, 6], [0, 1, 7], [9, 10, 8]]
    manager.check()


def test_no_memory_for_wider_tables_leaves_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: DecodeBatch, num_blocks: int) -> None:
        raise MemoryError

    manager = BlockManager(16, 2)
    seq, late = prefilled(manager, 1), prefilled(manager, 5, start=50)
    batch = manager.decode_batch(2)
    assert batch.add(seq)
    decode(batch, 1, [7])
    before = manager.snapshot()
    monkeypatch.setattr(DecodeBatch, "_fit", fails)
    for call in (lambda: batch.add(late), batch.reserve):
        with pytest.raises(MemoryError):
            call()
        assert manager.snapshot() == before
        assert list(batch) == [seq]
    monkeypatch.undo()
    assert batch.add(late)
    decode(batch, 4, [1, 2])
    manager.check()


def test_no_slot_past_max_length() -> None:
    manager = BlockManager(8, 4)
    seq = prefilled(manager, 1, max_length=3)
    batch = batch_of(manager, seq)
    decode(batch, 2, [7])
    assert (seq.num_computed, seq.num_reserved, len(seq)) == (3, 3, 4)
    with pytest.raises(InvalidArgument, match="has its max_length 3 of tokens: it must leave the batch"):
        batch.reserve()
    batch.remove(seq)
    with pytest.raises(InvalidArgument, match="has its max_length 3 of tokens: nothing is left to decode"):
        batch.add(seq)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("window", range(1, 7))
def test_what_a_window_leaves_is_given_back_at_once(size: int, window: int) -> None:
    manager = BlockManager(8, size, window=window)
    seq = prefilled(manager, 1)
    batch = batch_of(manager, seq)
    for length in range(2, 40):
        assert batch.reserve() == []
        batch.commit([7])
        num_left = max(0, length - window + 1) // size
        table = list(seq.block_table)
        assert [block == 0 for block in table] == [i < num_left for i in range(len(table))]
        assert [batch.block_tables[0, i] for i in range(len(table))] == table
        assert manager.num_used == len(table) - num_left


def test_a_batch_says_what_it_refuses() -> None:
    manager = BlockManager(8, 2)
    seq, other = prefilled(manager, 1), prefilled(manager, 1, start=9)
    batch = batch_of(manager, seq)
    for bad, why in ([[1, 2], "2 tokens for a batch of 1 rows"], [[-1], "-1 is no token id"], [[], "0 tokens"]):
        with pytest.raises(InvalidArgument, match=why):
            batch.commit(bad)
    with pytest.raises(SequenceStateError, match="the batch is full: it has 1 rows"):
        batch.add(other)
    with pytest.raises(SequenceStateError, match="is in a decode batch, which must remove it first"):
        batch.add(seq)
    with pytest.raises(SequenceStateError, match="is in a decode batch: its tokens come with the batch's commit"):
        seq.append(1)
    with pytest.raises(SequenceStateError, match="is not in this batch"):
        batch.remove(other)
    other.append(1)
    with pytest.raises(SequenceStateError, match="it must have exactly one token left to compute"):
        manager.decode_batch(1).add(other)
    with pytest.raises(SequenceStateError, match="belongs to another manager"):
        BlockManager(1, 1).decode_batch(1).add(seq)
    assert batch.capacity == 1
    with pytest.raises(InvalidArgument, match=r"^capacity is 0, must be an integer from 1 to"):
        manager.decode_batch(0)
    assert (len(seq), seq.num_computed, seq.num_reserved) == (2, 1, 2)


def test_a_hash_that_fails_changes_nothing() -> None:
    def hash_block(tokens: bytes, parent: int) -> int:
        if failing:
            raise RuntimeError("no hash today")
        return parent + 1

    failing: list[int] = []
    manager = BlockManager(8, 2, hash_block=hash_block)
    seqs = [prefilled(manager, 1, start=i) for i in (10, 20)]
    batch = batch_of(manager, *seqs)
    failing.append(1)
    before = manager.snapshot()
    with pytest.raises(RuntimeError, match="no hash today"):
        batch.commit([1, 2])
    assert manager.snapshot() == before
    failing.clear()
    decode(batch, 1, [1, 2])
    assert [seq.num_computed for seq in seqs] == [2, 2]


def test_tokens_may_come_as_an_array() -> None:
    manager = BlockManager(8, 2)
    seq = prefilled(manager, 1)
    batch = batch_of(manager, seq)
    sampled = array("i", [7])
    assert batch.reserve() == []
    batch.commit(sampled)
    sampled[0] = 8
    assert seq.tokens().tolist() == [0, 1, 7]
