"""A state machine for `BatchPlan`: what a running engine would build is valid, and every way to break it is refused.

Rows come, grow by chunks and decodes, share beginnings and go, as under an engine, in random blocks. Their plan is
compared with one that counts slots in plain Python. Then one rule of `kvproof.attention.plan` is broken in it, and it
must be refused by that rule's name. All of them are validated twice, alone and by what differs from the last valid one.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvproof.allocator import NULL_BLOCK
from kvproof.attention import BatchPlan, CacheSpec, InvalidBatch
from kvproof.attention.ownership import Ownership
from kvproof.attention.plan import ARRAYS
from kvproof.fuzz.machines.violations import EMPTY, NUM_BLOCKS, VIOLATIONS, Breakable, Row, counted, in_order


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
        self.ownership = Ownership(self.spec)

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

    @rule()
    def decode(self) -> None:
        """A step is done, and all rows go on with a token each."""
        self.plan(0)
        for row in list(self.rows):
            if row in self.rows:  # it may have had to leave for one before it
                self.rows.remove(row)
                self.place(Row(row.table, row.seq_len, 1))

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
            self.validate(plan)
            right = counted(rows, self.block_size)
            for name in ARRAYS:
                assert torch.equal(getattr(plan, name), getattr(right, name)), f"{name} is {getattr(plan, name)}"
            assert plan.num_decodes == right.num_decodes
            if plan.num_decodes == plan.num_rows and NULL_BLOCK not in plan.kv_indices:
                self.validate(plan.pad(plan.num_rows + padding))

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
            self.validate(broken)
        except InvalidBatch as error:
            refused = error
        assert refused is not None, f"a plan that breaks {name} is accepted: {broken}"
        assert refused.rule == name, f"a plan that breaks {name} is refused for {refused}"
        assert "\n" not in str(refused)

    def validate(self, plan: BatchPlan) -> None:
        """What came before changes nothing."""
        alone, following = refusal(plan, self.spec), refusal(plan, self.spec, self.ownership)
        assert str(alone) == str(following), f"refused alone for {alone}, and after other steps for {following}"
        if alone is not None:
            raise alone

    def place(self, row: Row) -> None:
        """Add a row with the blocks it needs; the oldest rows leave if there are too few."""
        missing = -(-row.seq_len // self.block_size) - len(row.table)
        while missing > len(free := self.free(row)):
            self.rows.pop(0)
        self.rows.append(replace(row, table=(*row.table, *self.random.sample(free, missing))))

    def free(self, row: Row) -> list[int]:
        used = {block for other in (*self.rows, row) for block in other.table}
        return [block for block in range(NUM_BLOCKS) if block not in used]


def refusal(plan: BatchPlan, *cache: Any) -> InvalidBatch | None:
    try:
        plan.validate(*cache)
    except InvalidBatch as error:
        return error
    return None
