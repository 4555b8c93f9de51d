"""`check()`: each way to break a manager's state is found, and named by the invariant it breaks."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from kvproof.allocator import BlockManager, DecodeBatch, InvariantViolation, Namespace, Node, Sequence
from kvproof.allocator.index import _BLOCK, _CHILD, _HASH, _PARENT, NONE


def busy() -> tuple[BlockManager, Sequence]:
    """A sequence on blocks 0 to 2, the first two published; block 3 cached, 4 another one's, half full, 5 free."""
    manager = BlockManager(6, 2)
    seq = manager.sequence([1, 2, 3, 4, 5])
    manager.admit(seq)
    manager.commit(seq, 5)
    gone = manager.sequence([6, 7], namespace=Namespace(salt="x"))
    manager.admit(gone)
    manager.commit(gone, 2)
    other = manager.sequence([8])
    manager.admit(other)
    manager.release(gone)
    manager.check()
    assert list(other.block_table) == [4]
    assert manager.pool.free_lists() == ([5], [3])
    return manager, seq


def node_of(manager: BlockManager, block: int) -> Node:
    node = manager.content(block)
    assert node is not None
    return node


def leak(manager: BlockManager, seq: Sequence) -> None:
    manager.pool.take()


def lose_a_reference(manager: BlockManager, seq: Sequence) -> None:
    manager.pool.release(seq.block_table[2])


def free_twice(manager: BlockManager, seq: Sequence) -> None:
    manager.pool._empty.append(5)


def cache_twice(manager: BlockManager, seq: Sequence) -> None:
    manager.pool._empty.append(3)


def free_what_is_in_use(manager: BlockManager, seq: Sequence) -> None:
    manager.pool._empty[0] = 2


def forget_a_free_block(manager: BlockManager, seq: Sequence) -> None:
    del manager.pool._empty[:]


def place_of(manager: BlockManager, block: int) -> int:
    return node_of(manager, block).number % 2**29 * 8


def another_carrier(manager: BlockManager, seq: Sequence) -> None:
    manager.index._records[place_of(manager, 0) + _BLOCK] = 5


def two_contents(manager: BlockManager, seq: Sequence) -> None:
    manager.index.carry(1, node_of(manager, 0).number)


def unknown_child(manager: BlockManager, seq: Sequence) -> None:
    manager.index._records[place_of(manager, 0) + _CHILD] = NONE


def no_parent(manager: BlockManager, seq: Sequence) -> None:
    manager.index._records[place_of(manager, 1) + _PARENT] = NONE


def dead_parent(manager: BlockManager, seq: Sequence) -> None:
    """Its parent died, and its place is another's."""
    manager.index._records[place_of(manager, 1) + _PARENT] -= 2**29


def childless_root(manager: BlockManager, seq: Sequence) -> None:
    manager.index.plant(Namespace(salt="nobody's"))


def other_tokens(manager: BlockManager, seq: Sequence) -> None:
    """A second node of the same parent and tokens hides the first one from every search."""
    node = node_of(manager, 0)
    manager.index.add(5, manager.index.root(Namespace()), node.tokens, node.hash)


def forgotten_content(manager: BlockManager, seq: Sequence) -> None:
    manager.pool._content[0] = 0


def short_table(manager: BlockManager, seq: Sequence) -> None:
    seq._num_reserved += 2


def computed_without_slot(manager: BlockManager, seq: Sequence) -> None:
    seq._num_computed = 6
    seq._num_reserved = 6


def published_too_early(manager: BlockManager, seq: Sequence) -> None:
    seq._num_computed = 3


def written_by_two(manager: BlockManager, seq: Sequence) -> None:
    thief = manager.sequence([9])
    manager.admit(thief)
    manager.pool.release(thief.block_table[0])
    manager.pool.share(4)
    thief._table = array("i", [4])


def other_namespace(manager: BlockManager, seq: Sequence) -> None:
    seq.namespace = Namespace(salt="y")


def swapped_table(manager: BlockManager, seq: Sequence) -> None:
    seq._table = array("i", [1, 0, 2])


def rewritten_tokens(manager: BlockManager, seq: Sequence) -> None:
    seq._tokens[2] = 9


def free_twice_and_not_once(manager: BlockManager, seq: Sequence) -> None:
    """As many are listed as there should be."""
    manager.release(manager.sequences[1])
    manager.pool._empty[0] = manager.pool._empty[1]


def other_hash(manager: BlockManager, seq: Sequence) -> None:
    manager.index._records[place_of(manager, 0) + _HASH] ^= 1


def rewritten_first_tokens(manager: BlockManager, seq: Sequence) -> None:
    seq._tokens[0] = 9


def another_prefix(manager: BlockManager, seq: Sequence) -> None:
    """Block 1 holds these tokens, and other tokens before them."""
    thief = manager.sequence([3, 4])
    manager.admit(thief)
    manager.pool.release(thief.block_table[0])
    manager.pool.share(1)
    thief._table = array("i", [1])
    thief._num_computed = 2


def decoding(manager: BlockManager, seq: Sequence) -> DecodeBatch:
    seq.append(6)
    batch = manager.decode_batch(1)
    assert batch.add(seq)
    manager.check()
    return batch


def another_in_its_row(manager: BlockManager, seq: Sequence) -> None:
    decoding(manager, seq)._rows[0] = manager.sequence([1])


def never_due(manager: BlockManager, seq: Sequence) -> None:
    decoding(manager, seq)._due.clear()


def stale_row(manager: BlockManager, seq: Sequence) -> None:
    decoding(manager, seq)._tables[2] = 5


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        (leak, "I1"),
        (lose_a_reference, "I1"),
        (free_twice, "I2"),
        (cache_twice, "I2"),
        (free_what_is_in_use, "I2"),
        (forget_a_free_block, "I2"),
        (another_carrier, "I3"),
        (childless_root, "I4"),
        (two_contents, "I3"),
        (unknown_child, "I4"),
        (no_parent, "I4"),
        (dead_parent, "I4"),
        (other_tokens, "I3"),
        (forgotten_content, "I3"),
        (short_table, "I7"),
        (computed_without_slot, "I7"),
        (published_too_early, "I6"),
        (written_by_two, "I5"),
        (other_namespace, "I9"),
        (swapped_table, "I3"),
        (rewritten_tokens, "I3"),
        (free_twice_and_not_once, "I2"),
        (other_hash, "I3"),
        (rewritten_first_tokens, "I3"),
        (another_prefix, "I3"),
        (another_in_its_row, "I7"),
        (never_due, "I7"),
        (stale_row, "I7"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_damage_is_found(damage: Callable[[BlockManager, Sequence], None], invariant: str) -> None:
    manager, seq = busy()
    damage(manager, seq)
    with pytest.raises(InvariantViolation, match=f"^{invariant}: ") as error:
        manager.check()
    assert error.value.invariant == invariant
