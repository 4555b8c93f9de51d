"""Plans that break one rule of `kvproof.attention.plan` each, at random and with the rules before it left whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvproof.allocator import NULL_BLOCK
from kvproof.attention import BatchPlan
from kvproof.attention.plan import ARRAYS

NUM_BLOCKS = 60


@dataclass(frozen=True)
class Row:
    """A sequence: its blocks, the tokens computed before the step, and those that the step computes."""

    table: tuple[int, ...]
    context: int
    query: int

    @property
    def seq_len(self) -> int:
        return self.context + self.query


EMPTY = Row((), 0, 0)


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.query != 1)


def counted(rows: list[Row], block_size: int) -> BatchPlan:
    """The plan of rows in this order, whether or not they make a valid one. Tables are taken as they are."""
    slots, positions = [], []
    for row in rows:
        for position in range(row.context, row.seq_len):
            entry, offset = divmod(position, block_size)
            slots.append(row.table[entry] * block_size + offset if 0 <= entry < len(row.table) else 0)
            positions.append(position)
    return BatchPlan(
        qo_indptr=_ints([sum(row.query for row in rows[:i]) for i in range(len(rows) + 1)]),
        kv_indptr=_ints([sum(len(row.table) for row in rows[:i]) for i in range(len(rows) + 1)]),
        kv_indices=_ints([block for row in rows for block in row.table]),
        kv_last_page_len=_ints([row.seq_len - max(0, len(row.table) - 1) * block_size for row in rows]),
        slot_mapping=_ints(slots),
        positions=_ints(positions),
        seq_lens=_ints([row.seq_len for row in rows]),
        num_decodes=sum(row.query == 1 for row in rows),
    )


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- breaking each rule


@dataclass(frozen=True)
class Breakable:
    """A valid plan with something of everything: its first row is a decode of two blocks or more, its last but one
    computes two tokens or more after a block of context, and its last is empty."""

    rows: list[Row]
    block_size: int
    random: Random

    @property
    def plan(self) -> BatchPlan:
        return counted(self.rows, self.block_size)

    def with_row(self, at: int, row: Row) -> BatchPlan:
        return counted([*self.rows[:at], row, *self.rows[at + 1 :]], self.block_size)

    def with_array(self, name: str, numbers: Tensor) -> BatchPlan:
        changes: dict[str, Any] = {name: numbers}
        return replace(self.plan, **changes)

    def with_number(self, name: str, at: int, value: int) -> BatchPlan:
        plan = self.plan
        getattr(plan, name)[at] = value
        return plan

    def off(self) -> int:
        return self.random.choice((-9, -2, -1, 1, 2, 9))

    def filled(self) -> int:
        """A row that is not empty."""
        return self.random.choice([i for i, row in enumerate(self.rows) if row.table])


def _dtype(it: Breakable) -> BatchPlan:
    name = it.random.choice(ARRAYS)
    return it.with_array(name, getattr(it.plan, name).to(it.random.choice((torch.int64, torch.int16))))


def _device(it: Breakable) -> BatchPlan:
    name = it.random.choice(ARRAYS)
    return it.with_array(name, getattr(it.plan, name).to("meta"))


def _contiguous(it: Breakable) -> BatchPlan:
    name = it.random.choice(ARRAYS)
    numbers = getattr(it.plan, name)
    return it.with_array(name, it.random.choice((numbers[None], torch.stack((numbers, numbers), 1)[:, 0])))


def _lengths(it: Breakable) -> BatchPlan:
    name = it.random.choice([*(name for name in ARRAYS if name != "kv_indices"), "all"])
    if name == "all":
        return counted([], it.block_size)
    numbers = getattr(it.plan, name)
    return it.with_array(name, it.random.choice((numbers[:-1], torch.cat((numbers, numbers[-1:])))))


def _indptr(it: Breakable) -> BatchPlan:
    name = it.random.choice(("qo_indptr", "kv_indptr"))
    row = it.random.randrange(-1, len(it.rows))
    if row == -1:
        return it.with_number(name, 0, it.off())
    return it.with_number(name, row + 1, int(getattr(it.plan, name)[row]) - it.random.randint(1, 3))


def _indices_length(it: Breakable) -> BatchPlan:
    indices = it.plan.kv_indices
    return replace(it.plan, kv_indices=it.random.choice((indices[:-1], torch.cat((indices, indices[:1])))))


def _block_range(it: Breakable) -> BatchPlan:
    at = it.random.randrange(it.plan.kv_indices.numel())
    return it.with_number("kv_indices", at, it.random.choice((-1, -NUM_BLOCKS, NUM_BLOCKS, 2**31 - 1)))


def _last_page_len(it: Breakable) -> BatchPlan:
    size = it.block_size
    return it.with_number("kv_last_page_len", it.filled(), it.random.choice((0, -1, size + 1, 2 * size)))


def _empty_row(it: Breakable) -> BatchPlan:
    at = it.filled()
    return it.random.choice(
        (
            it.with_number("kv_last_page_len", -1, 1),
            it.with_number("seq_lens", -1, it.random.randint(1, 3)),
            it.with_row(len(it.rows) - 1, Row((), -1, 1)),
            it.with_row(at, replace(it.rows[at], context=it.rows[at].seq_len, query=0)),
        )
    )


def _seq_len(it: Breakable) -> BatchPlan:
    at = it.filled()
    return it.with_number("seq_lens", at, it.rows[at].seq_len + it.off())


def _query_len(it: Breakable) -> BatchPlan:
    at = it.filled()
    row, more = it.rows[at], it.random.randint(1, 9)
    return it.with_row(at, replace(row, context=-more, query=row.seq_len + more))


def _decodes_first(it: Breakable) -> BatchPlan:
    late = it.random.choice((it.rows[1:-1] + it.rows[:1], it.rows[-1:] + it.rows[:-1]))
    return it.random.choice(
        (counted([*late, EMPTY], it.block_size), replace(it.plan, num_decodes=it.plan.num_decodes + it.off()))
    )


def _positions(it: Breakable) -> BatchPlan:
    at = it.random.randrange(it.plan.num_tokens)
    return it.with_number("positions", at, int(it.plan.positions[at]) + it.off())


def _slot_mapping(it: Breakable) -> BatchPlan:
    at = it.random.randrange(it.plan.num_tokens)
    slot = int(it.plan.slot_mapping[at])
    return it.with_number("slot_mapping", at, it.random.choice((-1, slot + it.off())))


def _block_repeated(it: Breakable) -> BatchPlan:
    at = it.random.choice([i for i, row in enumerate(it.rows) if len(row.table) > 1])
    table = list(it.rows[at].table)
    one, other = it.random.sample(range(len(table)), 2)
    table[one] = table[other]
    return it.with_row(at, replace(it.rows[at], table=tuple(table)))


def _block_shared(it: Breakable) -> BatchPlan:
    writer, other = it.random.sample([i for i, row in enumerate(it.rows) if row.table], 2)
    table = list(it.rows[other].table)
    table[it.random.randrange(len(table))] = it.rows[writer].table[-1]  # the last block is always written
    return it.with_row(other, replace(it.rows[other], table=tuple(table)))


def _padding(it: Breakable) -> BatchPlan:
    """Padding beside rows that are no decodes; a row of the batch in the null block; padding in another block, or with
    more than one token."""
    decodes = [replace(row, table=tuple(block or 1 for block in row.table)) for row in it.rows if row.query == 1]
    in_null_block = replace(decodes[0], table=(*decodes[0].table[:-1], NULL_BLOCK))
    more = it.random.randint(1, 3)
    return it.random.choice(
        (
            replace(it.plan, num_padding=more),
            counted([in_null_block, *decodes[1:]], it.block_size).pad(len(decodes) + more),
            replace(counted([*decodes, Row((more,), 0, 1)], it.block_size), num_padding=1),
            replace(counted([*decodes, Row((NULL_BLOCK,) * 2, it.block_size, 1)], it.block_size), num_padding=1),
        )
    )


VIOLATIONS: dict[str, Callable[[Breakable], BatchPlan]] = {
    "dtype": _dtype,
    "device": _device,
    "contiguous": _contiguous,
    "lengths": _lengths,
    "indptr": _indptr,
    "indices-length": _indices_length,
    "block-range": _block_range,
    "last-page-len": _last_page_len,
    "empty-row": _empty_row,
    "seq-len": _seq_len,
    "query-len": _query_len,
    "decodes-first": _decodes_first,
    "positions": _positions,
    "slot-mapping": _slot_mapping,
    "block-repeated": _block_repeated,
    "block-shared": _block_shared,
    "padding": _padding,
}
"""By the name of the rule that each breaks."""
