"""What an allocator with the interface of `BlockManager` must do.

The interface, and all that is used of it:

    Allocator(num_blocks, block_size, *, prefix_caching, merge_duplicates)
    sequence  admit  reserve  commit  fork  truncate  release  take_copies  check  num_used
    on a sequence: extend  num_computed  num_reserved  block_table

`AttentionMachine` runs it under a real KV cache with the reference attention: what it hands out, shares, copies and
finds again must leave every sequence with its own history. A subclass of `BlockManager` is compared with the executable
model too, block by block.
"""

from __future__ import annotations

from collections.abc import Callable

from kvproof.allocator import BlockManager
from kvproof.attention.reference import ReferenceAttention
from kvproof.fuzz.conformance.report import Check, on_machine
from kvproof.fuzz.machines.manager import ManagerMachine


def checks(make: Callable[..., BlockManager]) -> tuple[Check, ...]:
    """All checks of the allocators that `make` makes."""
    from kvproof.fuzz.machines.attention import AttentionMachine  # which stands on this package's batches

    class Attention(AttentionMachine):
        backend = ReferenceAttention
        make_manager = staticmethod(make)

    class Manager(ManagerMachine):
        make_manager = staticmethod(make)

    used = on_machine("sequences keep their own history", Attention)
    if isinstance(make, type) and issubclass(make, BlockManager):
        return used, on_machine("it does what the model does", Manager)
    return (used,)
