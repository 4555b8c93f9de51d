"""From content to blocks: the prefix cache's index, a tree of block contents reached by hash."""

from __future__ import annotations

from collections.abc import Iterator

from kvproof.allocator.events import EventLog
from kvproof.allocator.hashing import Namespace


class Node:
    """The identity of one block's content: these tokens after that parent.

    A node is alive while at least one block carries its content, and dies for good: the same tokens written later
    get a new node with a new `uid`. Parents are compared by identity, so a recycled block cannot pose as its
    predecessor. A namespace's root is a node without tokens and without blocks.
    """

    __slots__ = ("blocks", "children", "collision", "hash", "namespace", "parent", "tokens", "uid")

    def __init__(self, uid: int, namespace: Namespace, parent: Node | None, tokens: bytes, hash: int) -> None:
        self.uid = uid
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.hash = hash
        self.blocks: list[int] = []
        self.children: set[Node] = set()
        self.collision: Node | None = None  # the next node of the same hash

    def __repr__(self) -> str:
        return f"Node(uid={self.uid}, parent={self.parent and self.parent.uid}, blocks={self.blocks})"


class PrefixIndex:
    """Finds the node of (parent, tokens) through a hash that may collide: one tree of nodes per namespace."""

    def __init__(self, events: EventLog | None = None) -> None:
        self._events = events
        self._buckets: dict[int, Node] = {}
        self._roots: dict[Namespace, Node] = {}
        self._last_uid = 0

    def root(self, namespace: Namespace) -> Node:
        """The parent of every first block in `namespace`. The index keeps it only while it has children."""
        return self._roots.get(namespace) or Node(0, namespace, None, b"", 0)

    def find(self, parent: Node, tokens: bytes, hash: int) -> Node | None:
        """The live node of exactly `tokens` after exactly `parent`."""
        node = self._buckets.get(hash)
        while node is not None and not (node.parent is parent and node.tokens == tokens):
            node = node.collision
        return node

    def add(self, block: int, parent: Node, tokens: bytes, hash: int) -> Node:
        """Make `block` the first to carry `tokens` after `parent`: a node that `find` did not find."""
        self._last_uid += 1
        node = Node(self._last_uid, parent.namespace, parent, tokens, hash)
        node.blocks.append(block)
        node.collision = self._buckets.get(hash)
        self._buckets[hash] = node
        parent.children.add(node)
        if parent.parent is None:
            self._roots[parent.namespace] = parent
        if self._events is not None:
            self._events.stored(node, parent)
        return node

    def remove(self, block: int, node: Node) -> list[int]:
        """`block` carries `node`'s content no longer.

        When it was the last one, the node's descendants can't be reached any more: they go too, and the blocks that
        carried them are returned, in ascending order, for their owner to withdraw.
        """
        node.blocks.remove(block)
        orphans: list[int] = []
        dying = [] if node.blocks else [node]
        while dying:
            dead = dying.pop()
            orphans += dead.blocks
            dying += sorted(dead.children, key=lambda child: child.uid)
            self._forget(dead)
        return sorted(orphans)

    def nodes(self) -> Iterator[Node]:
        """Every live node, roots left out."""
        for hash in self._buckets:
            yield from self._bucket(hash)

    def _bucket(self, hash: int) -> Iterator[Node]:
        node = self._buckets.get(hash)
        while node is not None:
            yield node
            node = node.collision

    def _forget(self, node: Node) -> None:
        if self._events is not None:
            self._events.removed(node)
        if self._buckets[node.hash] is not node:
            before = next(n for n in self._bucket(node.hash) if n.collision is node)
            before.collision = node.collision
        elif node.collision is not None:
            self._buckets[node.hash] = node.collision
        else:
            del self._buckets[node.hash]
        parent = node.parent
        if parent is not None:
            parent.children.remove(node)
            if parent.parent is None and not parent.children:
                del self._roots[node.namespace]
