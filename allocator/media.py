"""Media among the tokens: what makes equal placeholder tokens different content."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from kvproof.allocator.errors import InvalidArgument, require_int, shown

MAX_POSITION = 2**31 - 1


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, clip or other input whose embeddings stand at tokens `start` to `start + length`.

    `key` identifies its content, such as a digest of the pixels: placeholder tokens say nothing about it.
    """

    key: str
    start: int
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise InvalidArgument(f"media key is {shown(self.key)}, must be a str")
        require_int("media start", self.start, 0, MAX_POSITION)
        require_int("media length", self.length, 1, MAX_POSITION - self.start)

    @property
    def stop(self) -> int:
        return self.start + self.length


def media_in(media: Iterable[MediaItem], start: int, stop: int) -> bytes:
    """Which part of which item stands where between the tokens `start` and `stop`, as bytes."""
    parts = []
    for item in media:
        first, last = max(item.start, start), min(item.stop, stop)
        if first < last:
            place = (first - start, first - item.start, last - first)
            key = item.key.encode("utf-8", "surrogatepass")
            parts.append(b"".join(n.to_bytes(8, "little") for n in (*place, len(key))) + key)
    return b"".join(parts)


class MediaPart(NamedTuple):
    """Tokens `offset` to `offset + length` of the item `key` stand at a block's tokens from `place` on."""

    place: int
    offset: int
    length: int
    key: str


def media_parts(encoded: bytes) -> tuple[MediaPart, ...]:
    """What `media_in` has encoded."""
    parts, at = [], 0
    while at < len(encoded):
        place, offset, length, size = (int.from_bytes(encoded[i : i + 8], "little") for i in range(at, at + 32, 8))
        at += 32 + size
        parts.append(MediaPart(place, offset, length, encoded[at - size : at].decode("utf-8", "surrogatepass")))
    return tuple(parts)


def clip_media(media: tuple[MediaItem, ...], stop: int) -> tuple[MediaItem, ...]:
    """The items up to token `stop`, the last one cut if it reaches past it."""
    return tuple(replace(m, length=min(m.length, stop - m.start)) for m in media if m.start < stop)


def checked_media(media: Iterable[MediaItem]) -> tuple[MediaItem, ...]:
    """The items in order of position. Raises `InvalidArgument` when two of them overlap, or one is no `MediaItem`."""
    items = tuple(media)
    for item in items:
        if not isinstance(item, MediaItem):
            raise InvalidArgument(f"media holds {shown(item)}, must be MediaItems")
    ordered = tuple(sorted(items, key=lambda item: item.start))
    for before, after in pairwise(ordered):
        if before.stop > after.start:
            raise InvalidArgument(f"media item {after.key!r} starts at {after.start}, inside {before.key!r}")
    return ordered
