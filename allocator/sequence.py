"""One sequence as the allocator sees it: its tokens, its block table and how far each has come."""

from __future__ import annotations

import copy
import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvproof.allocator import loops
from kvproof.allocator.errors import InvalidArgument, SequenceStateError, require_int, shown
from kvproof.allocator.hashing import Namespace
from kvproof.allocator.media import MediaItem, media_in

if TYPE_CHECKING:
    from kvproof.allocator.batch import DecodeBatch

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**31 - 1
MAX_LENGTH = 2**31 - 1


class Sequence:
    """Made by `BlockManager.sequence`, and driven by that manager alone.

    It lives as long as its request: a preempted sequence is released and admitted again, and keeps its tokens and
    the hashes of its blocks. Three counts say how far it is, `0 <= num_computed <= num_reserved`:

        len(seq)      tokens known, prompt and output
        num_reserved  tokens that have a slot in the block table
        num_computed  tokens whose KV is written

    While a `DecodeBatch` has it, a look at these or at its tokens may bring it up to date: not for a second thread.
    """

    __slots__ = ("_batch", "_due", "_flight", "_hashes", "_manager", "_num_cached", "_num_computed", "_num_reserved",
                 "_row", "_settled_at", "_table", "_tokens", "_was_admitted", "max_length", "media",
                 "namespace")  # fmt: skip

    def __init__(
        self,
        manager: object,
        tokens: Iterable[int],
        max_length: int | None,
        namespace: Namespace,
        media: tuple[MediaItem, ...],
    ) -> None:
        self._manager = manager
        self._tokens = token_array(tokens)
        if not self._tokens:
            raise InvalidArgument("a sequence needs at least one token")
        if max_length is not None:
            require_int("max_length", max_length, len(self._tokens), MAX_LENGTH)
        self._hashes = array("Q")
        self._table = array("i")
        self._num_computed = self._num_reserved = self._num_cached = 0
        self.max_length = max_length
        self.namespace = namespace
        self.media = media
        self._flight: int | None = None  # the step it was last launched in
        self._was_admitted = False
        # The decode batch that moves it, its row there, and the batch's steps when it was last brought up to date and
        # when there is something to do for it.
        self._batch: DecodeBatch | None = None
        self._row = self._settled_at = self._due = 0

    def __len__(self) -> int:
        if self._batch is not None:
            self._batch._look_at(self)  # pyright: ignore[reportArgumentType] - by folder, it sees this class twice
        return len(self._tokens)

    def __repr__(self) -> str:
        return (
            f"<Sequence of {len(self)} tokens, {self._num_computed} computed, {self._num_reserved} reserved, "
            f"{len(self._table)} blocks>"
        )

    @property
    def num_computed(self) -> int:
        if self._batch is not None:
            self._batch._look_at(self)  # pyright: ignore[reportArgumentType] - by folder, it sees this class twice
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
        if self._batch is not None:
            self._batch._look_at(self)  # pyright: ignore[reportArgumentType] - by folder, it sees this class twice
        return self._tokens[start:stop]

    def key(self, i: int, block_size: int) -> bytes:
        """What block `i` holds, apart from its prefix: its tokens as little-endian int32, and the media among them."""
        start, stop = i * block_size, (i + 1) * block_size
        key = little_endian(self._tokens[start:stop])
        return key + media_in(self.media, start, stop) if self.media else key

    def append(self, token: int) -> None:
        """One more token is known, usually the one just sampled. It has no slot before `reserve` gives it one."""
        if type(token) is int and 0 <= token <= MAX_TOKEN_ID and self._batch is None:
            self._tokens.append(token)
        else:
            self.extend((token,))

    def _fork(self) -> Sequence:
        """A copy on the same blocks. It has taken no reference to them: that is the manager's part."""
        child = copy.copy(self)
        child._tokens, child._hashes, child._table = self._tokens[:], self._hashes[:], self._table[:]
        child._num_cached, child._flight = 0, None
        return child

    def extend(self, tokens: Iterable[int]) -> None:
        """More tokens are known.

        Raises `InvalidArgument`, and adds none, unless all are in 0 to `MAX_TOKEN_ID`; and `SequenceStateError` while a
        decode batch has the sequence, whose `commit` brings its tokens.
        """
        if self._batch is not None:
            raise SequenceStateError(f"{self} is in a decode batch: its tokens come with the batch's commit")
        self._tokens.extend(token_array(tokens))


if loops.compiled is not None:
    loops.compiled.bind(Sequence)


def token_array(tokens: Iterable[int]) -> array[int]:
    """A private int32 copy of `tokens`, so that what the caller does to a list later can't reach the cache.

    Raises `InvalidArgument` for anything but integers from 0 to `MAX_TOKEN_ID`.
    """
    if loops.compiled is not None and type(tokens) is list:
        checked: array[int] | None = loops.compiled.token_array(array, tokens)
        if checked is not None:
            return checked
    values: list[int] = []
    try:
        if isinstance(tokens, array) and tokens.typecode == "i":
            private = tokens[:]
        else:
            values = tokens if type(tokens) is list else list(tokens)  # an array would take bytes for its own memory
            private = array("i", values)
    except (OverflowError, TypeError):
        bad = next((value for value in values if not _is_token_id(value)), tokens)
        raise InvalidArgument(f"{shown(bad)} is no token id, must be an integer from 0 to {MAX_TOKEN_ID}") from None
    # The highest byte of each is below 128 just when none is negative; this is ten times as fast as min().
    if not little_endian(private)[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
        raise InvalidArgument(f"{min(private)} is no token id, must be an integer from 0 to {MAX_TOKEN_ID}")
    return private


def little_endian(tokens: array[int]) -> bytes:
    """The tokens as the bytes that hashes and keys are made of, on every platform."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def _is_token_id(value: int) -> bool:
    try:
        return array("i", (value,))[0] >= 0
    except (OverflowError, TypeError):
        return False
