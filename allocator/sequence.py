"""One sequence as the allocator sees it: its tokens, its block table and how far each has come."""

from __future__ import annotations

import copy
import sys
from array import array
from collections.abc import Iterable

from kvproof.allocator.errors import InvalidArgument, require_int, shown
from kvproof.allocator.hashing import Namespace
from kvproof.allocator.media import MediaItem, media_in

MAX_TOKEN_ID = 2**31 - 1
MAX_LENGTH = 2**31 - 1


class Sequence:
    """Made by `BlockManager.sequence`, and driven by that manager alone.

    It lives as long as its request: a preempted sequence is released and admitted again, and keeps its tokens and
    the hashes of its blocks. Three counts say how far it is, `0 <= num_computed <= num_reserved`:

        len(seq)      tokens known, prompt and output
        num_reserved  tokens that have a slot in the block table
        num_computed  tokens whose KV is written
    """

    __slots__ = ("_flight", "_hashes", "_manager", "_num_cached", "_num_computed", "_num_reserved", "_table",
                 "_tokens", "_was_admitted", "max_length", "media", "namespace")  # fmt: skip

    def __init__(
        self,
        manager: object,
        tokens: Iterable[int],
        max_length: int | None,
        namespace: Namespace,
        media: tuple[MediaItem, ...],
    ) -> None:
        self._manager = manager
        self._tokens = _token_array(tokens)
        if not self._tokens:
            raise InvalidArgument("a sequence needs at least one token")
        if max_length is not None:
            require_int("max_length", max_length, len(self._tokens), MAX_LENGTH)
        self._hashes: list[int] = []
        self._table = array("i")
        self._num_computed = self._num_reserved = self._num_cached = 0
        self.max_length = max_length
        self.namespace = namespace
        self.media = media
        self._flight: int | None = None  # the step it was last launched in
        self._was_admitted = False

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        return (
            f"<Sequence of {len(self)} tokens, {self._num_computed} computed, {self._num_reserved} reserved, "
            f"{len(self._table)} blocks>"
        )

    @property
    def num_computed(self) -> int:
        return self._num_computed

    @property
    def num_reserved(self) -> int:
        return self._num_reserved

    @property
    def num_cached(self) -> int:
        """Tokens that the last admission found in the prefix cache."""
        return self._num_cached

    @property
    def block_table(self) -> array[int]:
        """The blocks in order, as int32. This is the live table, for reading: only the manager may write it, and the
        next admission, reserve or release may put another array in its place."""
        return self._table

    def tokens(self, start: int = 0, stop: int | None = None) -> array[int]:
        """A copy of the token ids from `start` to `stop`, as int32."""
        return self._tokens[start:stop]

    def key(self, i: int, block_size: int) -> bytes:
        """What block `i` holds, apart from its prefix: its tokens as little-endian int32, and the media among them."""
        start, stop = i * block_size, (i + 1) * block_size
        tokens = self._tokens[start:stop]
        if sys.byteorder == "big":
            tokens.byteswap()
        return tokens.tobytes() + media_in(self.media, start, stop) if self.media else tokens.tobytes()

    def append(self, token: int) -> None:
        """One more token is known, usually the one just sampled. It has no slot before `reserve` gives it one."""
        self.extend((token,))

    def _fork(self) -> Sequence:
        """A copy on the same blocks. It has taken no reference to them: that is the manager's part."""
        child = copy.copy(self)
        child._tokens, child._hashes, child._table = self._tokens[:], self._hashes[:], self._table[:]
        child._num_cached, child._flight = 0, None
        return child

    def extend(self, tokens: Iterable[int]) -> None:
        """More tokens are known. Raises `InvalidArgument`, and adds none, unless all are in 0 to `MAX_TOKEN_ID`."""
        self._tokens.extend(_token_array(tokens))


def _token_array(tokens: Iterable[int]) -> array[int]:
    """A private int32 copy of `tokens`, so that what the caller does to a list later can't reach the cache."""
    values: list[int] = []
    try:
        if isinstance(tokens, array) and tokens.typecode == "i":
            private = tokens[:]
        else:
            values = list(tokens)  # an array would take bytes for its own memory
            private = array("i", values)
            if bool in map(type, values):
                raise TypeError  # to an array, True is 1
    except (OverflowError, TypeError):
        bad = next((value for value in values if not _is_token_id(value)), tokens)
        raise InvalidArgument(f"{shown(bad)} is no token id, must be an integer from 0 to {MAX_TOKEN_ID}") from None
    if private and min(private) < 0:
        raise InvalidArgument(f"{min(private)} is no token id, must be an integer from 0 to {MAX_TOKEN_ID}")
    return private


def _is_token_id(value: int) -> bool:
    try:
        return type(value) is not bool and array("i", (value,))[0] >= 0
    except (OverflowError, TypeError):
        return False
