"""Replaying a trace through a `BlockManager`: what a pool of a given size would have found in its prefix cache.

Only prompts are replayed. What a model answered is part of the next turn's prompt, but no trace says which of its
blocks that filled, so output can't be counted without counting it twice.

A replayed prompt is a sequence of pseudo-tokens that are equal where the trace says that the real ones are:

by blocks  one pseudo-token for `block_size` real ones, on a manager of block size 1. Every block of a prompt takes an
           entry of the cache, a partial last one too: the convention of published hit rates.
by tokens  one pseudo-token for each real one. Slower, and exact: an engine caches full blocks only.

Both leave a prompt's last token to compute, and so never find its last block: neither a partial one nor, when the
same prompt comes again, a full one. A longer prompt finds a full one. Counting such last blocks as found, as some do,
would add 0.0004 to the hit rate of Mooncake's conversation trace.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice

from kvproof.allocator.errors import InvalidArgument, require_int
from kvproof.allocator.manager import Admission, BlockManager
from kvproof.allocator.policy import EvictionPolicy
from kvproof.allocator.pool import MAX_BLOCKS
from kvproof.allocator.sequence import Sequence
from kvproof.allocator.traces import Request, Trace


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one pool made of a trace.

    num_blocks     blocks in the pool
    block_size     tokens in a block
    requests       replayed, refused ones included
    refused        requests of more blocks than the pool has
    prompt_blocks  blocks of all prompts, partial last ones and those of refused requests included
    hit_blocks     leading blocks of the prompts that were found in the cache
    evictions      blocks that lost their content to make room
    peak_blocks    most blocks referenced at once
    seconds        spent inside the allocator
    """

    num_blocks: int
    block_size: int
    requests: int
    refused: int
    prompt_blocks: int
    hit_blocks: int
    evictions: int
    peak_blocks: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        """Share of the prompt blocks that were found."""
        return self.hit_blocks / self.prompt_blocks if self.prompt_blocks else 0.0

    @property
    def hit_tokens(self) -> int:
        """Tokens that need not be computed: only full blocks are ever found."""
        return self.hit_blocks * self.block_size


def replay(
    trace: Trace,
    num_blocks: int,
    *,
    block_size: int | None = None,
    policy: EvictionPolicy | None = None,
    by_tokens: bool = False,
    concurrency: int = 1,
    on_request: Callable[[], None] = lambda: None,
) -> ReplayResult:
    """Run the trace's prompts, in order of arrival, through a pool of `num_blocks` blocks.

    A request is admitted, computed at once, and holds its blocks until the `concurrency`-th one after it arrives, or a
    later one needs the room: the trace's own times decide about the order only. A request that the whole pool can't
    hold is refused: it finds nothing and evicts nothing.

    block_size  divides the trace's, which is the default. The trace does not say what is shared below its own blocks:
                smaller ones are found where whole blocks of the trace are
    policy      a new one, LRU by default
    on_request  called after each request

    Raises `InvalidArgument` for a value out of range, and what the iteration over the trace raises.
    """
    require_int("concurrency", concurrency, 1, MAX_BLOCKS)
    block_size = _block_size(trace, block_size)
    unit = 1 if by_tokens else block_size  # real tokens that a pseudo-token stands for
    manager = BlockManager(num_blocks, block_size // unit, policy=policy)
    running: deque[Sequence] = deque()
    requests = refused = prompt_blocks = peak_blocks = 0
    seconds = 0.0
    for request in trace.requests:
        requests += 1
        prompt_blocks += -(-request.input_length // block_size)
        tokens = _pseudo_tokens(request, trace.block_size // unit, unit)
        started = time.perf_counter()
        if len(running) == concurrency:
            manager.release(running.popleft())
        seq = manager.sequence(tokens)
        while (answer := manager.admit(seq)) is Admission.LATER:
            manager.release(running.popleft())
        if answer is Admission.NOW:
            running.append(seq)
            peak_blocks = max(peak_blocks, manager.num_used)
            manager.commit(seq, len(seq) - seq.num_computed)
        else:
            refused += 1
        seconds += time.perf_counter() - started
        on_request()
    while running:
        manager.release(running.popleft())
    stats = manager.stats()
    return ReplayResult(
        num_blocks=num_blocks,
        block_size=block_size,
        requests=requests,
        refused=refused,
        prompt_blocks=prompt_blocks,
        hit_blocks=stats.tokens_hit // manager.block_size,
        evictions=stats.evictions,
        peak_blocks=peak_blocks,
        seconds=seconds,
    )


def default_pool_sizes(trace: Trace, *, block_size: int | None = None, concurrency: int = 1) -> list[int]:
    """A ladder of pool sizes for a trace that can be iterated more than once: powers of four from the first that holds
    the longest prompt, and last a size at which nothing is evicted. Empty for an empty trace."""
    block_size = _block_size(trace, block_size)
    distinct: set[int] = set()
    longest = 0
    for request in trace.requests:
        distinct.update(request.blocks)
        longest = max(longest, -(-request.input_length // block_size))
    # A running request may need a copy of its own of a last block that is cached: it computes it before it can tell.
    everything = len(distinct) * (trace.block_size // block_size) + concurrency
    powers = [4**i for i in range(16) if longest <= 4**i < everything]
    return [*powers, everything] if distinct else []


def _block_size(trace: Trace, block_size: int | None) -> int:
    if block_size is None:
        return trace.block_size
    require_int("block_size", block_size, 1, trace.block_size)
    if trace.block_size % block_size:
        raise InvalidArgument(f"block_size is {block_size}, must divide the trace's {trace.block_size}")
    return block_size


def _pseudo_tokens(request: Request, per_block: int, unit: int) -> Iterable[int]:
    if per_block == 1:
        return request.blocks
    tokens = chain.from_iterable(range(block * per_block, (block + 1) * per_block) for block in request.blocks)
    return list(islice(tokens, -(-request.input_length // unit)))
