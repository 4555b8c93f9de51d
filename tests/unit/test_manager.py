"""The manager: exact refusals that change nothing, orders to the block, and how little work a step is.

What it does over time is the state machine's part (test_manager_machine.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from kvproof.allocator import (
    Admission,
    BlockManager,
    InvalidArgument,
    Merge,
    Namespace,
    Sequence,
    SequenceStateError,
    xxh3_chained,
)
from kvproof.fuzz.machines.harness import fingerprint

BAD_COUNTS = [-1, -(2**40), 2**31, 10**30, True, 1.0, "1", None]


def running(manager: BlockManager, length: int, computed: int = 0, **options: int) -> Sequence:
    seq = manager.sequence(range(length), **options)
    assert manager.admit(seq) is Admission.NOW
    manager.commit(seq, computed)
    return seq


# ---- refusals


@pytest.mark.parametrize("value", [0, -1, 2**31, True, 4.0, "4", None])
def test_block_size_out_of_range(value: int) -> None:
    expected = f"block_size is {value!r}, must be an integer from 1 to 2147483647"
    with pytest.raises(InvalidArgument, match=re.escape(expected)):
        BlockManager(4, value)


@pytest.mark.parametrize("value", [0, -1, 2**31, True, 4.0])
def test_num_blocks_out_of_range(value: int) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"num_blocks is {value!r}, must be")):
        BlockManager(value, 4)


@pytest.mark.parametrize("value", BAD_COUNTS)
def test_counts_out_of_range(value: int) -> None:
    manager = BlockManager(8, 2)
    seq = running(manager, 7, 3, max_length=12)
    before = fingerprint(manager)
    with pytest.raises(InvalidArgument) as error:
        manager.reserve(seq, value)
    assert str(error.value) == f"n is {value!r}, must be an integer from 0 to 9"
    with pytest.raises(InvalidArgument) as error:
        manager.commit(seq, value)
    assert str(error.value) == f"n is {value!r}, must be an integer from 0 to 4"
    assert fingerprint(manager) == before


@pytest.mark.parametrize("value", [0, *BAD_COUNTS[:-1]])
def test_limit_out_of_range(value: int) -> None:
    manager = BlockManager(8, 2)
    seq = manager.sequence([1])
    for ask in (manager.can_admit, manager.admit):
        with pytest.raises(InvalidArgument) as error:
            ask(seq, value)
        assert str(error.value) == f"limit is {value!r}, must be an integer from 1 to 2147483647"
    assert manager.num_used == 0


def test_the_limits_of_reserve_and_commit_are_exact() -> None:
    manager = BlockManager(8, 2)
    seq = running(manager, 3, 3, max_length=5)
    assert manager.reserve(seq, 2) is True
    with pytest.raises(InvalidArgument, match="n is 3, must be an integer from 0 to 2"):
        manager.reserve(seq, 3)  # declared
    with pytest.raises(InvalidArgument, match="n is 1, must be an integer from 0 to 0"):
        manager.commit(seq, 1)  # reserved, and not known
    seq.extend([3, 4, 5])
    with pytest.raises(InvalidArgument, match="n is 3, must be an integer from 0 to 2"):
        manager.commit(seq, 3)  # known, and not reserved
    manager.commit(seq, 2)
    assert seq.num_computed == 5


def test_an_undeclared_length_ends_where_int32_does() -> None:
    manager = BlockManager(8, 2)
    seq = running(manager, 3)
    assert manager.reserve(seq, 2**31 - 1) is False
    with pytest.raises(InvalidArgument, match=f"must be an integer from 0 to {2**31 - 1}"):
        manager.reserve(seq, 2**31)


def test_a_sequence_that_outgrew_its_declaration() -> None:
    manager = BlockManager(8, 2)
    seq = manager.sequence([1, 2], max_length=3)
    seq.extend([3, 4])
    for ask in (manager.can_admit, manager.admit):
        with pytest.raises(InvalidArgument, match=r"^<Sequence of 4 tokens, .*> has outgrown its max_length 3$"):
            ask(seq)
    assert manager.num_used == 0


OPERATIONS: dict[str, Callable[[BlockManager, Sequence], object]] = {
    "match": lambda manager, seq: manager.match(seq),
    "can_admit": lambda manager, seq: manager.can_admit(seq),
    "admit": lambda manager, seq: manager.admit(seq),
    "reserve": lambda manager, seq: manager.reserve(seq, 0),
    "commit": lambda manager, seq: manager.commit(seq, 0),
    "release": lambda manager, seq: manager.release(seq),
    "fork": lambda manager, seq: manager.fork(seq),
    "truncate": lambda manager, seq: manager.truncate(seq, 1),
    "pin": lambda manager, seq: manager.pin(seq),
    "launch": lambda manager, seq: manager.launch([seq]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_sequence_of_another_manager(name: str) -> None:
    manager, other = BlockManager(8, 2), BlockManager(8, 2)
    running(manager, 3, 2)
    foreign = running(other, 3, 2)
    before, before_other = fingerprint(manager), fingerprint(other)
    with pytest.raises(SequenceStateError, match=r"^<Sequence of 3 tokens, .*> belongs to another manager$"):
        OPERATIONS[name](manager, foreign)
    assert (fingerprint(manager), fingerprint(other)) == (before, before_other)


@pytest.mark.parametrize("name", ["reserve", "commit", "release", "fork", "truncate", "pin", "launch"])
def test_a_sequence_that_is_not_admitted(name: str) -> None:
    manager = BlockManager(8, 2)
    running(manager, 3, 2)
    before = fingerprint(manager)
    with pytest.raises(SequenceStateError, match=r"^<Sequence of 1 tokens, .*> is not admitted$"):
        OPERATIONS[name](manager, manager.sequence([1]))
    assert fingerprint(manager) == before


@pytest.mark.parametrize("name", ["can_admit", "admit"])
def test_a_sequence_that_is_admitted_already(name: str) -> None:
    manager = BlockManager(8, 2)
    seq = running(manager, 3, 2)
    before = fingerprint(manager)
    with pytest.raises(SequenceStateError, match=r"^<Sequence of 3 tokens, .*> is admitted already$"):
        OPERATIONS[name](manager, seq)
    assert fingerprint(manager) == before


def test_a_table_that_someone_reads_does_not_stop_its_growth() -> None:
    """An array whose buffer is exported, to a tensor say, can't be resized; the blocks taken for it would leak."""
    manager = BlockManager(4, 2)
    seq = running(manager, 2)
    with memoryview(seq.block_table) as view:
        assert manager.reserve(seq, 5) is True
        assert (view.tolist(), list(seq.block_table)) == ([0], [0, 1, 2])
        manager.release(seq)
    manager.check()
    assert manager.num_used == 0


