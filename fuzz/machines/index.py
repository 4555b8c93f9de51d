"""A state machine for `PrefixIndex`, against a dict from (namespace, all chunks so far) to the blocks that carry them.

The model has no tree and no hash: a node's identity is its whole path, written out. The hash is cut to a few bits, or
to none, so that nearly everything collides.
"""

from __future__ import annotations

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvproof.allocator import Namespace, Node, PrefixIndex
from kvproof.allocator.index import NONE
from kvproof.fuzz.machines.harness import NAMESPACES, weakened

Path = tuple[Namespace, tuple[bytes, ...]]

CHUNKS = st.sampled_from((b"\0\0\0\0", b"\1\0\0\0", b"\1\0\0\0media"))
MAX_DEPTH = 4


class IndexMachine(RuleBasedStateMachine):
    @initialize(hash_bits=st.sampled_from((0, 1, 4, 64)))
    def start(self, hash_bits: int) -> None:
        self.index = PrefixIndex(4)
        self.hash_block = weakened(hash_bits)
        self.carriers: dict[Path, list[int]] = {}
        self.dead: list[tuple[Node, int]] = []  # with the hash it had
        self.uids: set[int] = set()

    # ---- rules

    @rule(namespace=st.sampled_from(NAMESPACES), chunks=st.lists(CHUNKS, min_size=1, max_size=MAX_DEPTH))
    def add(self, namespace: Namespace, chunks: list[bytes]) -> None:
        """A sequence computed these chunks: a block for each one that is new."""
        parent = self.index.node(self.index.plant(namespace))
        for depth, tokens in enumerate(chunks, start=1):
            path = namespace, tuple(chunks[:depth])
            node = self.find(parent, tokens)
            assert (node is not None) == (path in self.carriers)
            if node is None:
                block = self.unused_block()
                hash = self.hash_block(tokens, parent.hash)
                node = self.index.node(self.index.add(block, parent.number, tokens, hash))
                assert node.uid not in self.uids, f"uid {node.uid} has a second life"
                self.uids.add(node.uid)
                self.carriers[path] = [block]
            parent = node

    @rule(which=st.integers(0, 31))
    def add_carrier(self, which: int) -> None:
        """One block more has come to carry what is findable already."""
        if self.carriers:
            path = self.choose(which)
            block = self.unused_block()
            self.index.carry(block, self.node(path).number)
            self.carriers[path].append(block)

    @rule(which=st.integers(0, 31), carrier=st.integers(0, 2))
    def remove(self, which: int, carrier: int) -> None:
        """A block loses its content; with the last one, all that was reached through it goes too."""
        if not self.carriers:
            return
        path = self.choose(which)
        blocks = self.carriers[path]
        block = blocks.pop(carrier % len(blocks))
        node = self.node(path)
        orphans: list[int] = []
        if not blocks:
            namespace, chunks = path
            for other in list(self.carriers):
                if other[0] == namespace and other[1][: len(chunks)] == chunks:
                    self.dead.append((self.node(other), self.node(other).hash))
                    orphans += self.carriers.pop(other)
        assert self.index.remove(block, node.number) == sorted(orphans)
        if orphans:
            event("removed with orphans")

    @rule(which=st.integers(0, 31), tokens=CHUNKS)
    def find_under_the_dead(self, which: int, tokens: bytes) -> None:
        """A dead node is nobody's parent, whatever is written again at its place."""
        if self.dead:
            dead, hash = self.dead[which % len(self.dead)]
            assert self.index.find(dead.number, tokens, self.hash_block(tokens, hash)) == NONE

    # ---- invariants

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if hasattr(self, "index"):
            found = [(self.path(node), list(node.blocks)) for node in self.index.nodes()]
            assert len(found) == len(self.carriers)
            assert dict(found) == self.carriers

    @invariant()
    def finds_every_path(self) -> None:
        for path, blocks in getattr(self, "carriers", {}).items():
            node = self.node(path)
            assert self.path(node) == path
            assert list(node.blocks) == blocks
            assert [child.tokens for child in node.children] == [
                chunks[-1] for namespace, chunks in self.carriers if (namespace, chunks[:-1]) == path
            ]

    @invariant()
    def a_root_lives_with_its_children(self) -> None:
        if hasattr(self, "index"):
            for namespace in NAMESPACES:
                used = any(path[0] == namespace for path in self.carriers)
                assert (self.index.root(namespace) != NONE) == used, "an unused namespace is remembered"
            assert len(list(self.index.roots())) == len({namespace for namespace, _ in self.carriers})

    # ---- between paths, nodes and blocks

    def find(self, parent: Node, tokens: bytes) -> Node | None:
        node = self.index.find(parent.number, tokens, self.hash_block(tokens, parent.hash))
        return self.index.node(node) if node else None

    def node(self, path: Path) -> Node:
        """Walked from the root, as the manager walks."""
        namespace, chunks = path
        node = self.index.node(self.index.root(namespace))
        for tokens in chunks:
            child = self.find(node, tokens)
            assert child is not None, f"{path} can't be found"
            node = child
        return node

    def path(self, node: Node) -> Path:
        chunks: list[bytes] = []
        while node.parent is not None:
            chunks.insert(0, node.tokens)
            node = node.parent
        return node.namespace, tuple(chunks)

    def choose(self, which: int) -> Path:
        return list(self.carriers)[which % len(self.carriers)]

    def unused_block(self) -> int:
        """The lowest one: block numbers are used again soon, as a pool's are."""
        used = {block for blocks in self.carriers.values() for block in blocks}
        return next(block for block in range(len(used) + 1) if block not in used)
