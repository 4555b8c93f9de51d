"""From content to blocks: the prefix cache's index, trees of block contents reached by hash."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from kvproof.allocator import loops
from kvproof.allocator.errors import InvalidArgument
from kvproof.allocator.events import EventLog
from kvproof.allocator.hashing import Namespace

NONE = 0
"""No node."""

_PLACE_BITS = 29  # of a node's number: without the three that are 0
_PLACE = 2**_PLACE_BITS - 1 << 3
_MAX_NUMBER = (1 << 64 - _PLACE_BITS) - 1  # blocks of 16 tokens: nine weeks at 100,000 tokens a second

# What there is to know of a node, as words of its record. The links are places, 0 is none.
_NODE, _PARENT, _HASH, _BLOCK, _CHILD, _OLDER, _YOUNGER = range(7)
_WORDS = 8

_LOW = 2**32 - 1
_MIX = 0x9E3779B97F4A7C15  # spreads hashes that differ little: Knuth's multiplicative hashing


class PrefixIndex:
    """Finds the node of (parent, key) through a hash that may collide: one tree of nodes per namespace.

    A *node* is the identity of one block's content: this key, its tokens, after that parent. It is alive while at least
    one block carries its content, and dies for good: the same tokens written later get a new node. A namespace's root
    is a node without a key and without blocks, alive while it has children.

    Nodes are integers: a number that is never used again, so that a recycled block cannot pose as its predecessor, and
    below it the *place* of the node's record in one array. A record is eight 64-bit words, which is one line of a
    processor's cache; objects would be several times the memory, and keep the garbage collector busy for as long as all
    the rest takes. Who wants to look at a node gets a `Node`.

    key_size  bytes of a key, at least; what a key has beyond them (media) is kept apart, being rare
    """

    def __init__(self, key_size: int, events: EventLog | None = None) -> None:
        self._key_size = key_size
        self._events = events
        self._roots: dict[Namespace, int] = {}
        self._namespaces: dict[int, Namespace] = {}  # of the roots
        self._more_blocks: dict[int, tuple[int, ...]] = {}  # of nodes that several blocks carry, all but the first
        self._more_key: dict[int, bytes] = {}  # of nodes whose key is longer
        self._last_number = 0
        # By place, of which the first is nobody's, so that a link to it is none.
        self._records = array("Q", bytes(8 * _WORDS))
        self._keys = bytearray(key_size)
        self._free_places = array("I")
        # The hash table, half of it empty at least. An entry is 32 bits of a hash (`_tag`) above a place, in the first
        # entry that was free from the one that its tag names. A dict would be several times as large.
        self._lookup = array("Q", (0, 0))

    def root(self, namespace: Namespace) -> int:
        """The parent of the namespace's first blocks, `NONE` when it has none."""
        return self._roots.get(namespace, NONE)

    def plant(self, namespace: Namespace) -> int:
        """The namespace's root, a new one if it has none; it is forgotten with its last child."""
        root = self._roots.get(namespace, NONE)
        if not root:
            root = self._new(NONE, NONE, 0)
            self._roots[namespace] = root
            self._namespaces[root] = namespace
        return root

    @property
    def numbers_left(self) -> int:
        """How many nodes can still be added before numbers would have to be used again."""
        return _MAX_NUMBER - self._last_number

    def restart(self) -> None:
        """Number nodes from the beginning again. There must be none."""
        self._last_number = 0

    def find(self, parent: int, key: bytes, hash: int) -> int:
        """The live node of exactly `key` after exactly `parent`, or `NONE`."""
        mask, tag = len(self._lookup) - 1, _tag(hash)
        at = tag & mask
        while entry := self._lookup[at]:
            if entry >> 32 == tag:
                place = entry & _LOW
                node = self._records[place + _NODE]
                if self._records[place + _PARENT] == parent and self._key(node) == key:
                    return node
            at = at + 1 & mask
        return NONE

    def add(self, block: int, parent: int, key: bytes, hash: int) -> int:
        """Let a node live: `block` is the first to carry `key` after a live `parent`, where `find` found none."""
        size = self._key_size
        if len(key) < size:
            raise InvalidArgument(f"a key of {len(key)} bytes, must have at least {size}")
        node = self._new(block, parent, hash)
        place, above = node << 3 & _PLACE, parent << 3 & _PLACE
        at = place // _WORDS * size
        self._keys[at : at + size] = key[:size]
        if len(key) > size:
            self._more_key[node] = key[size:]
        _enter(self._lookup, _tag(hash), place)
        older = self._records[above + _CHILD]
        if older:
            self._records[place + _OLDER] = older
            self._records[older + _YOUNGER] = place
        self._records[above + _CHILD] = place
        if self._events is not None:
            # By folder, pyright sees this class twice.
            self._events.stored(Node(self, node), Node(self, parent))  # pyright: ignore[reportArgumentType]
        return node

    def carry(self, block: int, node: int) -> None:
        """Make `block` one more that carries a live node's content."""
        self._more_blocks[node] = (*self._more_blocks.get(node, ()), block)

    def blocks(self, node: int) -> tuple[int, ...]:
        """The blocks that carry a live node's content, in the order in which they came to."""
        if node in self._namespaces:
            return ()
        return self._records[(node << 3 & _PLACE) + _BLOCK], *self._more_blocks.get(node, ())

    def remove(self, block: int, node: int) -> list[int]:
        """`block` carries `node`'s content no longer.

        When it was the last one, the node's descendants can't be reached any more: they go too, and the blocks that
        carried them are returned, in ascending order, for their owner to withdraw.
        """
        if node in self._more_blocks:
            left = list(self.blocks(node))
            left.remove(block)
            self._records[(node << 3 & _PLACE) + _BLOCK] = left[0]
            del self._more_blocks[node]
            if left[1:]:
                self._more_blocks[node] = tuple(left[1:])
            return []
        place = node << 3 & _PLACE
        parent, older, younger = (self._records[place + word] for word in (_PARENT, _OLDER, _YOUNGER))
        orphans: list[int] = []
        dying = [node]
        while dying:
            dead = dying.pop()
            if dead != node:
                orphans += self.blocks(dead)
            dying += self._children(dead)
            self._forget(dead)
        self._close_gap(older, younger, parent)
        return sorted(orphans)

    def node(self, node: int) -> Node:
        """What a live node stands for."""
        return Node(self, node)

    def roots(self) -> Iterator[Node]:
        """The roots of the namespaces that have nodes."""
        return (Node(self, root) for root in self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Every live node, oldest first, roots left out."""
        nodes = (self._records[(entry & _LOW) + _NODE] for entry in self._lookup if entry)
        return (Node(self, node) for node in sorted(nodes))

    def _key(self, node: int) -> bytes:
        at = (node << 3 & _PLACE) // _WORDS * self._key_size
        key = bytes(self._keys[at : at + self._key_size])
        return key + self._more_key[node] if node in self._more_key else key

    def _children(self, node: int) -> list[int]:
        """Oldest first."""
        children = []
        child = self._records[(node << 3 & _PLACE) + _CHILD]
        while child:
            children.append(self._records[child + _NODE])
            child = self._records[child + _OLDER]
        children.reverse()
        return children

    def _new(self, block: int, parent: int, hash: int) -> int:
        if not self._free_places:
            self.make_room(1)
        place = self._free_places.pop()
        self._last_number += 1
        node = self._last_number << _PLACE_BITS | place >> 3
        self._records[place : place + _CHILD] = array("Q", (node, parent, hash, block))
        return node

    def make_room(self, n: int) -> None:
        """Places for `n` nodes more, so that adding them can't fail for want of memory."""
        if n <= len(self._free_places):
            return
        size = len(self._keys) // self._key_size
        more = max(min(size // 4, 1024), n)  # a little at a time: the arrays themselves see to it that they grow faster
        self._records.frombytes(bytes(8 * _WORDS * more))
        self._keys.extend(bytes(self._key_size * more))
        if 2 * (size + more) > len(self._lookup):
            self._spread(2 ** (2 * (size + more) - 1).bit_length())
        self._free_places.extend(range((size + more - 1) * _WORDS, (size - 1) * _WORDS, -_WORDS))

    def _spread(self, num_entries: int) -> None:
        """A hash table of so many entries, a power of two."""
        lookup = array("Q", bytes(8 * num_entries))
        if loops.compiled is not None:
            loops.compiled.spread(self, lookup)
        else:
            for entry in self._lookup:
                if entry:
                    _enter(lookup, entry >> 32, entry & _LOW)
        self._lookup = lookup

    def _forget(self, node: int) -> None:
        if self._events is not None:
            self._events.removed(Node(self, node))  # pyright: ignore[reportArgumentType]
        place = node << 3 & _PLACE
        mask = len(self._lookup) - 1
        gap = _tag(self._records[place + _HASH]) & mask
        while self._lookup[gap] & _LOW != place:
            gap = gap + 1 & mask
        at = gap
        while entry := self._lookup[at := at + 1 & mask]:
            if (at - (entry >> 32)) & mask >= (at - gap) & mask:  # its tag names the gap, or an entry before it
                self._lookup[gap] = entry
                gap = at
        self._lookup[gap] = 0
        self._more_blocks.pop(node, None)
        self._more_key.pop(node, None)
        self._free(place)

    def _close_gap(self, older: int, younger: int, parent: int) -> None:
        """A child has died between these two of `parent`'s, by place; a root that has no other goes with it."""
        if older:
            self._records[older + _YOUNGER] = younger
        if younger:
            self._records[younger + _OLDER] = older
        else:
            self._records[(parent << 3 & _PLACE) + _CHILD] = older
            if not older and parent in self._namespaces:
                del self._roots[self._namespaces.pop(parent)]
                self._free(parent << 3 & _PLACE)

    def _free(self, place: int) -> None:
        self._records[place : place + _WORDS] = array("Q", bytes(8 * _WORDS))
        self._free_places.append(place)


def _tag(hash: int) -> int:
    return hash * _MIX >> 32 & _LOW


def _enter(lookup: array[int], tag: int, place: int) -> None:
    mask = len(lookup) - 1
    at = tag & mask
    while lookup[at]:
        at = at + 1 & mask
    lookup[at] = tag << 32 | place


@dataclass(frozen=True, slots=True)
class Node:
    """A live node, for those who look; equal to every other view of it.

    Of a node that has died it says nothing that means anything, or raises KeyError.
    """

    index: PrefixIndex
    number: int

    @property
    def uid(self) -> int:
        """Counts the nodes of this index: no two have the same, roots included."""
        return self.number >> _PLACE_BITS

    @property
    def parent(self) -> Node | None:
        """None of a root."""
        parent = self.index._records[(self.number << 3 & _PLACE) + _PARENT]
        return Node(self.index, parent) if parent else None

    @property
    def namespace(self) -> Namespace:
        node = self.number
        while node and node not in self.index._namespaces:
            node = self.index._records[(node << 3 & _PLACE) + _PARENT]
        return self.index._namespaces[node]  # raises KeyError of a node that has died

    @property
    def tokens(self) -> bytes:
        """What its blocks hold, see `Sequence.key`."""
        return b"" if self.number in self.index._namespaces else self.index._key(self.number)

    @property
    def hash(self) -> int:
        hash: int = self.index._records[(self.number << 3 & _PLACE) + _HASH]
        return hash

    @property
    def blocks(self) -> tuple[int, ...]:
        """Those that carry its content; none of a root."""
        return self.index.blocks(self.number)

    @property
    def children(self) -> list[Node]:
        """The live nodes whose parent this is, oldest first."""
        return [Node(self.index, child) for child in self.index._children(self.number)]

    def __repr__(self) -> str:
        return f"Node(uid={self.uid}, parent={self.parent and self.parent.uid}, blocks={self.blocks})"
