"""The compiled loops; `_loops.c` names the Python that each stands for, and what it leaves to it."""

from array import array

from kvproof.allocator.batch import DecodeBatch, RowMerge
from kvproof.allocator.hashing import HashBlock
from kvproof.allocator.index import PrefixIndex
from kvproof.allocator.policy import LRU
from kvproof.allocator.pool import BlockPool
from kvproof.allocator.sequence import Sequence
from kvproof.allocator.stats import Counters

def bind(sequence: type[Sequence], /) -> None: ...
def token_array(array_type: type[array[int]], tokens: list[int], /) -> array[int] | None: ...
def hash_run(hash_block: HashBlock, seq: Sequence, stop: int, block_size: int, /) -> None: ...
def spread(index: PrefixIndex, lookup: array[int], /) -> None: ...
def find_run(
    index: PrefixIndex, parent: int, seq: Sequence, first: int, stop: int, block_size: int, /
) -> list[int]: ...
def share_run(pool: BlockPool, lru: type[LRU], blocks: list[int], /) -> int: ...
def release_run(pool: BlockPool, lru: type[LRU], blocks: list[int], /) -> int: ...
def take_run(pool: BlockPool, index: PrefixIndex, counters: Counters, lru: type[LRU], n: object, /) -> list[int]: ...
def publish_run(
    index: PrefixIndex,
    pool: BlockPool,
    parent: int,
    seq: Sequence,
    first: int,
    stop: int,
    duplicates: dict[int, int],
    /,
) -> tuple[int, int]: ...
def commit_batch(
    batch: DecodeBatch,
    tokens: object,
    index: PrefixIndex,
    pool: BlockPool,
    hash_block: HashBlock | None,
    block_size: int,
    counters: Counters,
    plain: bool,
    /,
) -> list[RowMerge] | None: ...
def reserve_batch(batch: DecodeBatch, pool: BlockPool, block_size: int, /) -> list[Sequence] | None: ...