# ---- which block


def test_admission_in_order_and_usage() -> None:
    manager = BlockManager(6, 2)
    first, second, third = running(manager, 3), running(manager, 1), running(manager, 2)
    assert (manager.num_blocks, manager.num_used, manager.num_free) == (6, 4, 2)
    manager.release(second)
    manager.admit(second)
    assert list(manager.sequences) == [first, third, second]
    assert [list(seq.block_table) for seq in manager.sequences] == [[0, 1], [3], [2]]


def test_eviction_order_to_the_block() -> None:
    """Contentless blocks, last released first; then sequences in order of release, each from its tail."""
    manager = BlockManager(8, 2)
    old = running(manager, 5, 5)  # blocks 0 1 2, the last one half full
    new = manager.sequence([7, 7, 8, 8], namespace=Namespace(salt="x"))
    manager.admit(new)  # 3 4
    manager.commit(new, 4)
    rest = manager.sequence([9] * 6)  # 5 6 7, nothing computed
    manager.admit(rest)
    for seq in (new, rest, old):
        manager.release(seq)
    assert manager.pool.free_lists() == ([2, 5, 6, 7], [4, 3, 1, 0])
    taker = manager.sequence([6] * 16)
    manager.admit(taker)
    assert list(taker.block_table) == [2, 5, 6, 7, 4, 3, 1, 0]


def test_a_copy_in_use_is_preferred_to_a_free_one() -> None:
    """A referenced copy costs no free block, so the last free one decides here about NOW and LATER."""
    manager = BlockManager(4, 2, merge_duplicates=False)
    first, second = running(manager, 3), running(manager, 3)
    for seq in (first, second):
        manager.commit(seq, 3)
    manager.release(first)
    manager.pool.take()  # leaves the free copy alone on the free list
    third = manager.sequence([0, 1])
    third.append(2)
    assert manager.num_free == 1
    assert manager.admit(third) is Admission.NOW
    assert third.block_table[0] == second.block_table[0]


