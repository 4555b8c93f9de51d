"""Values at the very edge of what is allowed, and one beyond: what no machine draws, and mutants live on."""

from __future__ import annotations

import pytest

from kvproof.allocator import (
    LRU,
    AllBlocksCleared,
    BlockManager,
    BlockPool,
    BlockStored,
    IllegalTransition,
    InvalidArgument,
    Namespace,
    PrefixIndex,
)
from kvproof.allocator import MediaItem as Item
from kvproof.allocator.index import _PLACE, _WORDS
from kvproof.allocator.pool import MAX_BLOCKS


def test_media_end_where_positions_do() -> None:
    assert Item("k", 1, 2**31 - 2).stop == 2**31 - 1
    for start, length in [(1, 2**31 - 1), (2**31 - 2, 2)]:
        with pytest.raises(InvalidArgument, match="media length"):
            Item("k", start, length)


def test_media_may_touch_and_not_overlap() -> None:
    manager = BlockManager(1, 4)
    manager.sequence([0] * 4, media=[Item("a", 0, 2), Item("b", 2, 1)])
    with pytest.raises(InvalidArgument):
        manager.sequence([0] * 4, media=[Item("a", 0, 2), Item("b", 1, 1)])


def test_a_medium_is_cut_where_its_sequence_is() -> None:
    manager = BlockManager(4, 1)
    seq = manager.sequence([0] * 4, media=[Item("k", 1, 3)])
    manager.admit(seq)
    for length, media in [(3, (Item("k", 1, 2),)), (2, (Item("k", 1, 1),)), (1, ())]:
        manager.truncate(seq, length)
        assert seq.media == media


@pytest.mark.parametrize("num_reserved", [-1, 3, 4])
def test_a_pool_has_a_block_to_hand_out(num_reserved: int) -> None:
    with pytest.raises(InvalidArgument, match="num_reserved"):
        BlockPool(3, num_reserved=num_reserved)
    assert BlockPool(3, num_reserved=2).take(1) == [2]


def test_block_0_is_reserved_and_block_minus_1_is_not_there() -> None:
    pool = BlockPool(3, num_reserved=1)
    for block, message in [(0, "block 0 is reserved"), (-1, "there is no block -1"), (3, "there is no block 3")]:
        with pytest.raises(IllegalTransition, match=f"^{message}, the pool has 1 to 2$"):
            pool.refs(block)
    assert pool.refs(1) == 0


def test_what_was_stored_before_a_reset_is_told_before_it() -> None:
    manager = BlockManager(2, 2, events=True)
    seq = manager.sequence([1, 2, 3])
    manager.admit(seq)
    manager.commit(seq, 3)
    manager.release(seq)
    manager.reset_prefix_cache()
    assert [type(event) for event in manager.take_events()] == [BlockStored, AllBlocksCleared]


def test_an_identity_is_what_it_always_was() -> None:
    """As in test_events.py, without another process, where no mutant would be."""
    manager = BlockManager(16, 2, events=True)
    seq = manager.sequence([1, 2**31 - 1, 3, 4, 5])
    manager.admit(seq)
    manager.commit(seq, 5)
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert [block.hex() for block in stored.blocks] == [
        "35da769a22f1d22a1fe372ac92e47ca4",
        "1d3e1e26cfe3671201e7f2626ae9d199",
    ]


def test_a_node_outlives_all_but_its_last_block() -> None:
    index = PrefixIndex(4)
    node = index.add(1, index.plant(Namespace()), b"abcd", 0)
    index.carry(2, node)
    index.carry(3, node)
    index.carry(4, node)
    for block, left in [(2, (1, 3, 4)), (1, (3, 4)), (4, (3,))]:
        assert index.remove(block, node) == []
        assert index.blocks(node) == left
        assert index.find(index.root(Namespace()), b"abcd", 0) == node
    assert index.remove(3, node) == []
    assert list(index.nodes()) == []


def test_siblings_close_the_gap_that_one_of_them_leaves() -> None:
    index = PrefixIndex(4)
    parent = index.add(1, index.plant(Namespace()), b"head", 0)
    oldest, middle, youngest = (index.add(block, parent, b"kid%d" % block, block) for block in (2, 3, 4))
    index.carry(5, youngest)
    assert index.remove(3, middle) == []
    assert index.remove(2, oldest) == []
    assert index.remove(1, parent) == [4, 5]
    assert (list(index.nodes()), index._more_blocks) == ([], {})


def test_every_block_of_the_largest_pool_has_a_place_and_as_many_roots_have() -> None:
    assert _PLACE == (2 * MAX_BLOCKS - 1) * _WORDS


def test_half_of_the_hash_table_is_empty() -> None:
    """Nothing but time would tell: whatever they are, nodes are found."""
    index = PrefixIndex(4)
    root = index.plant(Namespace())
    for i in range(70):
        num_places = len(index._keys) // 4
        assert 2 * num_places <= len(index._lookup) < 4 * num_places
        index.add(i, root, i.to_bytes(4, "little"), i)


class Failing(LRU):
    def pop(self) -> int:
        raise OSError


@pytest.mark.parametrize("n", [False, True, -1, 1.0])
def test_what_is_no_count_takes_nothing(n: int) -> None:
    pool = BlockManager(2, 1).pool
    with pytest.raises(InvalidArgument):
        pool.take(n)
    assert (pool.clock, pool.num_free) == (0, 2)


def test_a_take_that_fails_half_way_turns_the_clock_back() -> None:
    manager = BlockManager(3, 1, policy=Failing())
    seq = manager.sequence([1, 2])
    manager.admit(seq, 1)
    manager.commit(seq, 1)
    manager.release(seq)
    before = manager.pool.clock, manager.pool.free_lists()
    assert (before[0], len(before[1][0]), len(before[1][1])) == (1, 2, 1)
    with pytest.raises(OSError):
        manager.pool.take(3)
    assert (manager.pool.clock, manager.pool.free_lists()) == before


def test_so_does_one_that_the_compiled_loops_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the two blocks without content, and leave the one that is not alone in carrying its own to Python."""

    def fail(*_: object) -> None:
        raise OSError

    manager = BlockManager(4, 1, merge_duplicates=False)
    twins = [manager.sequence([1, 2]), manager.sequence([1, 2])]
    for seq in twins:
        manager.admit(seq, 1)
    for seq in twins:
        manager.commit(seq, 1)
    for seq in twins:
        manager.release(seq)
    assert (manager.pool.clock, manager.pool.num_cached) == (2, 2)
    monkeypatch.setattr(PrefixIndex, "remove", fail)
    with pytest.raises(OSError):
        manager.pool.take(3)
    assert (manager.pool.clock, manager.num_free) == (2, 4)
