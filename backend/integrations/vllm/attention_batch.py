"""vLLM's batch and KV cache as our attention backends take them. Nothing here imports vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from kvproof.allocator import KvproofError
from kvproof.attention import BatchPlan, CacheSpec, InvalidBatch
from kvproof.attention.ownership import Ownership
from kvproof.attention.spec import INT32_LIMIT


class UnsupportedAttention(KvproofError, NotImplementedError):
    """A model, batch or cache of vLLM's asks for what our attention backends do not do; the message names it."""

    def __init__(self, feature: str) -> None:
        super().__init__(f"kvproof's attention backends do not support {feature}")


class Plan(BatchPlan):
    """A step of vLLM's, in which a request may read blocks that another writes in the same step.

    vLLM publishes a block when it is allocated, so requests with one prefix that arrive together share it at once. That
    is sound with backends that write all of a step's keys and values before they attend, as ours do.
    """

    def validate(self, spec: CacheSpec, ownership: Ownership | None = None) -> None:
        """All rules but block-shared, which is the last."""
        try:
            super().validate(spec, ownership)
        except InvalidBatch as error:
            if error.rule != "block-shared":
                raise


@dataclass(frozen=True, slots=True)
class Batch:
    """A step. `order`, where it is not None, are the places of the plan's tokens among those of vLLM, int64 [T]."""

    plan: Plan
    order: Tensor | None

    @classmethod
    def build(
        cls, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, block_size: int, window: int | None = None
    ) -> Self:
        """From vLLM's metadata of R rows, on any device: int32 [R + 1], [R] and [R, blocks].

        Rows without query tokens, which are padding, are left out. Rows of one token come first in a plan, wherever
        vLLM has them. Blocks that `window` has left are the null block in a plan; in vLLM's table they are what they
        were, although they may hold something else by now.
        """
        start, lens = (x.cpu().numpy().astype(np.int64) for x in (query_start_loc, seq_lens))
        query = np.diff(start)
        rows = np.flatnonzero(query)
        rows = rows[np.argsort(query[rows] != 1, kind="stable")]
        start, query, lens = start[rows], query[rows], lens[rows]
        within = np.arange(query.sum()) - np.repeat(np.cumsum(query) - query, query)  # each token's place in its row
        tokens = np.repeat(start, query) + within
        needed = -(-lens // block_size)
        left = np.maximum(lens - query + 1 - (window or INT32_LIMIT), 0) // block_size
        tables = []
        for blocks, count, hidden in zip(block_table.cpu().numpy()[rows], needed.tolist(), left.tolist(), strict=True):
            table = array("i", bytes(4 * hidden))  # of the null block, 0
            table.frombytes(blocks[hidden:count].astype(np.int32).tobytes())
            tables.append(table)
        plan = Plan.build(tables, lens.tolist(), query.tolist(), block_size)
        in_order = bool((tokens == np.arange(len(tokens))).all())
        return cls(plan, None if in_order else torch.from_numpy(tokens).to(block_table.device))


def paged_cache(layers: Sequence[Tensor]) -> Tensor:
    """The layers' caches as one of `CacheSpec.cache_shape` in NHD, over the same memory.

    `layers` are vLLM's views [blocks, kv heads, block size, 2 * head size] of one allocation in which each block of a
    layer is one piece of memory, its keys and values arranged as a backend likes. Raises `UnsupportedAttention` for
    others: those of two layers, or two blocks, must lie at one distance.
    """
    first = layers[0]
    num_blocks, heads, block_size, content = first.shape
    block = heads * block_size * content
    if first.stride() != (block, block_size * content, content, 1):
        raise UnsupportedAttention(f"a KV cache with strides {list(first.stride())}; set VLLM_KV_CACHE_LAYOUT=LBHNC")
    starts = np.array([layer.data_ptr() for layer in layers]) // first.element_size()
    distances = np.diff(starts)
    distance = int(distances[0]) if len(distances) else num_blocks * block
    one_allocation = len({layer.untyped_storage().data_ptr() for layer in layers}) == 1
    if not one_allocation or (distances != distance).any() or distance < num_blocks * block:
        raise UnsupportedAttention("a KV cache whose layers do not lie at one distance in one allocation")
    size = content // 2
    return first.as_strided(
        (len(layers), num_blocks, 2, block_size, heads, size),
        (distance, block, block // 2, heads * size, size, 1),
    )
