"""The prefix that all decodes of a step have in common, and their tables without it."""

from __future__ import annotations

import numpy as np
from torch import Tensor, from_numpy

from kvproof.attention.plan import BatchPlan


def common_prefix(batch: BatchPlan, at_least: int) -> int:
    """Number of blocks that all decodes of a valid batch begin with, or 0 if it is below `at_least` (1 or more).

    Two rows or more: a decode writes its last block, which is then its own, so that some of its blocks are left over.
    Without so long a prefix, this costs a look at one block of each row.
    """
    if batch.num_decodes < 2:
        return 0
    indptr, indices = batch.kv_indptr.numpy()[: batch.num_decodes + 1], batch.kv_indices.numpy()
    first, shortest = indptr[:-1, None], int(np.diff(indptr).min())
    if shortest <= at_least or np.ptp(indices[first + at_least - 1]):
        return 0
    same = (indices[first + np.arange(shortest)] == indices[:shortest]).all(axis=0)
    blocks = int(same.argmin())  # the last one is not the same
    return blocks if blocks >= at_least else 0


def without_prefix(kv_indptr: Tensor, kv_indices: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """kv_indptr and kv_indices of the same rows without the first `blocks` of each."""
    if not blocks:
        return kv_indptr, kv_indices
    indptr = kv_indptr.numpy()
    rest = np.ones(kv_indices.numel(), dtype=bool)
    rest[indptr[:-1, None] + np.arange(blocks)] = False
    shorter = indptr - blocks * np.arange(indptr.size, dtype=np.int32)
    return from_numpy(shorter), kv_indices[from_numpy(rest)]
