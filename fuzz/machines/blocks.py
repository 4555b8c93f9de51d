"""A state machine for any `kvproof.fuzz.protocol.Pool`: who owns which block, kept in a list."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvproof.fuzz.protocol import Checked, Pool

MAX_BLOCKS = 5
WHICH = st.integers(0, 7)


class BlocksMachine(RuleBasedStateMachine, Checked):
    """Only blocks that were handed out are asked about, so a pool may number them as it likes."""

    make: Callable[[int], Pool]

    @initialize(num_blocks=st.integers(1, MAX_BLOCKS))
    def start(self, num_blocks: int) -> None:
        self.pool = self.make(num_blocks)
        self.num_blocks = self.pool.num_free
        self.owned: list[int] = []  # a block as often as it has owners
        self.seen: list[int] = []

    @rule(n=st.integers(0, MAX_BLOCKS))
    def take(self, n: int) -> None:
        if n > self.num_free:
            self.refused("take-too-many", lambda: self.pool.take(n), f"{n} blocks of {self.num_free}")
            return
        blocks = list(self.pool.take(n))
        new = len(blocks) == n == len(set(blocks)) and not set(blocks) & set(self.owned)
        self.check("distinct", new, f"took {n} blocks and got {blocks}, of which {sorted(set(self.owned))} had owners")
        self.owned += blocks
        self.seen += [block for block in blocks if block not in self.seen]

    @rule(n=st.integers(-3, -1))
    def take_negative(self, n: int) -> None:
        if "take-negative" not in self.known:
            self.refused("take-negative", lambda: self.pool.take(n), f"{n} blocks")

    @rule(which=WHICH)
    def share(self, which: int) -> None:
        if self.owned:
            block = self.owned[which % len(self.owned)]
            self.pool.share(block)
            self.owned.append(block)

    @rule(which=st.lists(WHICH, max_size=3))
    def give_back(self, which: list[int]) -> None:
        blocks = [self.owned.pop(i % len(self.owned)) for i in which[: len(self.owned)]]
        self.pool.give_back(blocks)

    @rule(which=WHICH)
    def give_back_twice(self, which: int) -> None:
        """A block that was handed out before and has no owner."""
        idle = [block for block in self.seen if block not in self.owned]
        if idle and "free-twice" not in self.known:
            block = idle[which % len(idle)]
            self.refused("free-twice", lambda: self.pool.give_back([block]), f"block {block}, which has no owner")

    @rule(which=WHICH, others=st.lists(WHICH, max_size=2))
    def give_back_repeated(self, which: int, others: list[int]) -> None:
        """One call names a block more often than it has owners."""
        if self.owned and "free-repeated" not in self.known:
            block = self.owned[which % len(self.owned)]
            blocks = [self.owned[i % len(self.owned)] for i in others] + [block] * (self.owned.count(block) + 1)
            self.refused("free-repeated", lambda: self.pool.give_back(blocks), f"{blocks}, owned are {self.owned}")

    @invariant()
    def counts(self) -> None:
        for block in getattr(self, "seen", ()):
            refs, owners = self.pool.refs(block), self.owned.count(block)
            self.check("counts", refs == owners, f"block {block} has {owners} owners and a count of {refs}")

    @invariant()
    def free_count(self) -> None:
        if hasattr(self, "pool"):
            told = self.pool.num_free
            self.check("free-count", told == self.num_free, f"{told} blocks are said to be free, {self.num_free} are")

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(set(self.owned))

    def refused(self, check: str, call: Callable[[], object], what: str) -> None:
        """That nothing has changed is checked by the invariants."""
        try:
            call()
        except Exception as error:
            event(f"refused: {type(error).__name__}")
        else:
            refs = {block: self.pool.refs(block) for block in self.seen}
            self.check(
                check, False, f"accepted {what}; counts are now {refs}, {self.pool.num_free} are said to be free"
            )

    def abstract_state(self) -> object:
        counts = sorted(self.owned.count(block) for block in self.seen)
        return self.num_blocks, counts
