"""What became findable and what no longer is: events for routers that send requests where their prefix is cached.

They follow the meaning of vLLM's KV events. Replaying them in order gives exactly the content that is findable.

An *identity* names a block's content wherever it was computed: the 128-bit XXH3 of the parent's identity and the
block's own key (its tokens as little-endian int32, and the media among them). The first block's parent is a digest of
the block size and the namespace. So an identity covers the whole prefix, and is the same in every process, on every
platform and in every version of Python. Two may collide (2^-128, and XXH3 is not made to withstand an attack): a router
would then send a request to a worse place. The allocator itself never decides by them.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xxhash import xxh3_128_digest

from kvproof.allocator.hashing import Namespace
from kvproof.allocator.media import MediaPart, media_parts

if TYPE_CHECKING:
    from kvproof.allocator.index import Node

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Content became findable: one block after the other, each below the one before it.

    blocks      identities, 16 bytes each
    parent      identity of what comes before the first of them, None at a sequence's beginning
    token_ids   the tokens of all of them, `block_size` each
    media       for each block, which parts of which media items stand at its tokens
    """

    blocks: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    namespace: Namespace
    media: tuple[tuple[MediaPart, ...], ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """No block carries this content any more: it was evicted or written over, or its prefix was."""

    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is findable any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def root_identity(namespace: Namespace, block_size: int) -> bytes:
    """What the first blocks of a namespace have for a parent."""
    return xxh3_128_digest(b"kvproof" + block_size.to_bytes(8, "little") + namespace.encoded())


def block_identity(parent: bytes, key: bytes) -> bytes:
    """The identity of a block of content `key` (see `Sequence.key`) after `parent`."""
    return xxh3_128_digest(parent + key)


class EventLog:
    """Keeps the identities of live nodes, and the events that were not taken yet."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._identities: dict[int, bytes] = {}  # by the nodes' numbers
        self.clearing = False  # all nodes are dying, which one event will tell
        self._events: list[Event] = []
        # Runs become one event each: of stored nodes, each the parent of the next, or of removed identities.
        self._stored: list[Node] = []
        self._removed: list[bytes] = []

    def identity(self, node: Node) -> bytes:
        """The identity of a live node's content."""
        if node.parent is None:
            return root_identity(node.namespace, self._block_size)
        return self._identities[node.number]

    def stored(self, node: Node, parent: Node) -> None:
        """`node` is new below `parent`."""
        if self._removed or (self._stored and self._stored[-1] != parent):
            self._end_run()
        self._identities[node.number] = block_identity(self.identity(parent), node.tokens)
        self._stored.append(node)

    def removed(self, node: Node) -> None:
        """`node` has died."""
        if self._stored:
            self._end_run()
        identity = self._identities.pop(node.number)
        if not self.clearing:
            self._removed.append(identity)

    def cleared(self) -> None:
        """All nodes have died."""
        self._end_run()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[Event]:
        self._end_run()
        events, self._events = self._events, []
        return events

    def _end_run(self) -> None:
        if self._stored:
            self._events.append(self._stored_event(self._stored))
        if self._removed:
            self._events.append(BlockRemoved(tuple(self._removed)))
        self._stored, self._removed = [], []

    def _stored_event(self, nodes: list[Node]) -> BlockStored:
        size = self._block_size * TOKEN_BYTES
        token_ids = array("i")
        for node in nodes:
            token_ids.frombytes(node.tokens[:size])
        if sys.byteorder == "big":
            token_ids.byteswap()
        parent = nodes[0].parent
        return BlockStored(
            blocks=tuple(self._identities[node.number] for node in nodes),
            parent=None if parent is None else self._identities.get(parent.number),  # none of a root
            token_ids=tuple(token_ids),
            block_size=self._block_size,
            namespace=nodes[0].namespace,
            media=tuple(media_parts(node.tokens[size:]) for node in nodes),
        )