@pytest.mark.parametrize("merge", [True, False])
def test_duplicates_of_one_step(merge: bool) -> None:
    manager = BlockManager(6, 2, merge_duplicates=merge)
    first, second = running(manager, 4), running(manager, 4)
    manager.commit(first, 4)
    assert manager.commit(second, 1) == []
    assert manager.commit(second, 3) == ([Merge(0, 2, 0), Merge(1, 3, 1)] if merge else [])
    assert list(second.block_table) == ([0, 1] if merge else [2, 3])
    assert manager.num_used == (2 if merge else 4)
    assert [node.blocks for node in manager.index.nodes()] == ([(0,), (1,)] if merge else [(0, 2), (1, 3)])


def test_a_block_whose_prefix_was_withdrawn_is_not_published() -> None:
    """By hand: no operation of the manager's withdraws what an admitted sequence reads."""
    manager = BlockManager(4, 2)
    seq = running(manager, 4, 2)
    node = manager.content(seq.block_table[0])
    assert node is not None
    manager.index.remove(seq.block_table[0], node.number)
    manager.pool.withdraw(seq.block_table[0])
    assert manager.commit(seq, 2) == []
    assert list(manager.index.nodes()) == []
    manager.check()


def test_questions_change_nothing() -> None:
    manager = BlockManager(3, 2)
    seq = running(manager, 5, 4)
    manager.release(seq)
    before = fingerprint(manager)
    assert manager.match(seq) == 4
    assert [manager.can_admit(seq, limit) for limit in (None, 1, 99)] == [Admission.NOW] * 3
    assert manager.can_admit(manager.sequence([0] * 7)) is Admission.NEVER
    assert fingerprint(manager) == before


