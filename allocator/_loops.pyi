"""The compiled loops; `_loops.c` names the Python that each stands for, and what it leaves to it."""

from array import array

from kvproof.allocator.batch import DecodeBatch
from kvproof.allocator.hashing import HashBlock
from kvproof.allocator.index import PrefixIndex
from kvproof.allocator.policy import LRU
from kvproof.allocator.pool import BlockPool
from kvproof.allocator.sequence import Sequence
from kvproof.allocator.stats import Counters

def bind(sequence: type[Sequence], /) -> None: ...
def longest_table(starved: dict[Sequence, None], /) -> int: ...
def token_array(array_type: type[array[int]], tokens: list[int], /) -> array[int] | None: ...
def keys(seq: Sequence, first: int, stop: int, block_size: int, /) -> list[bytes]: ...
def chain(hash_block: HashBlock, keys: list[bytes], start: int, hashes: list[int], parent_hash: int, /) -> None: ...
def spread(index: PrefixIndex, buckets: array[int], /) -> None: ...
def find_run(
    index: PrefixIndex, parent: int, seq: Sequence, first: int, stop: int, block_size: int, /
) -> list[int]: ...
def refer(pool: BlockPool[int], blocks: list[int], /) -> None: ...
def share_run(pool: BlockPool[int], lru: type[LRU], blocks: list[int], /) -> int: ...
def release_run(pool: BlockPool[int], lru: type[LRU], blocks: list[int], /) -> int: ...
def evict_run(pool: BlockPool[int], index: PrefixIndex, counters: Counters, lru: type[LRU], n: int, /) -> list[int]: ...
def publish_run(
    index: PrefixIndex,
    pool: BlockPool[int],
    parent: int,
    seq: Sequence,
    first: int,
    keys: list[bytes],
    duplicates: dict[int, int],
    /,
) -> tuple[int, int]: ...
def prepare_rows(
    batch: DecodeBatch, rows: list[Sequence], start: int, hash_block: HashBlock | None, block_size: int, /
) -> list[tuple[Sequence, list[bytes]]]: ...
def commit_rows(
    batch: DecodeBatch,
    index: PrefixIndex,
    pool: BlockPool[int],
    pairs: list[tuple[Sequence, list[bytes]]],
    start: int,
    sampled: array[int],
    block_size: int,
    counters: Counters,
    /,
) -> int: ...
def serve_rows(batch: DecodeBatch, rows: list[Sequence], blocks: list[int], block_size: int, /) -> int: ...
