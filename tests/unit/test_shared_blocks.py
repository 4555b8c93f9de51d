"""Fork, truncation, pins, steps in flight, windows and media: each rule by hand, with the report that it answers."""

from __future__ import annotations

import pytest

from kvproof.allocator import (
    NULL_BLOCK,
    Admission,
    BlockManager,
    BlockState,
    InvalidArgument,
    MediaItem,
    Pin,
    Sequence,
    SequenceStateError,
)


def computed(manager: BlockManager, tokens: list[int], **options: object) -> Sequence:
    seq = manager.sequence(tokens, **options)
    assert manager.admit(seq) is Admission.NOW
    manager.commit(seq, len(tokens) - seq.num_computed)
    return seq


def decode(manager: BlockManager, seq: Sequence, token: int) -> None:
    seq.append(token)
    assert manager.reserve(seq)
    manager.commit(seq)


def test_l6_copy_on_write_replaces_the_shared_block() -> None:
    """vllm commit c128c2ed03 appended the copy instead."""
    manager = BlockManager(8, 4)
    parent = computed(manager, [1] * 6)
    child = manager.fork(parent)
    assert list(child.block_table) == list(parent.block_table) == [0, 1]
    assert manager.num_used == 2
    decode(manager, child, 7)
    assert (list(parent.block_table), list(child.block_table)) == ([0, 1], [0, 2])
    assert [manager.pool.refs(block) for block in (0, 1, 2)] == [2, 1, 1]
    assert manager.take_copies() == [(1, 2)]
    assert manager.take_copies() == []
    decode(manager, parent, 8)  # alone on its tail now: nothing to copy
    assert (list(parent.block_table), manager.take_copies()) == ([0, 1], [])
    manager.check()


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    manager = BlockManager(8, 4)
    parent = computed(manager, [1] * 8)
    child = manager.fork(parent)
    decode(manager, child, 7)
    decode(manager, parent, 8)
    assert (list(parent.block_table), list(child.block_table)) == ([0, 1, 3], [0, 1, 2])
    assert manager.take_copies() == []


def test_a_copy_of_a_copy_that_is_not_made_yet_comes_from_the_origin() -> None:
    """Found by model checking: the reserve is given up again, and the block that waits for its copy is forked."""
    manager = BlockManager(8, 4)
    parent = computed(manager, [1] * 6)
    child = manager.fork(parent)
    assert manager.reserve(child) is True
    manager.truncate(child, 6)
    grandchild = manager.fork(child)
    assert manager.reserve(grandchild) is True
    assert manager.take_copies() == [(1, child.block_table[1]), (1, grandchild.block_table[1])]


def test_the_copy_counts_as_a_block() -> None:
    manager = BlockManager(2, 4)
    parent = computed(manager, [1] * 6)
    child = manager.fork(parent)
    child.append(7)
    assert manager.reserve(child) is False
    assert (list(child.block_table), manager.take_copies()) == ([0, 1], [])
    manager.release(parent)
    assert manager.reserve(child) is True


def test_a_fork_of_reserved_slots_is_refused() -> None:
    manager = BlockManager(8, 4)
    seq = manager.sequence([1] * 6)
    manager.admit(seq)
    with pytest.raises(SequenceStateError, match="can't be forked: it has reserved slots"):
        manager.fork(seq)


def test_p7_a_findable_block_is_not_written_after_a_truncation() -> None:
    """vllm#49377: rejected drafts are cut off a hashed block, other tokens are appended, the hash stays."""
    manager = BlockManager(8, 4)
    seq = computed(manager, [1, 2, 3, 4, 5])
    manager.truncate(seq, 3)
    assert (list(seq.block_table), manager.pool.state(0)) == ([0], BlockState.PUBLISHED)
    decode(manager, seq, 9)
    assert manager.match(manager.sequence([1, 2, 3, 4, 0])) == 0
    assert manager.match(manager.sequence([1, 2, 3, 9, 0])) == 4
    manager.check()


def test_p7_with_another_owner_the_block_is_copied_and_stays_findable() -> None:
    manager = BlockManager(8, 4)
    first = computed(manager, [1, 2, 3, 4, 5])
    second = computed(manager, [1, 2, 3, 4, 6])
    manager.truncate(second, 3)
    decode(manager, second, 9)
    assert manager.take_copies() == [(0, second.block_table[0])]
    assert manager.match(manager.sequence([1, 2, 3, 4, 0])) == 4
    assert first.block_table[0] == 0


def test_truncation_gives_back_what_it_does_not_need() -> None:
    manager = BlockManager(8, 2)
    seq = computed(manager, [1, 2, 3, 4, 5, 6, 7])
    manager.reserve(seq, 3)
    manager.truncate(seq, 3)
    assert (len(seq), seq.num_computed, seq.num_reserved, len(seq.block_table)) == (3, 3, 3, 2)
    assert manager.num_used == 2
    for length in (0, 4, -1):
        with pytest.raises(InvalidArgument, match=f"length is {length}, must be an integer from 1 to 3"):
            manager.truncate(seq, length)


def test_a3_lookahead_ends_where_the_sequence_does() -> None:
    """vllm#16370, #43733."""
    manager = BlockManager(8, 2)
    seq = computed(manager, [1, 2, 3], max_length=5)
    assert manager.reserve(seq, 1, lookahead=7) is True
    assert (seq.num_reserved, len(seq.block_table)) == (5, 3)


