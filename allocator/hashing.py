"""Namespaces and block hashes: the first step from tokens to a cached block.

A block's hash covers its tokens and, through the seed, its whole prefix and namespace. It is only the fast path to
a candidate: `PrefixIndex` verifies parent and tokens before it calls two blocks equal, so a weak hash costs time
and never correctness.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvproof.allocator.errors import InvalidArgument, shown

HashBlock = Callable[[bytes, int], int]
"""`hash_block(tokens, parent_hash)`, from 0 to 2**64 - 1: tokens are one whole block as little-endian int32."""

xxh3_chained: HashBlock = xxh3_64_intdigest
"""64-bit XXH3 of one block, chained to its prefix by taking the parent's hash as the seed."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who may share a cached prefix: sequences of equal namespaces, and no others.

    `salt` separates tenants and `adapter` the weights that computed the KV. Both are the caller's statement of
    *content*: an adapter reloaded with other weights needs another value here. The fields are tagged, so an adapter
    named "x" and a salt "x" stay apart; a field left out is shared by everyone who leaves it out.
    """

    salt: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("salt", self.salt), ("adapter", self.adapter)):
            if value is not None and type(value) is not str:
                raise InvalidArgument(f"{name} is {shown(value)}, must be a string or None")

    def encoded(self) -> bytes:
        """The fields as bytes, different for different namespaces."""
        parts = [(b"s", self.salt), (b"a", self.adapter)]
        # A salt may come from JSON, which can spell half a surrogate pair.
        encoded = [(tag, value.encode("utf-8", "surrogatepass")) for tag, value in parts if value is not None]
        return b"".join(tag + len(v).to_bytes(8, "little") + v for tag, v in encoded)

    def root_hash(self, hash_block: HashBlock) -> int:
        """The hash that the first block of every sequence in this namespace is chained to."""
        return hash_block(self.encoded(), 0)


SHARED = Namespace()
"""The namespace of sequences that name none."""
