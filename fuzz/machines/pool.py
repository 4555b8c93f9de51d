"""A state machine for `BlockPool`: every transition, legal or not, against a table of states and two plain lists.

A transition that a block's state does not have must raise `IllegalTransition`, name the block and change nothing, and
so must any transition of a block that does not exist. No draw is wasted on keeping out of trouble.
"""

from __future__ import annotations

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvproof.allocator import BlockPool, BlockState, IllegalTransition
from kvproof.fuzz.machines.harness import POLICIES

FREE, ACTIVE, PUBLISHED, CACHED, RESERVED = BlockState

ALLOWED = {
    "share": (ACTIVE, PUBLISHED, CACHED),
    "release": (ACTIVE, PUBLISHED),
    "publish": (ACTIVE,),
    "withdraw": (PUBLISHED, CACHED),
}
MAX_BLOCKS = 5
BLOCKS = st.integers(-1, MAX_BLOCKS)  # one too low, and often one too high


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, MAX_BLOCKS),
        num_reserved=st.sampled_from((0, 0, 1, 2)),
        policy=st.sampled_from(tuple(POLICIES)),
    )
    def start(self, num_blocks: int, num_reserved: int, policy: str) -> None:
        num_reserved = min(num_reserved, num_blocks - 1)
        self.pool = BlockPool(num_blocks, num_reserved=num_reserved, policy=POLICIES[policy](), on_evict=self.evicted)
        self.policy = policy
        self.states = {block: RESERVED if block < num_reserved else FREE for block in range(num_blocks)}
        self.refs = dict.fromkeys(range(num_reserved, num_blocks), 0)
        self.contents: dict[int, int] = {}
        self.empty = list(self.refs)[::-1]  # taken from the end
        self.cached: list[int] = []  # in order of release
        self.taken = 0
        self.published: dict[int, int] = {}  # when a block last got content, in blocks taken
        self.lost: list[tuple[int, int]] = []  # what was evicted, as the pool told it
        self.expected_lost: list[tuple[int, int]] = []

    def evicted(self, block: int, content: int) -> None:
        assert self.pool.state(block) is FREE, f"block {block} is {self.pool.state(block)} while its content leaves"
        self.lost.append((block, content))

    # ---- rules

    @rule(n=st.integers(0, MAX_BLOCKS + 1))
    def take(self, n: int) -> None:
        if n > len(self.empty) + len(self.cached):
            self.refused("take", n)
        else:
            assert self.pool.take(n) == [self.take_one() for _ in range(n)]

    def take_one(self) -> int:
        self.taken += 1
        if self.empty:
            block = self.empty.pop()
        else:
            block = self.to_evict()[0]
            self.cached.remove(block)
            self.expected_lost.append((block, self.contents.pop(block)))
            event("evicted")
        self.states[block], self.refs[block] = ACTIVE, 1
        return block

    @rule(block=BLOCKS)
    def share(self, block: int) -> None:
        if self.done("share", block):
            self.refs[block] += 1
            if self.states[block] is CACHED:
                self.cached.remove(block)
                self.states[block] = PUBLISHED

    @rule(block=BLOCKS)
    def release(self, block: int) -> None:
        if self.done("release", block):
            self.refs[block] -= 1
            if self.refs[block] == 0 and self.states[block] is PUBLISHED:
                self.states[block] = CACHED
                self.cached.append(block)
            elif self.refs[block] == 0:
                self.states[block] = FREE
                self.empty.append(block)

    @rule(block=BLOCKS, content=st.sampled_from((1, 2, 2**64 - 1)))
    def publish(self, block: int, content: int) -> None:
        if self.done("publish", block, content):
            self.states[block] = PUBLISHED
            self.contents[block] = content
            self.published[block] = self.taken

    @rule(block=BLOCKS)
    def withdraw(self, block: int) -> None:
        if self.done("withdraw", block):
            del self.contents[block]
            if self.states[block] is CACHED:
                self.cached.remove(block)
                self.empty.append(block)
            self.states[block] = FREE if self.states[block] is CACHED else ACTIVE

    @rule(block=st.sampled_from((-1, MAX_BLOCKS)), question=st.sampled_from(("refs", "content", "state", "age")))
    def ask_for_no_block(self, block: int, question: str) -> None:
        self.refused(question, block)

    @rule()
    def evict_all(self) -> None:
        self.pool.evict_all()
        for block in self.to_evict():
            self.expected_lost.append((block, self.contents.pop(block)))
            self.states[block] = FREE
            self.empty.append(block)
        self.cached.clear()

    # ---- invariant

    @invariant()
    def agrees_with_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert {block: pool.state(block) for block in range(pool.num_blocks)} == self.states
        assert {block: pool.refs(block) for block in self.refs} == self.refs
        assert [pool.content(block) for block in self.refs] == [self.contents.get(block) for block in self.refs]
        assert pool.free_lists() == (self.empty[::-1], self.to_evict())
        assert pool.num_free == sum(1 for refs in self.refs.values() if refs == 0)
        assert {block: pool.age(block) for block in self.contents} == {
            block: self.taken - self.published[block] for block in self.contents
        }
        assert self.lost == self.expected_lost

    def to_evict(self) -> list[int]:
        """The cached blocks, next victim first."""
        if self.policy == "fifo":
            return sorted(self.cached, key=lambda block: self.published[block])  # stable: ties in order of release
        return self.cached[::-1] if self.policy == "newest first" else self.cached

    # ---- doing and refusing

    def done(self, transition: str, block: int, *arguments: int) -> bool:
        """Whether `block` has made `transition`; if it may not, whether that is refused."""
        if self.states.get(block) in ALLOWED[transition]:
            getattr(self.pool, transition)(block, *arguments)
            return True
        self.refused(transition, block, *arguments)
        return False

    def refused(self, operation: str, *arguments: object) -> None:
        """That nothing has changed is what the invariant checks next."""
        try:
            getattr(self.pool, operation)(*arguments)
        except IllegalTransition as error:
            message = str(error)
        else:
            raise AssertionError(f"{operation}{arguments} was accepted")
        assert str(arguments[0]) in message
