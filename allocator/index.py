"""From content to blocks: the prefix cache's index, trees of block contents reached by hash."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from kvproof.allocator import loops
from kvproof.allocator.events import EventLog
from kvproof.allocator.hashing import Namespace

NONE = 0
"""No node."""

_PLACE_BITS = 32
_PLACE = 2**_PLACE_BITS - 1


class PrefixIndex:
    """Finds the node of (parent, tokens) through a hash that may collide: one tree of nodes per namespace.

    A *node* is the identity of one block's content: these tokens after that parent. It is alive while at least one
    block carries its content, and dies for good: the same tokens written later get a new node. A namespace's root is
    a node without tokens and without blocks, alive while it has children.

    Nodes are integers: a number that is never used again, so that a recycled block cannot pose as its predecessor, and
    below it the node's place in the arrays here. An object for each would be twice the memory, and would keep the
    garbage collector busy for as long as all the rest takes. Who wants to look at one gets a `Node`.
    """

    def __init__(self, events: EventLog | None = None) -> None:
        self._events = events
        self._roots: dict[Namespace, int] = {}
        self._namespaces: dict[int, Namespace] = {}  # of the roots
        self._more_blocks: dict[int, tuple[int, ...]] = {}  # of nodes that several blocks carry, all but the first
        self._last_number = 0
        # By place. Place 0 is nobody's, so that a link to it is none.
        self._node = [NONE]
        self._block = array("i", (0,))
        self._parent = [NONE]
        self._tokens = [b""]
        self._hash = [0]
        # Links are places, which take half as much as nodes do.
        self._collision = array("i", (0,))  # the next one in the bucket
        self._child = array("i", (0,))  # the youngest
        self._older = array("i", (0,))  # the parent's next older child
        self._younger = array("i", (0,))
        self._free_places = array("i")
        # The first place of each bucket, by the lower bits of the hash. A dict would be eight times as large.
        self._buckets = array("i", (0,))

    def root(self, namespace: Namespace) -> int:
        """The parent of the namespace's first blocks, `NONE` when it has none."""
        return self._roots.get(namespace, NONE)

    def plant(self, namespace: Namespace) -> int:
        """The namespace's root, a new one if it has none; it is forgotten with its last child."""
        root = self._roots.get(namespace, NONE)
        if not root:
            root = self._new(0, NONE, b"", 0)
            self._roots[namespace] = root
            self._namespaces[root] = namespace
        return root

    def find(self, parent: int, tokens: bytes, hash: int) -> int:
        """The live node of exactly `tokens` after exactly `parent`, or `NONE`."""
        place = self._buckets[hash & len(self._buckets) - 1]
        while place:
            if self._parent[place] == parent and self._tokens[place] == tokens:
                return self._node[place]
            place = self._collision[place]
        return NONE

    def add(self, block: int, parent: int, tokens: bytes, hash: int) -> int:
        """Let a node live: `block` is the first to carry `tokens` after a live `parent`, where `find` found none."""
        node = self._new(block, parent, tokens, hash)
        place, above = node & _PLACE, parent & _PLACE
        bucket = hash & len(self._buckets) - 1
        self._collision[place] = self._buckets[bucket]
        self._buckets[bucket] = place
        older = self._child[above]
        if older:
            self._older[place] = older
            self._younger[older] = place
        self._child[above] = place
        if self._events is not None:
            # By folder, pyright sees this class twice.
            self._events.stored(Node(self, node), Node(self, parent))  # pyright: ignore[reportArgumentType]
        return node

    def carry(self, block: int, node: int) -> None:
        """Make `block` one more that carries a live node's content."""
        self._more_blocks[node] = (*self._more_blocks.get(node, ()), block)

    def blocks(self, node: int) -> tuple[int, ...]:
        """The blocks that carry a live node's content, in the order in which they came to."""
        return (self._block[node & _PLACE], *self._more_blocks.get(node, ())) if node not in self._namespaces else ()

    def remove(self, block: int, node: int) -> list[int]:
        """`block` carries `node`'s content no longer.

        When it was the last one, the node's descendants can't be reached any more: they go too, and the blocks that
        carried them are returned, in ascending order, for their owner to withdraw.
        """
        if node in self._more_blocks:
            left = list(self.blocks(node))
            left.remove(block)
            self._block[node & _PLACE] = left[0]
            del self._more_blocks[node]
            if left[1:]:
                self._more_blocks[node] = tuple(left[1:])
            return []
        place = node & _PLACE
        older, younger, parent = self._older[place], self._younger[place], self._parent[place]
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
        nodes = (self._node[place] for first in self._buckets for place in self._bucket(first))
        return (Node(self, node) for node in sorted(nodes))

    def _bucket(self, first: int) -> Iterator[int]:
        """The places of the bucket that starts with `first`."""
        place = first
        while place:
            yield place
            place = self._collision[place]

    def _children(self, node: int) -> list[int]:
        """Oldest first."""
        children = []
        child = self._child[node & _PLACE]
        while child:
            children.append(self._node[child])
            child = self._older[child]
        children.reverse()
        return children

    def _new(self, block: int, parent: int, tokens: bytes, hash: int) -> int:
        if not self._free_places:
            self.make_room(1)
        place = self._free_places.pop()
        self._last_number += 1
        node = self._last_number << _PLACE_BITS | place
        self._node[place] = node
        self._block[place] = block
        self._parent[place] = parent
        self._tokens[place] = tokens
        self._hash[place] = hash
        return node

    def make_room(self, n: int) -> None:
        """Places for `n` nodes more, so that adding them can't fail for want of memory."""
        if n <= len(self._free_places):
            return
        size = len(self._tokens)
        more = max(size // 4, n, 16)
        for places in (self._block, self._collision, self._child, self._older, self._younger):
            places.frombytes(bytes(places.itemsize * more))
        for numbers in (self._node, self._parent, self._hash):
            numbers += [0] * more
        self._tokens += [b""] * more
        if size + more > len(self._buckets):
            self._spread(2 ** (size + more - 1).bit_length())
        self._free_places.extend(range(size + more - 1, size - 1, -1))

    def _spread(self, num_buckets: int) -> None:
        """Sort the nodes into so many buckets, a power of two."""
        buckets = array("i", bytes(self._buckets.itemsize * num_buckets))
        if loops.compiled is not None:
            loops.compiled.spread(self, buckets)
        else:
            for first in self._buckets:
                place = first
                while place:
                    after = self._collision[place]
                    bucket = self._hash[place] & num_buckets - 1
                    self._collision[place] = buckets[bucket]
                    buckets[bucket] = place
                    place = after
        self._buckets = buckets

    def _forget(self, node: int) -> None:
        if self._events is not None:
            self._events.removed(Node(self, node))  # pyright: ignore[reportArgumentType]
        place = node & _PLACE
        bucket, after = self._hash[place] & len(self._buckets) - 1, self._collision[place]
        first = self._buckets[bucket]
        if first == place:
            self._buckets[bucket] = after
        else:
            before = next(other for other in self._bucket(first) if self._collision[other] == place)
            self._collision[before] = after
        self._more_blocks.pop(node, None)
        self._free(place)

    def _close_gap(self, older: int, younger: int, parent: int) -> None:
        """A child has died between these two of `parent`'s, by place; a root that has no other goes with it."""
        if older:
            self._younger[older] = younger
        if younger:
            self._older[younger] = older
        else:
            self._child[parent & _PLACE] = older
            if not older and parent in self._namespaces:
                del self._roots[self._namespaces.pop(parent)]
                self._free(parent & _PLACE)

    def _free(self, place: int) -> None:
        self._collision[place] = self._child[place] = self._older[place] = self._younger[place] = 0
        self._tokens[place] = b""
        self._free_places.append(place)


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
        parent = self.index._parent[self.number & _PLACE]
        return Node(self.index, parent) if parent else None

    @property
    def namespace(self) -> Namespace:
        node = self.number
        while node and node not in self.index._namespaces:
            node = self.index._parent[node & _PLACE]
        return self.index._namespaces[node]  # raises KeyError of a node that has died

    @property
    def tokens(self) -> bytes:
        """What its blocks hold, see `Sequence.key`."""
        tokens: bytes = self.index._tokens[self.number & _PLACE]
        return tokens

    @property
    def hash(self) -> int:
        hash: int = self.index._hash[self.number & _PLACE]
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