@pytest.mark.parametrize(("limit", "reserved"), [(1, 5), (2, 6), (3, 7), (4, 7), (None, 7)])
def test_limit_counts_from_the_hit(limit: int | None, reserved: int) -> None:
    manager = BlockManager(8, 2)
    manager.release(running(manager, 4, 4))
    seq = manager.sequence(range(7))
    assert manager.admit(seq, limit) is Admission.NOW
    assert (seq.num_cached, seq.num_reserved, len(seq.block_table)) == (4, reserved, -(-reserved // 2))


def test_no_caching_no_hits() -> None:
    manager = BlockManager(8, 2, prefix_caching=False)
    first, second = running(manager, 4, 4), running(manager, 4, 4)
    assert not set(first.block_table) & set(second.block_table)
    manager.release(first)
    assert manager.match(first) == 0
    assert manager.pool.free_lists()[1] == list(manager.index.nodes()) == []


# ---- how much work


class Counting:
    """The prefix hash, counting its calls by what they hash."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[bytes, int]] = Counter()

    def __call__(self, tokens: bytes, parent_hash: int) -> int:
        self.calls[tokens, parent_hash] += 1
        return xxh3_chained(tokens, parent_hash)


def test_each_full_block_is_hashed_once_in_a_sequences_life() -> None:
    hash_block = Counting()
    manager = BlockManager(16, 4, hash_block=hash_block)
    seq = manager.sequence(range(10))
    for _ in range(3):  # admitted, asked about, preempted and admitted again, each time longer
        manager.can_admit(seq)
        manager.match(seq)
        manager.admit(seq)
        manager.commit(seq, len(seq) - seq.num_computed)
        seq.extend(range(6))
        manager.reserve(seq, 6)
        manager.commit(seq, 6)
        manager.release(seq)
    assert len(seq) == 28
    assert len(hash_block.calls) == 1 + 28 // 4  # the namespace's root, and the full blocks
    assert set(hash_block.calls.values()) == {1}


def test_nothing_is_hashed_without_prefix_caching() -> None:
    hash_block = Counting()
    manager = BlockManager(16, 2, prefix_caching=False, hash_block=hash_block)
    seq = running(manager, 9, 9)
    manager.match(manager.sequence(range(9)))
    manager.release(seq)
    assert not hash_block.calls


@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_decode_step_within_a_block_neither_hashes_nor_takes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One `take` where a block begins, one hash and one place in the index where it ends, and nothing between."""
    hash_block, taken, made_room = Counting(), list[int](), list[int]()
    manager = BlockManager(100, size, hash_block=hash_block)
    take, make_room = manager.pool.take, manager.index.make_room
    monkeypatch.setattr(manager.pool, "take", lambda n: [taken.append(n), take(n)][1])
    monkeypatch.setattr(manager.index, "make_room", lambda n: [made_room.append(n), make_room(n)][1])
    seq = running(manager, 1, 1)
    for position in range(1, 50):
        hash_block.calls.clear()
        taken.clear()
        made_room.clear()
        seq.append(7)
        assert manager.reserve(seq) is True
        assert taken == ([1] if position % size == 0 else [])
        manager.commit(seq)
        ends_block = (position + 1) % size == 0
        first_block = position + 1 == size  # its hash needs the namespace's root too
        assert hash_block.calls.total() == ends_block + first_block
        assert len(made_room) == ends_block


def test_a_salt_of_any_characters() -> None:
    """Half a surrogate pair can't be encoded as UTF-8; it must not break a commit half-way."""
    manager = BlockManager(4, 1)
    seq = manager.sequence([1], namespace=Namespace(salt="\ud800"))
    assert manager.admit(seq) is Admission.NOW
    manager.commit(seq)
    assert manager.match(manager.sequence([1, 2], namespace=Namespace(salt="\ud800"))) == 1


def test_two_managers_do_not_mix() -> None:
    """A launch that names one foreign sequence launches none, and receipts are good where they were written."""
    here, there = BlockManager(4, 1), BlockManager(4, 1)
    mine, theirs = running(here, 2, 2), running(there, 2, 2)
    states = fingerprint(here), fingerprint(there)
    with pytest.raises(SequenceStateError, match="belongs to another manager"):
        here.launch([mine, theirs])
    assert (fingerprint(here), fingerprint(there)) == states
    assert here.launch([mine]) == 0  # no step number was used up
    pin = here.pin(mine)
    states = fingerprint(here), fingerprint(there)
    with pytest.raises(SequenceStateError, match="another manager's"):
        there.unpin(pin)
    with pytest.raises(SequenceStateError, match="none is in flight"):
        there.retire(0)
    assert (fingerprint(here), fingerprint(there)) == states


def test_all_sequences_can_be_released_in_a_loop_over_them() -> None:
    manager = BlockManager(8, 2)
    seqs = [running(manager, 2) for _ in range(3)]
    assert manager.sequences == tuple(seqs)
    for seq in manager.sequences:
        manager.release(seq)
    assert manager.sequences == ()


def test_a_fork_copies_its_tokens_without_reading_them(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = BlockManager(8, 2)
    seq = running(manager, 5, 5, max_length=6)
    monkeypatch.setattr("kvproof.allocator.sequence.token_array", None)
    child = manager.fork(seq)
    monkeypatch.undo()
    child.append(9)
    assert (seq.tokens().tolist(), child.tokens().tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 9])
    assert (child.max_length, child.num_computed, child.num_reserved, child.num_cached) == (6, 5, 5, 0)
    assert child.block_table is not seq.block_table


def test_a_fork_of_a_sequence_that_outgrew_its_declaration() -> None:
    manager = BlockManager(8, 2)
    seq = running(manager, 3, 3, max_length=3)
    seq.append(3)
    before = fingerprint(manager)
    with pytest.raises(InvalidArgument, match=r"^<Sequence of 4 tokens, .*> has outgrown its max_length 3$"):
        manager.fork(seq)
    assert fingerprint(manager) == before


@pytest.mark.parametrize("value", [-1, 5, 2**31, True, 1.0])
def test_a_watermark_is_within_the_pool(value: int) -> None:
    with pytest.raises(InvalidArgument) as error:
        BlockManager(5, 2, watermark=value, reserve_null_block=True)
    assert str(error.value) == f"watermark is {value!r}, must be an integer from 0 to 4"
    assert BlockManager(5, 2, watermark=4, reserve_null_block=True).watermark == 4


@pytest.mark.parametrize("value", BAD_COUNTS)
def test_lookahead_out_of_range(value: int) -> None:
    manager = BlockManager(8, 2)
    seq = running(manager, 3, 3)
    before = fingerprint(manager)
    with pytest.raises(InvalidArgument) as error:
        manager.reserve(seq, 0, lookahead=value)
    assert str(error.value) == f"lookahead is {value!r}, must be an integer from 0 to 2147483647"
    assert fingerprint(manager) == before
    assert manager.reserve(seq, 0, lookahead=2**31 - 1) is False


def test_lookahead_comes_on_top_of_what_is_asked_for() -> None:
    manager = BlockManager(8, 2)
    seq = running(manager, 3, 3)
    assert manager.reserve(seq, 1) is True
    assert manager.reserve(seq, 1, lookahead=1) is True
    assert (seq.num_reserved, len(seq.block_table)) == (5, 3)


def test_lookahead_past_the_end_asks_for_nothing() -> None:
    """Nor does it order the copy that a next token would need."""
    manager = BlockManager(8, 2)
    seq = running(manager, 3, 3, max_length=3)
    child = manager.fork(seq)
    before = fingerprint(manager)
    assert manager.reserve(child, 0, lookahead=4) is True
    assert fingerprint(manager) == before


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("bad", [-1, 2**64, 1.5, "1", None])
def test_what_is_no_hash_is_refused(bad: int, block: int) -> None:
    """The first block's, or the second's, which the compiled loops ask for."""
    manager = BlockManager(8, 2, hash_block=lambda tokens, parent: bad if tokens and parent == block else parent + 1)
    seq = running(manager, 5)
    before = fingerprint(manager)
    with pytest.raises(InvalidArgument) as error:
        manager.commit(seq, 4)
    assert str(error.value) == f"hash_block returned {bad!r}, must be an integer from 0 to 2**64 - 1"
    assert fingerprint(manager) == before


def test_a_copy_that_was_written_over_leaves_its_child_to_an_older_parent() -> None:
    """Even LRU evicts a parent first, when the parent's newer copy is gone: the child goes with it."""
    manager = BlockManager(6, 2, merge_duplicates=False)
    first, second = (manager.sequence([1, 2, 3, 4]) for _ in range(2))
    manager.admit(first)
    manager.admit(second)
    manager.commit(first, 4)
    manager.commit(second, 4)
    manager.release(second)
    manager.truncate(first, 1)
    first.append(9)
    manager.reserve(first)
    assert manager.pool.free_lists() == ([4, 5], [3, 2, 1])  # 2 carries the parent of what 1 carries
    other = running(manager, 7)
    assert list(other.block_table) == [4, 5, 3, 1]  # 2 was evicted and 1 withdrawn, on top of it
    assert manager.pool.free_lists() == ([2], [])
    assert manager.stats().evictions == 3
    manager.check()


def test_a_block_is_published_after_one_that_its_window_has_left() -> None:
    """What was left is findable as long as it is cached."""
    manager = BlockManager(8, 2, window=1)
    seq = manager.sequence(range(7))
    manager.admit(seq)
    for _ in range(3):
        manager.commit(seq, 2)
    assert list(seq.block_table)[:3] == [0, 0, 0]
    assert manager.match(manager.sequence(range(7))) == 6
    manager.check()


def test_identities_last_as_long_as_there_are_any() -> None:
    manager = BlockManager(8, 2)
    seq = running(manager, 8, 4)
    manager.index._last_number = 2**35 - 4
    manager.commit(seq, 4)
    assert manager.stats().published == 4


@pytest.mark.parametrize("batched", [False, True])
def test_when_identities_have_run_out_nothing_more_is_published(batched: bool) -> None:
    """An identity is never used again while anything is findable: a server runs on, and finds what it has."""

    def prefilled(*tokens: int) -> Sequence:
        seq = manager.sequence(tokens)
        assert manager.admit(seq) is Admission.NOW
        manager.commit(seq, len(seq) - seq.num_computed)
        return seq

    manager = BlockManager(12, 2)
    manager.release(prefilled(1, 2, 3, 4))
    manager.index._last_number = 2**35 - 2  # one is left, which could be a root's
    seq = prefilled(1, 2, 3, 4, 5, 6, 7)
    assert seq.num_cached == 4
    seq.append(8)
    batch = manager.decode_batch(1)
    if batched:
        assert batch.add(seq)
    for token in range(9):
        if batched:
            assert batch.reserve() == []
            batch.commit([token])
        else:
            assert manager.reserve(seq)
            manager.commit(seq)
            seq.append(token)
    manager.check()
    assert manager.stats().published == 2
    manager.release(seq)
    manager.reset_prefix_cache()
    prefilled(1, 2, 3, 4)
    manager.check()
    assert manager.stats().published == 4
