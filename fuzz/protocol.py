"""What a block pool or a block allocator must offer for `kvproof fuzz allocator --target module:Class`.

A class that has the methods of `Pool` or of `Allocator` is fuzzed as it is; `kvproof.fuzz.adapters` has what puts
nano-vllm's, vLLM's and our own classes behind them. "Refused" means: an exception, or the answer that stands for it,
and in both cases nothing has changed.

Each check has a name. `--known NAME` leaves it out, so that a campaign goes on to what is behind a known failure. One
more, valid-call, can't be left out: a call that the protocol allows does not raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Pool(Protocol):
    """Blocks with reference counts, made by `Class(num_blocks)`."""

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        ...

    def take(self, n: int) -> Sequence[int]:
        """`n` blocks without an owner, whose only owner is the caller now; refused if there are fewer."""
        ...

    def share(self, block: int) -> None:
        """One owner more."""

    def give_back(self, blocks: Sequence[int]) -> None:
        """One owner less for each; refused as a whole if there are fewer owners than that."""

    def refs(self, block: int) -> int:
        """How many owners `block` has."""
        ...


class Allocator(Protocol):
    """Block tables for sequences of tokens, made by `Class(num_blocks, block_size)`; `seq` is what `allocate` gave."""

    @property
    def num_free(self) -> int:
        """Blocks that no sequence has."""
        ...

    def allocate(self, tokens: list[int]) -> Any:
        """A sequence with slots for `tokens`, or None when they don't fit now."""
        ...

    def num_cached(self, seq: Any) -> int:
        """How many leading tokens need not be computed, since the prefix cache had them when `seq` was allocated."""
        ...

    def written(self, seq: Any) -> None:
        """The KV of every token of `seq` has been written."""

    def append(self, seq: Any, tokens: list[int]) -> bool:
        """Slots for more tokens, sampled after `written`; False when they don't fit now."""
        ...

    def table(self, seq: Any) -> Sequence[int]:
        """The blocks of `seq` in order."""
        ...

    def free(self, seq: Any) -> None:
        """`seq` is no more; a second time is refused, or changes nothing."""


POOL_CHECKS = {
    "distinct": "blocks that are handed out had no owner, and none is handed out twice",
    "counts": "a block's count is the number of its owners",
    "free-count": "as many blocks are free as have no owner",
    "take-negative": "taking -1 blocks is refused",
    "take-too-many": "taking more blocks than are free is refused",
    "free-twice": "giving back a block without an owner is refused",
    "free-repeated": "giving back a block twice in one call, which has one owner, is refused",
}

ALLOCATOR_CHECKS = {
    "block-size-1": "blocks of one token work",
    "several-tokens": "several tokens can be appended at once",
    "table-length": "a table has a block for every slot, and no more",
    "reads-its-own": "what a sequence reads through its table is its own prefix, token by token",
    "found-when-written": "a prefix is found only after its KV was written",
    "leaves-a-token": "the prefix cache leaves a token to compute, whose logits the next one is sampled from",
    "free-count": "as many blocks are free as are in no table",
    "fits": "what fits into the free blocks is not refused",
    "refused-unchanged": "what is refused changes nothing",
    "free-twice": "freeing a sequence a second time is refused or changes nothing",
}


class Violation(AssertionError):
    """A check that did not hold."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")


class Checked:
    """What both machines have: the checks that are left out."""

    known: frozenset[str] = frozenset()

    def check(self, name: str, holds: bool, message: str) -> None:
        if not holds and name not in self.known:
            raise Violation(name, message)
