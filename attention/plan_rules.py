"""The rules of `BatchPlan`, on its arrays as int64: each function raises `InvalidBatch` with the rule's name.

`kv_indices` alone is looked at as it is, int32: it has an entry for every block of every row, at every step.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvproof.allocator import NULL_BLOCK
from kvproof.attention.errors import InvalidBatch

Ints = NDArray[np.int64]
Blocks = NDArray[np.int32]


def tokens(qo_indptr: Ints, kv_indptr: Ints, indices: Blocks, seq: Ints, block_size: int) -> tuple[Ints, Ints]:
    """Position and slot of every query token."""
    query = qo_indptr[1:] - qo_indptr[:-1]
    positions = np.arange(qo_indptr[-1]) + np.repeat(seq - qo_indptr[1:], query)
    block, offset = np.divmod(positions, block_size)
    blocks = indices[np.repeat(kv_indptr[:-1], query) + block].astype(np.int64)
    return positions, blocks * block_size + offset


def check_storage(name: str, tensor: Tensor) -> None:
    if tensor.dtype is not torch.int32:
        raise InvalidBatch("dtype", f"{name} is {tensor.dtype}; it must be torch.int32")
    if tensor.device.type != "cpu":
        raise InvalidBatch("device", f"{name} is on {tensor.device}; it must be on the CPU")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise InvalidBatch(
            "contiguous",
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be contiguous and 1-D",
        )


def counts(name: str, indptr: Ints) -> Ints:
    if indptr[0] != 0:
        raise InvalidBatch("indptr", f"{name} starts at {indptr[0]}; it must start at 0")
    counts = indptr[1:] - indptr[:-1]
    if (bad := counts < 0).any():
        row = int(bad.argmax())
        raise InvalidBatch("indptr", f"{name} decreases at row {row}, from {indptr[row]} to {indptr[row + 1]}")
    return counts


def check_lengths(seq: Ints, blocks: Ints, last: Ints, block_size: int) -> None:
    filled = blocks > 0
    if (bad := filled & ((last < 1) | (last > block_size))).any():
        row = int(bad.argmax())
        raise InvalidBatch("last-page-len", f"row {row} has kv_last_page_len {last[row]}; it must be 1 to {block_size}")
    if (bad := ~filled & ((last != 0) | (seq != 0))).any():
        row = int(bad.argmax())
        raise InvalidBatch(
            "empty-row", f"row {row} has no blocks but kv_last_page_len {last[row]} and seq_len {seq[row]}"
        )
    if (bad := filled & (seq != (blocks - 1) * block_size + last)).any():
        row = int(bad.argmax())
        raise InvalidBatch(
            "seq-len",
            f"row {row} has seq_len {seq[row]}; its {blocks[row]} blocks and kv_last_page_len {last[row]} "
            f"hold {(blocks[row] - 1) * block_size + last[row]}",
        )


def check_rows(query: Ints, seq: Ints) -> int:
    """Check each row's query against its sequence, and return the number of decodes."""
    if not len(seq):
        raise InvalidBatch("lengths", "the batch has 0 rows; it must have at least 1")
    if (bad := (query == 0) != (seq == 0)).any():
        row = int(bad.argmax())
        raise InvalidBatch("empty-row", f"row {row} has query_len {query[row]} but seq_len {seq[row]}")
    if (bad := (query < 0) | (query > seq)).any():
        row = int(bad.argmax())
        raise InvalidBatch("query-len", f"row {row} has query_len {query[row]}; it must be 0 to seq_len {seq[row]}")
    decodes = query == 1
    num_decodes = int(np.count_nonzero(decodes))
    if not decodes[:num_decodes].all():
        row = int(decodes.argmin())
        raise InvalidBatch(
            "decodes-first", f"row {row} has query_len {query[row]} and comes before rows of query_len 1"
        )
    return num_decodes


def check_ownership(kv_indptr: Ints, indices: Blocks, first_written: Ints, hidden: Ints) -> None:
    """A row names a block once, and only it names the blocks it writes: those from its first_written on.

    Of the first `hidden` blocks of a row, which its window has left, those that are the null block do not count.
    """
    several = named_more_than_once(indices)
    if not several.any():
        return
    rows, blocks = len(first_written), np.diff(kv_indptr)
    row_of = np.repeat(np.arange(rows), blocks)
    at_in_row = np.arange(len(indices)) - np.repeat(kv_indptr[:-1], blocks)
    written = at_in_row >= np.repeat(first_written, blocks)
    if hidden.any():
        null = indices == NULL_BLOCK
        left = null & (at_in_row < np.repeat(hidden, blocks))
        if (seen := np.intersect1d(row_of[left], row_of[null & ~left])).size:
            raise InvalidBatch("block-repeated", f"row {seen[0]} names block {NULL_BLOCK} more than once, and sees it")
        several &= ~left
    indices, row_of, written = indices[several], row_of[several], written[several]
    # One sort brings every block's users together; a written block's neighbour is another user of it.
    users = np.sort((indices.astype(np.int64) * rows + row_of) * 2 + written)
    user, writes = users >> 1, users & 1
    if (bad := user[1:] == user[:-1]).any():
        block, row = divmod(int(user[bad.argmax()]), rows)
        raise InvalidBatch("block-repeated", f"row {row} names block {block} more than once")
    block_of = user // rows
    if (bad := (block_of[1:] == block_of[:-1]) & ((writes[1:] | writes[:-1]) == 1)).any():
        at = int(bad.argmax())
        writer, other = (at, at + 1) if writes[at] else (at + 1, at)
        raise InvalidBatch(
            "block-shared",
            f"row {user[writer] % rows} writes block {block_of[writer]}, which row {user[other] % rows} names too",
        )


def named_more_than_once(indices: Blocks) -> NDArray[np.bool_]:
    """Which entries name a block that another one names as well. Usually none do, which takes no sorting to see."""
    at = indices.astype(np.intp)  # as it would be converted at each use
    named = np.zeros(at.max(initial=-1) + 1, dtype=np.bool_)
    named[at] = True
    if np.count_nonzero(named) == len(at):
        return np.zeros(len(at), dtype=np.bool_)
    return np.bincount(at)[at] > 1


def check_padding(num_padding: int, num_decodes: int, kv_indptr: Ints, indices: Blocks, seq: Ints) -> None:
    """The last num_padding rows hold one token, of the null block, and no other row names it."""
    live = len(seq) - num_padding
    if live < 0 or num_padding < 0 or num_decodes != len(seq):
        raise InvalidBatch(
            "padding", f"num_padding is {num_padding}; there are {len(seq)} rows, {num_decodes} of them decodes"
        )
    if (bad := seq[live:] != 1).any():
        row = live + int(bad.argmax())
        raise InvalidBatch("padding", f"row {row} is padding and has seq_len {seq[row]}; it must be 1")
    bad, first = indices == NULL_BLOCK, kv_indptr[live]
    np.logical_not(bad[first:], out=bad[first:])
    if bad.any():
        row, at = locate(bad, kv_indptr)
        is_padding = "padding and names" if at >= first else "not padding and names"
        limit = f"not {NULL_BLOCK}" if at >= first else "which padding writes"
        raise InvalidBatch("padding", f"row {row} is {is_padding} block {indices[at]}, {limit}")


def locate(bad: NDArray[np.bool_], indptr: Ints) -> tuple[int, int]:
    """Row and index of the first bad entry of an array that `indptr` divides into rows."""
    at = int(bad.argmax())
    return int(np.searchsorted(indptr, at, side="right")) - 1, at
