"""Faults in what an admission takes, and what is told of it."""

from __future__ import annotations

from kvproof.allocator import BlockManager
from kvproof.fuzz.planted.fault import Fault

ADMISSION_FAULTS = (
    Fault(
        "published before it is written",
        BlockManager,
        "admit",
        "self._admitted[seq] = None",
        "self._admitted[seq] = None\n"
        "        first, stop = len(quote.hits), seq._num_reserved // self.block_size\n"
        "        stop > first and (self._prefixes.prepare(seq, first, stop), self._prefixes.publish(seq, first, stop))",
        "a request hits a block that nobody has written yet (vllm#29387, nano-vllm#208)",
    ),
    Fault(
        "revived hits cost nothing",
        BlockManager,
        "_quote",
        "num_new_blocks + num_revived",
        "num_new_blocks",
        "the check forgets that a free hit leaves the free list (vllm#11565)",
    ),
    Fault(
        "exact fit refused",
        BlockManager,
        "_quote",
        "spare <= self.pool.num_free",
        "spare < self.pool.num_free",
        "admission and allocation count differently (sglang#5081)",
    ),
    Fault(
        "hit evicted for its successor",
        BlockManager,
        "_take_after",
        "self.pool.share_all(hits)",
        "[self.pool.release(b) for b in self.pool.take(num_new_blocks)]\n    self.pool.share_all(hits)",
        "blocks are taken before the hits are held (vllm#37076)",
    ),
    Fault(
        "nothing left to compute",
        BlockManager,
        "_hits",
        "(len(seq) - 1) // self.block_size",
        "len(seq) // self.block_size",
        "a prompt of whole blocks, all cached, has no token to compute (vllm#11186, nano-vllm#114)",
    ),
    Fault(
        "lifetime not declared",
        BlockManager,
        "_quote",
        "if self._blocks_for(lifetime) > self.num_blocks:",
        "if self._blocks_for(len(seq)) > self.num_blocks:",
        "the only running sequence needs one block more than there are (nano-vllm#274)",
    ),
    Fault(
        "watermark ignored",
        BlockManager,
        "_quote",
        "num_revived + spare",
        "num_revived",
        "admission fills the pool to the brim and is preempted at once",
    ),
    Fault(
        "watermark blocks the only request",
        BlockManager,
        "_quote",
        "self.watermark if self._admitted else 0",
        "self.watermark",
        "nobody runs, and still it does not fit",
    ),
    Fault(
        "hits counted at the question",
        BlockManager,
        "can_admit",
        "return self._quote(seq, limit).answer",
        "quote = self._quote(seq, limit)\n"
        "    self._counters.tokens_hit += len(quote.hits) * self.block_size\n"
        "    return quote.answer",
        "a request that waits is counted again each step, and the hit rate passes 1",
    ),
    Fault(
        "a preempted request counts twice",
        BlockManager,
        "_count_admission",
        "seq._was_admitted = True",
        "pass",
        "under pressure the hit rate goes up, because everybody finds what he has lost",
    ),
)
