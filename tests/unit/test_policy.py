"""Eviction policies: FIFO against a sorted list, how little it keeps, what either does to a manager's blocks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvproof.allocator import FIFO, LRU, Admission, BlockManager, EvictionPolicy, Sequence


def computed(manager: BlockManager, tokens: list[int]) -> Sequence:
    seq = manager.sequence(tokens)
    assert manager.admit(seq) is Admission.NOW
    manager.commit(seq, len(tokens) - seq.num_computed)
    return seq


def test_fifo_is_a_list_sorted_by_publication_then_insertion() -> None:
    """Thousands of hits, so that the heap is cleared of removed entries on the way, several times."""
    draw = random.Random(3)
    policy, order = FIFO(), []  # (published, when inserted, block)
    for step in range(5000):
        block = draw.randrange(40)
        present = [entry for entry in order if entry[2] == block]
        if not present:
            published = draw.randrange(30)
            policy.insert(block, published)
            order.append((published, step, block))
        elif draw.random() < 0.8:
            policy.remove(block)
            order.remove(present[0])
        else:
            first = min(order)
            assert policy.pop() == first[2]
            order.remove(first)
        assert len(policy) == len(order)
        if step % 50 == 0:
            assert list(policy) == [block for *_, block in sorted(order)]


def test_fifo_does_not_keep_what_was_hit() -> None:
    policy = FIFO()
    policy.insert(0, 0)
    for _ in range(10_000):
        policy.insert(1, 1)
        policy.remove(1)
    assert len(policy._heap) < 32
    assert list(policy) == [0]


@pytest.mark.parametrize(("policy", "survivor"), [(LRU, 1), (FIFO, 2)])
def test_a_hit_saves_a_block_from_lru_and_not_from_fifo(policy: Callable[[], EvictionPolicy], survivor: int) -> None:
    manager = BlockManager(3, 1, policy=policy())
    manager.release(computed(manager, [1]))
    manager.release(computed(manager, [2]))
    manager.release(computed(manager, [1, 9]))  # a hit on what is older, and the last empty block
    manager.release(computed(manager, [3]))  # under FIFO the older goes, and [1, 9] with it
    found = [token for token in (1, 2) if manager.match(manager.sequence([token, 0]))]
    assert found == [survivor]
    manager.check()


def test_fifo_evicts_a_prompt_tail_first() -> None:
    """All blocks of a prompt are of one age, in however many chunks it was computed."""
    manager = BlockManager(4, 1, policy=FIFO())
    seq = manager.sequence([1, 2, 3, 4])
    manager.admit(seq)
    for _ in range(4):
        manager.commit(seq)
    manager.release(seq)
    computed(manager, [9])
    assert manager.match(manager.sequence([1, 2, 3, 4, 5])) == 3


def test_fifo_evicts_the_head_of_what_grew_and_orphans_the_rest() -> None:
    """A decoded block is younger than its parent. What can't be reached any more is empty at once (I4)."""
    manager = BlockManager(4, 1, policy=FIFO())
    seq = computed(manager, [1])
    for token in (2, 3, 4):
        seq.append(token)
        assert manager.reserve(seq)
        manager.commit(seq)
    manager.release(seq)
    assert manager.pool.free_lists() == ([], [0, 1, 2, 3])
    other = computed(manager, [9])
    assert list(other.block_table) == [3]  # withdrawn last, so on top of the stack
    assert manager.pool.free_lists() == ([2, 1, 0], [])
    manager.check()
