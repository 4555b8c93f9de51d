"""One who knows a manager by its events only, as a router in front of several engines does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvproof.allocator import BlockRemoved, BlockStored, Event
from kvproof.fuzz.model import Prefix


@dataclass
class Router:
    """Replays events; any that do not balance, or name one content in two ways, fail.

    findable    what is findable now, by identity
    identities  of all content that was ever stored
    """

    block_size: int
    findable: dict[bytes, Prefix] = field(default_factory=dict)
    identities: dict[Prefix, bytes] = field(default_factory=dict)

    def read(self, events: Iterable[Event]) -> None:
        for told in events:
            if isinstance(told, BlockStored):
                self.store(told)
            elif isinstance(told, BlockRemoved):
                for block in told.blocks:
                    assert block in self.findable, "removed, and was not stored"
                    del self.findable[block]
            else:
                self.findable.clear()

    def store(self, told: BlockStored) -> None:
        assert (told.block_size, len(told.media)) == (self.block_size, len(told.blocks))
        prefix: Prefix = (told.namespace, (), ()) if told.parent is None else self.findable[told.parent]
        assert prefix[0] == told.namespace
        for i, block in enumerate(told.blocks):
            assert block not in self.findable, "stored twice"
            start = len(prefix[1])
            media = {(key, begin): length for key, begin, length in prefix[2]}
            for part in told.media[i]:
                media[part.key, start + part.place - part.offset] = part.offset + part.length
            tokens = told.token_ids[i * self.block_size : (i + 1) * self.block_size]
            assert len(tokens) == self.block_size
            prefix = told.namespace, prefix[1] + tokens, tuple((*place, length) for place, length in media.items())
            assert self.identities.setdefault(prefix, block) == block, "one content, two identities"
            self.findable[block] = prefix
        assert len(set(self.identities.values())) == len(self.identities), "two contents, one identity"
