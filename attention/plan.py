"""One step's batch metadata, in the layout that paged-attention kernels share.

The kernels check little of it: FlashInfer, for one, reads past the page on a last_page_len that is too large
and out of bounds on a page number that is. So `BatchPlan.validate` enforces these rules, by these names:

    dtype, device, contiguous   every array is int32, on the CPU, contiguous and one-dimensional
    lengths         the arrays agree on the number of rows B >= 1 and of tokens T = qo_indptr[-1]
    indptr          qo_indptr and kv_indptr start at 0 and never decrease
    indices-length  kv_indices holds exactly kv_indptr[-1] blocks, with fewer than 2^32 slots
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
    padding         padding rows are the last of a batch of decodes: one token in the null block, which no other names

With a window, blocks that it has left wholly may be the null block, in any number and in any rows; block-repeated and
block-shared are about the others. A row that has such blocks may not name the null block where it is seen.

Two tokens can't write one slot: that would take a repeated or a shared block, or a wrong position. Padding rows are
the exception, and nobody reads what they wrote.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor

from kvproof.allocator import NULL_BLOCK
from kvproof.allocator.errors import InvalidArgument
from kvproof.attention.errors import InvalidBatch
from kvproof.attention.ownership import Ownership
from kvproof.attention.plan_rules import (
    Ints,
    check_lengths,
    check_ownership,
    check_padding,
    check_rows,
    check_storage,
    counts,
    locate,
    tokens,
)
from kvproof.attention.spec import INT32_LIMIT, CacheSpec

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

    A row with nothing to compute has one form: no blocks and kv_last_page_len, seq_len and query_len all 0. Such rows
    read nothing, write nothing and have no output. slot_mapping never holds -1.

    A step that needs a fixed number of query tokens is padded with rows that do have one, see `pad`: the last
    `num_padding` rows. They all write the first slot of the null block and see no other. In a plan with padding, no
    other row may name that block, so it is for pools that reserve it.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor
    slot_mapping: Tensor
    positions: Tensor
    seq_lens: Tensor
    num_decodes: int
    num_padding: int = 0

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
        num_decodes = check_rows(query, seq)
        blocks = -(-seq // block_size)
        kv_indices = array("i")
        for row, (table, count) in enumerate(zip(tables, blocks.tolist(), strict=True)):
            if len(table) < count:
                raise InvalidBatch(
                    "seq-len", f"row {row} needs {count} blocks for {seq[row]} tokens; its table has {len(table)}"
                )
            kv_indices += table if len(table) == count else table[:count]
        indices = np.frombuffer(kv_indices, dtype=np.int32)  # of all there is here, only these grow with the context
        qo_indptr, kv_indptr = _indptr(query), _indptr(blocks)
        positions, slots = tokens(qo_indptr, kv_indptr, indices, seq, block_size)
        return cls(
            qo_indptr=_tensor(qo_indptr),
            kv_indptr=_tensor(kv_indptr),
            kv_indices=torch.from_numpy(indices),
            kv_last_page_len=_tensor(seq - np.maximum(blocks - 1, 0) * block_size),
            slot_mapping=_tensor(slots),
            positions=_tensor(positions),
            seq_lens=_tensor(seq),
            num_decodes=num_decodes,
        )

    def pad(self, num_rows: int) -> Self:
        """The same step with padding rows after its own, `num_rows` in all. Raises `InvalidBatch`.

        For batches of decodes only, of a pool that was made with `reserve_null_block`.
        """
        count = num_rows - self.num_rows
        if count < 0 or self.num_padding or self.num_decodes != self.num_rows:
            raise InvalidBatch(
                "padding",
                f"{self.num_rows} rows, {self.num_decodes} of them decodes and {self.num_padding} padding, "
                f"can't be padded to {num_rows}",
            )
        one_each = torch.arange(1, count + 1, dtype=torch.int32, device="cpu")
        once, none = torch.ones_like(one_each), torch.zeros_like(one_each)
        more = {
            "qo_indptr": one_each + self.qo_indptr[-1],
            "kv_indptr": one_each + self.kv_indptr[-1],
            "kv_indices": none + NULL_BLOCK,
            "kv_last_page_len": once,
            "slot_mapping": none + NULL_BLOCK,  # its first slot: the null block is block 0
            "positions": none,
            "seq_lens": once,
        }
        arrays = {name: torch.cat((getattr(self, name), more[name])) for name in ARRAYS}
        return replace(self, **arrays, num_decodes=num_rows, num_padding=count)

    def validate(self, spec: CacheSpec, ownership: Ownership | None = None) -> None:
        """Raise `InvalidBatch`, naming rule, row and value, unless every rule above holds for a cache of `spec`.

        With the `ownership` of that cache's steps before, who owns which block is decided by what has changed since.
        Raises `InvalidArgument` if it is another cache's.
        """
        if ownership is not None and ownership.spec is not spec and ownership.spec != spec:
            raise InvalidArgument(f"the ownership is of {ownership.spec}; the plan is for {spec}")
        for name in ARRAYS:
            check_storage(name, getattr(self, name))
        qo_indptr, kv_indptr, last, slots, positions, seq = (
            getattr(self, name).numpy().astype(np.int64) for name in ARRAYS if name != "kv_indices"
        )
        indices = self.kv_indices.numpy()
        rows = len(seq)
        if not len(qo_indptr) == len(kv_indptr) == len(last) + 1 == rows + 1:
            raise InvalidBatch(
                "lengths",
                f"{rows} seq_lens need {rows + 1} qo_indptr, {rows + 1} kv_indptr and {rows} kv_last_page_len, "
                f"not {len(qo_indptr)}, {len(kv_indptr)} and {len(last)}",
            )
        query = counts("qo_indptr", qo_indptr)
        blocks = counts("kv_indptr", kv_indptr)
        if not len(slots) == len(positions) == qo_indptr[-1]:
            raise InvalidBatch(
                "lengths",
                f"qo_indptr ends at {qo_indptr[-1]}; there are {len(slots)} slot_mapping, {len(positions)} positions",
            )
        if len(indices) != kv_indptr[-1]:
            raise InvalidBatch("indices-length", f"kv_indptr ends at {kv_indptr[-1]}; kv_indices has {len(indices)}")
        if (slots_named := len(indices) * spec.block_size) >= 2**32:  # kernels number a batch's tokens in 32 bits
            raise InvalidBatch("indices-length", f"kv_indices names {slots_named} slots; there must be below {2**32}")
        if indices.view(np.uint32).max(initial=0) >= spec.num_blocks:  # a negative one looks very large
            row, at = locate((indices < 0) | (indices >= spec.num_blocks), kv_indptr)
            raise InvalidBatch(
                "block-range", f"row {row} names block {indices[at]}; the cache has blocks 0 to {spec.num_blocks - 1}"
            )
        check_lengths(seq, blocks, last, spec.block_size)
        num_decodes = check_rows(query, seq)
        if num_decodes != self.num_decodes:
            raise InvalidBatch(
                "decodes-first", f"num_decodes is {self.num_decodes}; {num_decodes} rows have one query token"
            )
        right_positions, right_slots = tokens(qo_indptr, kv_indptr, indices, seq, spec.block_size)
        for rule, name, given, right in (
            ("positions", "position", positions, right_positions),
            ("slot-mapping", "slot", slots, right_slots),
        ):
            if (bad := given != right).any():
                row, at = locate(bad, qo_indptr)
                raise InvalidBatch(rule, f"row {row}, token {at} has {name} {given[at]}; its row says {right[at]}")
        live = rows - self.num_padding
        if self.num_padding:
            check_padding(self.num_padding, self.num_decodes, kv_indptr, indices, seq)
        tables, computed = (kv_indptr[: live + 1], indices[: kv_indptr[live]]), (seq - query)[:live]
        if ownership is None or not ownership.follow(*tables, computed):
            left = computed + 1 - (spec.window or INT32_LIMIT)  # positions that none of the row's queries sees
            check_ownership(*tables, computed // spec.block_size, np.maximum(left, 0) // spec.block_size)


def _indptr(counts: Ints) -> Ints:
    indptr = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def _tensor(values: Ints) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
