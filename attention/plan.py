"""One step's batch metadata, in the layout that paged-attention kernels share.

The kernels check little of it: FlashInfer, for one, reads past the page on a last_page_len that is too large
and out of bounds on a page number that is. So `BatchPlan.validate` enforces these rules, by these names:

    dtype, device, contiguous   every array is int32, on the CPU, contiguous and one-dimensional
    lengths         the arrays agree on the number of rows B >= 1 and of tokens T = qo_indptr[-1]
    indptr          qo_indptr and kv_indptr start at 0 and never decrease
    indices-length  kv_indices holds exactly kv_indptr[-1] blocks
    block-range     every block is in [0, num_blocks)
    last-page-len   1 <= kv_last_page_len <= block_size in a row that has blocks
    empty-row       no query tokens, no blocks, kv_last_page_len 0 and seq_len 0 go together
    seq-len         seq_len == (blocks - 1) * block_size + kv_last_page_len
    query-len       0 <= query_len <= seq_len
    decodes-first   rows of one query token are the first num_decodes rows, and there are no others
    positions       a row's query tokens are its last ones: seq_len - query_len + i
    slot-mapping    each token's slot is the one that its row's blocks give its position
    block-repeated  a row names a block once
    block-shared    a block that one row writes is named by no other row

Two tokens can't write one slot: that would take a repeated or a shared block, or a wrong position.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvproof.allocator.errors import InvalidArgument
from kvproof.attention.errors import InvalidBatch
from kvproof.attention.spec import CacheSpec

Ints = NDArray[np.int64]

ARRAYS: Final = (
    "qo_indptr",
    "kv_indptr",
    "kv_indices",
    "kv_last_page_len",
    "slot_mapping",
    "positions",
    "seq_lens",
)


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """What every layer of one step needs to know about its B rows (sequences) and T query tokens.

    All arrays are contiguous int32 CPU tensors:

    qo_indptr         [B+1]  row r's query tokens are qo_indptr[r] to qo_indptr[r+1] of T
    kv_indptr         [B+1]  row r's blocks are kv_indices[kv_indptr[r]:kv_indptr[r+1]]
    kv_indices        [N]    blocks of all rows, in sequence order
    kv_last_page_len  [B]    used slots of each row's last block
    slot_mapping      [T]    slot that each token's key and value are written to: block * block_size + offset
    positions         [T]    index of each token in its sequence
    seq_lens          [B]    tokens of each sequence, this step's included

    Rows of one query token (decodes) come first; `num_decodes` counts them. Attention is causal and aligned
    to the end: query token i of a row sees its sequence up to position seq_len - query_len + i.

    A row with nothing to compute, such as padding up to a fixed batch size, has one form: no blocks and
    kv_last_page_len, seq_len and query_len all 0. Such rows read nothing, write nothing and have no output.
    There are no padding tokens: slot_mapping never holds -1.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor
    slot_mapping: Tensor
    positions: Tensor
    seq_lens: Tensor
    num_decodes: int

    @property
    def num_rows(self) -> int:
        return self.seq_lens.numel()

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows (T)."""
        return self.slot_mapping.numel()

    @classmethod
    def build(
        cls,
        tables: Sequence[array[int]],
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        block_size: int,
    ) -> Self:
        """The plan of a step that computes the last `query_lens[r]` tokens of `seq_lens[r]` in each row.

        `tables[r]` is an `array('i')` of blocks, as long as the sequence needs or longer; it is copied and
        not kept. Cost is proportional to the batch. Raises `InvalidBatch` on lengths that disagree, on
        decodes that do not come first and on a table that is too short; `validate` checks the rest.
        """
        if block_size < 1:
            raise InvalidArgument(f"block_size is {block_size}; it must be at least 1")
        if not len(tables) == len(seq_lens) == len(query_lens):
            raise InvalidBatch(
                "lengths",
                f"{len(tables)} tables, {len(seq_lens)} sequence lengths, {len(query_lens)} query lengths",
            )
        seq = np.array(seq_lens, dtype=np.int64)
        query = np.array(query_lens, dtype=np.int64)
        num_decodes = _check_rows(query, seq)
        blocks = -(-seq // block_size)
        kv_indices = array("i")
        for row, (table, count) in enumerate(zip(tables, blocks.tolist(), strict=True)):
            if len(table) < count:
                raise InvalidBatch(
                    "seq-len", f"row {row} needs {count} blocks for {seq[row]} tokens; its table has {len(table)}"
                )
            kv_indices += table[:count]
        indices = np.array(kv_indices, dtype=np.int64)
        qo_indptr, kv_indptr = _indptr(query), _indptr(blocks)
        positions, slots = _tokens(qo_indptr, kv_indptr, indices, seq, block_size)
        return cls(
            qo_indptr=_tensor(qo_indptr),
            kv_indptr=_tensor(kv_indptr),
            kv_indices=_tensor(indices),
            kv_last_page_len=_tensor(seq - np.maximum(blocks - 1, 0) * block_size),
            slot_mapping=_tensor(slots),
            positions=_tensor(positions),
            seq_lens=_tensor(seq),
            num_decodes=num_decodes,
        )

    def validate(self, spec: CacheSpec) -> None:
        """Raise `InvalidBatch`, naming rule, row and value, unless every rule above holds for a cache of `spec`."""
        for name in ARRAYS:
            _check_storage(name, getattr(self, name))
        qo_indptr, kv_indptr, indices, last, slots, positions, seq = (
            getattr(self, name).numpy().astype(np.int64) for name in ARRAYS
        )
        rows = len(seq)
        if not len(qo_indptr) == len(kv_indptr) == len(last) + 1 == rows + 1:
            raise InvalidBatch(
                "lengths",
                f"{rows} seq_lens need {rows + 1} qo_indptr, {rows + 1} kv_indptr and {rows} kv_last_page_len, "
                f"not {len(qo_indptr)}, {len(kv_indptr)} and {len(last)}",
            )
        query = _counts("qo_indptr", qo_indptr)
        blocks = _counts("kv_indptr", kv_indptr)
        if not len(slots) == len(positions) == qo_indptr[-1]:
            raise InvalidBatch(
                "lengths",
                f"qo_indptr ends at {qo_indptr[-1]}; there are {len(slots)} slot_mapping, {len(positions)} positions",
            )
        if len(indices) != kv_indptr[-1]:
            raise InvalidBatch("indices-length", f"kv_indptr ends at {kv_indptr[-1]}; kv_indices has {len(indices)}")
        if (bad := (indices < 0) | (indices >= spec.num_blocks)).any():
            row, at = _locate(bad, kv_indptr)
            raise InvalidBatch(
                "block-range", f"row {row} names block {indices[at]}; the cache has blocks 0 to {spec.num_blocks - 1}"
            )
        _check_lengths(seq, blocks, last, spec.block_size)
        num_decodes = _check_rows(query, seq)
        if num_decodes != self.num_decodes:
            raise InvalidBatch(
                "decodes-first", f"num_decodes is {self.num_decodes}; {num_decodes} rows have one query token"
            )
        right_positions, right_slots = _tokens(qo_indptr, kv_indptr, indices, seq, spec.block_size)
        for rule, name, given, right in (
            ("positions", "position", positions, right_positions),
            ("slot-mapping", "slot", slots, right_slots),
        ):
            if (bad := given != right).any():
                row, at = _locate(bad, qo_indptr)
                raise InvalidBatch(rule, f"row {row}, token {at} has {name} {given[at]}; its row says {right[at]}")
        _check_ownership(kv_indptr, indices, blocks, (seq - query) // spec.block_size)


def _indptr(counts: Ints) -> Ints:
    indptr = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def _tensor(values: Ints) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _tokens(qo_indptr: Ints, kv_indptr: Ints, indices: Ints, seq: Ints, block_size: int) -> tuple[Ints, Ints]:
    """Position and slot of every query token."""
    query = qo_indptr[1:] - qo_indptr[:-1]
    positions = np.arange(qo_indptr[-1]) + np.repeat(seq - qo_indptr[1:], query)
    block, offset = np.divmod(positions, block_size)
    return positions, indices[np.repeat(kv_indptr[:-1], query) + block] * block_size + offset


def _check_storage(name: str, tensor: Tensor) -> None:
    if tensor.dtype is not torch.int32:
        raise InvalidBatch("dtype", f"{name} is {tensor.dtype}; it must be torch.int32")
    if tensor.device.type != "cpu":
        raise InvalidBatch("device", f"{name} is on {tensor.device}; it must be on the CPU")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise InvalidBatch(
            "contiguous",
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be contiguous and 1-D",
        )


def _counts(name: str, indptr: Ints) -> Ints:
    if indptr[0] != 0:
        raise InvalidBatch("indptr", f"{name} starts at {indptr[0]}; it must start at 0")
    counts = indptr[1:] - indptr[:-1]
    if (bad := counts < 0).any():
        row = int(bad.argmax())
        raise InvalidBatch("indptr", f"{name} decreases at row {row}, from {indptr[row]} to {indptr[row + 1]}")
    return counts


def _check_lengths(seq: Ints, blocks: Ints, last: Ints, block_size: int) -> None:
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


def _check_rows(query: Ints, seq: Ints) -> int:
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


def _check_ownership(kv_indptr: Ints, indices: Ints, blocks: Ints, first_written: Ints) -> None:
    """A row names a block once, and only it names the blocks it writes: those from its first_written on."""
    rows = len(blocks)
    row_of = np.repeat(np.arange(rows), blocks)
    written = np.arange(len(indices)) >= np.repeat(kv_indptr[:-1] + first_written, blocks)
    # One sort brings every block's users together; a written block's neighbour is another user of it.
    users = np.sort((indices * rows + row_of) * 2 + written)
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


def _locate(bad: NDArray[np.bool_], indptr: Ints) -> tuple[int, int]:
    """Row and index of the first bad entry of an array that `indptr` divides into rows."""
    at = int(bad.argmax())
    return int(np.searchsorted(indptr, at, side="right")) - 1, at
