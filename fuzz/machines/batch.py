"""A state machine for `BatchPlan`: what a running engine would build is valid, and every way to break it is refused.

Rows come, grow by chunks and decodes, share beginnings and go, as under an engine, in random blocks. Their plan is
compared with one that counts slots in plain Python. Then one rule of `kvproof.attention.plan` is broken in it, at
random and with the rules before it left whole, and it must be refused by that rule's name.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import Tensor

from kvproof.allocator import NULL_BLOCK
from kvproof.attention import BatchPlan, CacheSpec, InvalidBatch
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


class BatchMachine(RuleBasedStateMachine):
    @initialize(block_size=st.integers(1, 5), seed=st.integers(0, 2**16))
    def start(self, block_size: int, seed: int) -> None:
        self.block_size = block_size
        self.random = Random(seed)
        self.rows: list[Row] = []
        self.spec = CacheSpec(
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_size=1,
            dtype="float32",
            num_blocks=NUM_BLOCKS,
            block_size=block_size,
        )

    @rule(prompt=st.integers(1, 13), share=st.none() | st.integers(0, 3))
    def arrive(self, prompt: int, share: int | None) -> None:
        """A new sequence, which may begin with the full blocks that another one has computed."""
        begin: tuple[int, ...] = ()
        if share is not None and self.rows:
            other = self.rows[share % len(self.rows)]
            begin = other.table[: min(other.context, prompt - 1) // self.block_size]
        context = len(begin) * self.block_size
        self.place(Row(begin, context, prompt - context))

    @rule(which=st.integers(0, 7), chunk=st.integers(1, 6))
    def compute(self, which: int, chunk: int) -> None:
        """A step is done, and the row goes on with its next `chunk` tokens."""
        if self.rows:
            row = self.rows.pop(which % len(self.rows))
            self.place(Row(row.table, row.seq_len, chunk))

    @rule(which=st.integers(0, 7))
    def leave(self, which: int) -> None:
        if self.rows:
            self.rows.pop(which % len(self.rows))

    @rule(padding=st.integers(0, 2))
    def plan(self, padding: int) -> None:
        """What is built is valid, and what counting gives. A table may be longer than its sequence needs."""
        rows = in_order([*self.rows, *([EMPTY] * padding)])
        if rows:
            tables = [array("i", [*row.table, *self.random.sample(range(NUM_BLOCKS), padding)]) for row in rows]
            lens = [row.seq_len for row in rows], [row.query for row in rows]
            plan = BatchPlan.build(tables, *lens, self.block_size)
            plan.validate(self.spec)
            right = counted(rows, self.block_size)
            for name in ARRAYS:
                assert torch.equal(getattr(plan, name), getattr(right, name)), f"{name} is {getattr(plan, name)}"
            assert plan.num_decodes == right.num_decodes
            if plan.num_decodes == plan.num_rows and NULL_BLOCK not in plan.kv_indices:
                plan.pad(plan.num_rows + padding).validate(self.spec)

    @rule(name=st.sampled_from(tuple(VIOLATIONS)))
    def violate(self, name: str) -> None:
        kept = list(self.rows)
        self.place(Row((), self.block_size, 1))
        self.place(Row((), self.block_size, self.random.randint(2, 6)))
        decode, chunk = self.rows[-2:]
        rows = [decode, *in_order(self.rows[:-2]), chunk, EMPTY]
        self.rows = kept
        valid = Breakable(rows, self.block_size, self.random)
        valid.plan.validate(self.spec)
        broken = VIOLATIONS[name](valid)
        refused = None
        try:
            broken.validate(self.spec)
        except InvalidBatch as error:
            refused = error
        assert refused is not None, f"a plan that breaks {name} is accepted: {broken}"
        assert refused.rule == name, f"a plan that breaks {name} is refused for {refused}"
        assert "\n" not in str(refused)

    def place(self, row: Row) -> None:
        """Add a row with the blocks it needs; the oldest rows leave if there are too few."""
        missing = -(-row.seq_len // self.block_size) - len(row.table)
        while missing > len(free := self.free(row)):
            self.rows.pop(0)
        self.rows.append(replace(row, table=(*row.table, *self.random.sample(free, missing))))

    def free(self, row: Row) -> list[int]:
        used = {block for other in (*self.rows, row) for block in other.table}
        return [block for block in range(NUM_BLOCKS) if block not in used]
