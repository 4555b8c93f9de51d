"""A state machine for any `kvproof.fuzz.protocol.Allocator`: no model of what it does, a memory that shows what it did.

A slot of the memory holds the whole prefix its KV was computed from, so a block that is shared, evicted or handed out
wrongly shows as a wrong read, whatever the allocator's own idea of it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvproof.fuzz.protocol import Allocator, Checked, Violation

NUM_SLOTS = 3
SLOTS = st.integers(0, NUM_SLOTS - 1)
MAX_LENGTH = 12


@dataclass
class Running:
    """A sequence: the target's own object, its tokens, and how many of them are in the memory."""

    seq: Any
    tokens: list[int]
    num_written: int


class SequencesMachine(RuleBasedStateMachine, Checked):
    make: Callable[[int, int], Allocator]

    @initialize(num_blocks=st.integers(1, 8), block_size=st.integers(1, 4))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.block_size = max(block_size, 2) if "block-size-1" in self.known else block_size
        self.allocator = self.make(num_blocks, self.block_size)
        self.num_blocks = self.allocator.num_free
        self.slots: list[Running | None] = [None] * NUM_SLOTS
        self.prompts: list[list[int]] = [[0]]
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}

    # ---- rules

    @rule(
        slot=SLOTS,
        base=st.integers(0, 7),
        keep=st.none() | st.integers(0, MAX_LENGTH),
        suffix=st.lists(st.integers(0, 1), max_size=5),
    )
    def allocate(self, slot: int, base: int, keep: int | None, suffix: list[int]) -> None:
        """A prompt that usually begins like one that was seen before."""
        self.free(slot)
        tokens = (self.prompts[-1 - base % len(self.prompts)][:keep] + suffix)[:MAX_LENGTH] or [0]
        self.prompts.append(tokens)
        if "found-when-written" in self.known:
            for other in range(NUM_SLOTS):
                self.run(other)
        before = self.visible()
        seq = self.valid("allocate", lambda: self.allocator.allocate(list(tokens)))
        if seq is None:
            self.was_refused("allocate", self.blocks_for(len(tokens)), before)
            return
        cached = self.allocator.num_cached(seq)
        running = self.slots[slot] = Running(seq, tokens, cached)
        self.check(
            "leaves-a-token", cached < len(tokens), f"all {len(tokens)} tokens are cached, and none is left to compute"
        )
        for i in range(cached):
            self.check(
                "found-when-written", self.slot_of(running, i) in self.memory, f"token {i} was found, not yet written"
            )
        if cached:
            event("allocated with a hit")

    @rule(slot=SLOTS)
    def run(self, slot: int) -> None:
        """A step writes the KV of all tokens that have none."""
        if (running := self.slots[slot]) is not None:
            for i in range(running.num_written, len(running.tokens)):
                self.memory[self.slot_of(running, i)] = tuple(running.tokens[: i + 1])
            running.num_written = len(running.tokens)
            self.valid("written", lambda: self.allocator.written(running.seq))

    @rule(slot=SLOTS, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def append(self, slot: int, tokens: list[int]) -> None:
        """A step runs, and these tokens are sampled from it."""
        self.run(slot)
        if (running := self.slots[slot]) is not None:
            tokens = tokens[:1] if "several-tokens" in self.known else tokens
            tokens = tokens[: MAX_LENGTH - len(running.tokens)]
            if not tokens:
                return
            missing = self.blocks_for(len(running.tokens) + len(tokens)) - self.blocks_for(len(running.tokens))
            before = self.visible()
            if self.valid("append", lambda: self.allocator.append(running.seq, list(tokens)), several=len(tokens) > 1):
                running.tokens = running.tokens + tokens
                self.prompts.append(running.tokens)
            else:
                self.was_refused("append", missing, before)

    @rule(slot=SLOTS)
    def free(self, slot: int) -> None:
        if (running := self.slots[slot]) is not None:
            self.slots[slot] = None
            self.valid("free", lambda: self.allocator.free(running.seq))

    @rule(slot=SLOTS)
    def free_twice(self, slot: int) -> None:
        running = self.slots[slot]
        self.free(slot)
        if running is not None and "free-twice" not in self.known:
            before = self.visible()
            try:
                self.allocator.free(running.seq)
            except Exception as error:
                event(f"refused: {type(error).__name__}")
            unchanged = self.visible() == before
            self.check("free-twice", unchanged, f"freed twice, {running.tokens} changed {before} to {self.visible()}")

    # ---- invariants

    @invariant()
    def tables(self) -> None:
        for running in filter(None, getattr(self, "slots", ())):
            n, table = len(running.tokens), list(self.allocator.table(running.seq))
            self.check("table-length", len(table) == self.blocks_for(n), f"{n} tokens have the blocks {table}")

    @invariant()
    def reads(self) -> None:
        for running in filter(None, getattr(self, "slots", ())):
            for i in range(running.num_written):
                if (place := self.slot_of(running, i)) in self.memory:
                    own, read = tuple(running.tokens[: i + 1]), self.memory[place]
                    self.check("reads-its-own", read == own, f"token {i} of {running.tokens} reads what {read} wrote")

    @invariant()
    def free_count(self) -> None:
        if hasattr(self, "allocator"):
            used = {block for running in filter(None, self.slots) for block in self.allocator.table(running.seq)}
            told, free = self.allocator.num_free, self.num_blocks - len(used)
            self.check("free-count", told == free, f"{told} blocks are said to be free, {free} are")

    def teardown(self) -> None:
        """When every sequence has gone, every block is free."""
        if hasattr(self, "allocator"):
            for slot in range(NUM_SLOTS):
                self.free(slot)
            self.free_count()

    # ---- what they are made of

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def slot_of(self, running: Running, i: int) -> tuple[int, int]:
        entry, offset = divmod(i, self.block_size)
        table = self.allocator.table(running.seq)
        if entry >= len(table):
            raise Violation("table-length", f"token {i} of {running.tokens} has no slot in the blocks {list(table)}")
        return table[entry], offset

    def visible(self) -> object:
        tables = [list(self.allocator.table(running.seq)) for running in filter(None, self.slots)]
        return self.allocator.num_free, tables

    def valid(self, name: str, call: Callable[[], Any], *, several: bool = False) -> Any:
        """A call that the protocol allows may answer no, and may not raise."""
        try:
            return call()
        except Exception as error:
            check = "block-size-1" if self.block_size == 1 else "several-tokens" if several else "valid-call"
            raise Violation(check, f"{name} raised {type(error).__name__}: {error}") from error

    def was_refused(self, what: str, missing: int, before: object) -> None:
        event(f"{what} refused")
        free = self.allocator.num_free
        self.check("fits", missing > free, f"{what} was refused, which needs {missing} blocks of {free} that are free")
        self.check("refused-unchanged", self.visible() == before, f"a refused {what} changed something")

    def abstract_state(self) -> object:
        tables = [list(self.allocator.table(running.seq)) for running in filter(None, self.slots)]
        names: dict[int, int] = {}
        renamed = [[names.setdefault(block, len(names)) for block in table] for table in tables]
        sizes = [(len(running.tokens), running.num_written) for running in filter(None, self.slots)]
        return self.num_blocks, self.block_size, renamed, sizes
