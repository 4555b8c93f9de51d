"""The prefix index: trees by state machine; collisions, deaths and depth by hand."""

from __future__ import annotations

import itertools

import pytest

from kvproof.allocator import InvalidArgument, Namespace, PrefixIndex
from kvproof.allocator.index import NONE
from kvproof.fuzz.machines.index import IndexMachine

TestIndexMachine = IndexMachine.TestCase

A, B, C, D = b"aaaa", b"bbbb", b"cccc", b"dddd"
COLLIDING = 7


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_colliding_nodes_leave_in_any_order(order: tuple[int, ...]) -> None:
    """All four in one bucket: its first, its last and those between are unlinked without losing another."""
    index = PrefixIndex(4)
    root = index.plant(Namespace())
    nodes = [index.add(block, root, tokens, COLLIDING) for block, tokens in enumerate((A, B, C, D))]
    left = set(range(4))
    for block in order:
        assert index.remove(block, nodes[block]) == []
        left.remove(block)
        found = [index.find(root, tokens, COLLIDING) for tokens in (A, B, C, D)]
        assert found == [node if block in left else NONE for block, node in enumerate(nodes)]
        assert {node.number for node in index.nodes()} == {nodes[block] for block in left}


def test_a_hit_needs_the_parent_the_tokens_and_the_hash() -> None:
    index = PrefixIndex(4)
    root, stranger = index.plant(Namespace()), index.plant(Namespace(salt="x"))
    a, b = index.add(0, root, A, 1), index.add(1, root, B, 1)
    child = index.add(2, a, C, 1)
    assert index.find(a, C, 1) == child
    assert index.find(b, C, 1) == NONE
    assert index.find(root, C, 1) == NONE
    assert index.find(a, D, 1) == NONE
    assert index.find(a, C, 2) == NONE
    assert index.find(stranger, A, 1) == NONE


def test_what_a_key_has_beyond_its_size_counts() -> None:
    index = PrefixIndex(4)
    root = index.plant(Namespace())
    plain, media = index.add(0, root, A, 1), index.add(1, root, A + b"media", 1)
    assert (index.find(root, A, 1), index.find(root, A + b"media", 1)) == (plain, media)
    assert index.find(root, A + b"other", 1) == NONE
    assert index.node(media).tokens == A + b"media"
    index.remove(1, media)
    assert (index.find(root, A, 1), index.find(root, A + b"media", 1)) == (plain, NONE)
    with pytest.raises(InvalidArgument, match=r"^a key of 3 bytes, must have at least 4$"):
        index.add(2, root, b"aaa", 1)


def test_the_last_carrier_takes_the_descendants_with_it() -> None:
    index = PrefixIndex(4)
    root = index.plant(Namespace())
    top = index.add(5, root, A, 1)
    index.carry(6, top)
    child = index.add(9, top, A, 2)
    index.carry(3, child)
    index.add(4, top, B, 3)
    index.add(0, child, A, 4)
    sibling = index.add(1, root, B, 5)
    assert index.remove(5, top) == []
    assert index.find(root, A, 1) == top
    assert index.remove(6, top) == [0, 3, 4, 9]
    assert list(index.nodes()) == [index.node(sibling)]


def test_a_node_has_one_life() -> None:
    """The same tokens written again are another node: nothing of the old one's is reachable through it."""
    index = PrefixIndex(4)
    root = index.plant(Namespace())
    old = index.add(0, root, A, 1)
    below = index.add(1, old, B, 2)
    index.add(2, root, D, 3)
    assert index.remove(0, old) == [1]
    new = index.add(0, root, A, 1)
    other = index.add(1, root, C, 2)  # the places of both are taken again
    assert {node % 2**29 for node in (new, other)} == {node % 2**29 for node in (old, below)}
    assert index.find(root, A, 1) == new != old
    assert index.find(new, B, 2) == NONE
    assert index.find(old, B, 2) == NONE
    assert [node.uid for node in (index.node(old), index.node(new))] == [2, 5]


def test_a_namespace_is_forgotten_with_its_last_node() -> None:
    """Salts come from outside without end; an index that kept every root would grow with them."""
    index = PrefixIndex(4)
    salted = Namespace(salt="x")
    assert index.root(salted) == NONE
    root = index.plant(salted)
    assert (index.root(salted), index.plant(salted)) == (root, root)
    view = index.node(root)
    assert (view.tokens, view.blocks, view.parent, view.namespace) == (b"", (), None, salted)
    a, b = index.add(0, root, A, 1), index.add(1, root, B, 2)
    assert view.children == [index.node(a), index.node(b)]
    index.remove(0, a)
    assert list(index.roots()) == [view]
    index.remove(1, b)
    assert (index.root(salted), list(index.roots())) == (NONE, [])
    assert index.plant(salted) != root


def test_depth_is_no_limit() -> None:
    """A million tokens in blocks of 16 are deeper than Python's stack."""
    index = PrefixIndex(4)
    node = top = index.add(0, index.plant(Namespace()), A, 0)
    for block in range(1, 62_500):
        node = index.add(block, node, A, block)
    assert index.remove(0, top) == list(range(1, 62_500))
    assert list(index.nodes()) == []


def test_nothing_is_left_of_what_was_removed() -> None:
    """An index sees new content for ever; a trace of each would be a leak."""
    index = PrefixIndex(4)
    for i in range(4):
        root = index.plant(Namespace(salt=str(i)))
        nodes = [index.add(block, root, bytes([block] * (4 + block)), block % 2) for block in range(4)]
        for block, node in enumerate(nodes):
            index.remove(block, node)
    left = index._roots, index._namespaces, index._more_blocks, index._more_key
    assert (set(index._lookup), *left) == ({0}, {}, {}, {}, {})
    assert len(index._free_places) == len(index._keys) // 4 - 1 < 16


def test_repr_names_what_a_reader_looks_for() -> None:
    index = PrefixIndex(4)
    parent = index.add(4, index.plant(Namespace()), A, 0)
    node = index.add(7, parent, B, 0)
    assert repr(index.node(node)) == "Node(uid=3, parent=2, blocks=(7,))"
    assert repr(index.node(parent).parent) == "Node(uid=1, parent=None, blocks=())"