def test_l7_a_pin_is_an_owner_and_its_receipt_is_good_once() -> None:
    """LMCache#1130, #2954."""
    manager = BlockManager(3, 2)
    seq = computed(manager, [1, 2, 3, 4, 5])
    pin = manager.pin(seq)
    manager.release(seq)
    assert (pin.blocks, manager.num_used) == ((0, 1), 2)
    assert manager.can_admit(manager.sequence([9, 9, 9])) is Admission.LATER  # the pinned blocks can't be evicted
    manager.unpin(pin)
    assert manager.num_used == 0
    for spent in (pin, Pin((0,))):
        with pytest.raises(SequenceStateError, match="this pin holds nothing here"):
            manager.unpin(spent)
    assert manager.match(manager.sequence([1, 2, 3, 4, 5])) == 4
    manager.check()


def test_l4_blocks_of_a_step_in_flight_are_not_handed_out() -> None:
    """vllm#47728, #45357, mini-sglang#111: aborted while its step still runs."""
    manager = BlockManager(3, 2)
    seq = computed(manager, [1, 2, 3])
    step = manager.launch([seq])
    manager.release(seq)
    assert (manager.num_used, manager.num_free) == (2, 1)
    assert manager.can_admit(manager.sequence([7, 7, 7])) is Admission.LATER
    manager.retire(step)
    assert manager.num_used == 0
    with pytest.raises(SequenceStateError, match=f"step {step} can't retire: none is in flight"):
        manager.retire(step)
    manager.check()


def test_l4_what_a_sequence_gives_up_is_parked_with_its_last_step() -> None:
    manager = BlockManager(8, 2)
    seq = computed(manager, [1, 2, 3, 4, 5])
    first, second = manager.launch([seq]), manager.launch([seq])
    manager.truncate(seq, 2)
    assert (len(seq.block_table), manager.num_used) == (1, 3)
    with pytest.raises(SequenceStateError, match="0 is the oldest in flight"):
        manager.retire(second)
    manager.retire(first)
    assert manager.num_used == 3
    manager.retire(second)
    assert manager.num_used == 1


def test_p4_equal_placeholders_are_not_equal_images() -> None:
    """vllm#12603, #36708: other image in an earlier block; same image at another offset."""
    manager = BlockManager(16, 2)
    tokens = [5, 8, 8, 5, 5]
    release = computed(manager, tokens, media=[MediaItem("cat", 1, 2)])

    def match(*media: MediaItem) -> int:
        return manager.match(manager.sequence(tokens, media=media))

    assert match(MediaItem("cat", 1, 2)) == 4
    assert match() == 0
    assert match(MediaItem("dog", 1, 2)) == 0
    assert match(MediaItem("cat", 2, 2)) == 0
    assert match(MediaItem("cat", 1, 3)) == 2  # the first block sees the same part of it
    manager.release(release)
    with pytest.raises(InvalidArgument, match="media item 'b' starts at 2, inside 'a'"):
        manager.sequence(tokens, media=[MediaItem("b", 2, 1), MediaItem("a", 1, 2)])


def test_a_window_gives_back_what_no_token_sees_any_more() -> None:
    """Window 3, blocks of 2: after 6 tokens the next one, at position 6, sees 4, 5 and itself."""
    manager = BlockManager(9, 2, window=3)
    seq = computed(manager, [1, 2, 3, 4, 5, 6])
    assert list(seq.block_table) == [NULL_BLOCK, NULL_BLOCK, 3]
    assert manager.num_used == 1
    with pytest.raises(SequenceStateError, match="its window has moved past those blocks"):
        manager.truncate(seq, 4)
    manager.check()
    manager.release(seq)
    assert manager.num_used == 0
    assert manager.match(manager.sequence([1, 2, 3, 4, 5, 6, 7])) == 6  # all still cached


def test_the_null_block_is_nobodys() -> None:
    manager = BlockManager(3, 2, reserve_null_block=True)
    assert manager.num_blocks == 2
    seq = computed(manager, [1, 2, 3])
    assert sorted(seq.block_table) == [1, 2]
    assert manager.pool.state(NULL_BLOCK) is BlockState.RESERVED
    assert manager.can_admit(manager.sequence([1] * 5)) is Admission.NEVER


def test_a_watermark_is_left_free_unless_nobody_else_runs() -> None:
    manager = BlockManager(4, 2, watermark=2)
    first, second = manager.sequence([1] * 6), manager.sequence([2] * 2)
    assert manager.admit(first) is Admission.NOW
    assert manager.admit(second) is Admission.LATER
    manager.release(first)
    assert manager.admit(second) is Admission.NOW


def test_a_reset_is_complete_or_refused() -> None:
    manager = BlockManager(4, 2)
    seq = computed(manager, [1, 2, 3])
    with pytest.raises(SequenceStateError, match="2 blocks are held by 1 sequences, 0 pins and 0 steps in flight"):
        manager.reset_prefix_cache()
    manager.release(seq)
    manager.reset_prefix_cache()
    assert manager.match(manager.sequence([1, 2, 3])) == 0
    assert [manager.pool.state(block) for block in range(4)] == [BlockState.FREE] * 4
    manager.check()


def test_a_commit_that_cannot_hash_changes_nothing() -> None:
    broken: list[bool] = [False]

    def hash_block(key: bytes, parent: int) -> int:
        if broken[0]:
            raise RuntimeError("no hash today")
        return len(key) + parent

    manager = BlockManager(8, 2, hash_block=hash_block)
    seq = manager.sequence([1, 2, 3, 4, 5])
    manager.admit(seq)
    fresh = manager.sequence([1, 2, 3, 4, 5])
    seq.extend([6, 7, 8])
    manager.reserve(seq, 8)
    broken[0] = True
    with pytest.raises(RuntimeError, match="no hash today"):
        manager.commit(seq, 8)
    assert seq.num_computed == 0
    broken[0] = False
    manager.commit(seq, 8)
    assert manager.match(fresh) == 4
    with pytest.raises(InvalidArgument, match="media key is b'digest', must be a str"):
        MediaItem(b"digest", 0, 4)
