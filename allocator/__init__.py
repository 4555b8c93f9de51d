"""The KV-cache block allocator: pure Python, no torch.

`BlockManager` is the whole of it for an engine; `BlockPool` and `PrefixIndex` are its two halves, each usable alone.
"""

from kvproof.allocator.batch import DecodeBatch, RowMerge
from kvproof.allocator.errors import (
    ConcurrencyError,
    IllegalTransition,
    InvalidArgument,
    InvariantViolation,
    KvproofError,
    SequenceStateError,
    require_int,
)
from kvproof.allocator.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvproof.allocator.hashing import HashBlock, Namespace, xxh3_chained
from kvproof.allocator.index import Node, PrefixIndex
from kvproof.allocator.manager import NULL_BLOCK, Admission, BlockManager, Merge, Pin
from kvproof.allocator.media import MediaItem, MediaPart
from kvproof.allocator.policy import FIFO, LRU, EvictionPolicy
from kvproof.allocator.pool import BlockPool, BlockState
from kvproof.allocator.sequence import Sequence
from kvproof.allocator.stats import Stats

__all__ = [
    "Admission",
    "AllBlocksCleared",
    "BlockManager",
    "BlockPool",
    "BlockRemoved",
    "BlockState",
    "BlockStored",
    "ConcurrencyError",
    "Event",
    "EvictionPolicy",
    "FIFO",
    "HashBlock",
    "IllegalTransition",
    "InvalidArgument",
    "InvariantViolation",
    "KvproofError",
    "LRU",
    "MediaItem",
    "MediaPart",
    "DecodeBatch",
    "RowMerge",
    "Merge",
    "NULL_BLOCK",
    "Namespace",
    "Node",
    "Pin",
    "PrefixIndex",
    "Sequence",
    "SequenceStateError",
    "Stats",
    "require_int",
    "xxh3_chained",
]
