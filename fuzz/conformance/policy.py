"""What an eviction policy must do. Which block it chooses is its own affair; everything else must stay as it is.

The machines for pool and manager run with it, and their models follow its choice, so that all of their invariants are
checked: nothing that is in use is evicted, no reference is lost, no prefix is found that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import INITIALIZE_RULE_MARKER, initialize, rule

from kvproof.allocator import BlockManager, BlockPool, EvictionPolicy
from kvproof.fuzz.conformance.report import Check, on_machine
from kvproof.fuzz.machines.manager import ManagerMachine
from kvproof.fuzz.machines.pool import PoolMachine
from kvproof.fuzz.model import ModelManager

MakePolicy = Callable[[], EvictionPolicy]


class Witness:
    """A policy that passes every call on to another, and sees to it that the other one keeps to the protocol.

    victims  blocks it has chosen and that have not come back, in order
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.held: set[int] = set()
        self.victims: list[int] = []

    def insert(self, block: int, published: int) -> None:
        self.policy.insert(block, published)
        self.held.add(block)
        if block in self.victims:
            self.victims.remove(block)
        self.agree()

    def remove(self, block: int) -> None:
        self.policy.remove(block)
        self.held.remove(block)
        self.agree()

    def pop(self) -> int:
        first, *rest = self.policy
        block = self.policy.pop()
        assert block in self.held, f"the policy evicts block {block}, which it does not hold"
        assert block == first, f"the policy evicts block {block}, and said that {first} comes first"
        assert list(self.policy) == rest, f"the policy's order was {[first, *rest]}, and then {list(self.policy)}"
        self.held.remove(block)
        self.victims.append(block)
        self.agree()
        return block

    def agree(self) -> None:
        told = list(self.policy)
        assert sorted(told) == sorted(self.held), f"the policy lists blocks {told} and was given {sorted(self.held)}"
        assert len(self.policy) == len(self.held), f"the policy's length is {len(self.policy)}, of {len(self.held)}"
        assert list(self.policy) == told, "looking at the order changes it"

    def __len__(self) -> int:
        return len(self.policy)

    def __iter__(self) -> Iterator[int]:
        return iter(self.policy)

    def to_evict(self, cached: list[int]) -> list[int]:
        """The order of eviction for a model that has yet to follow the last choices, or has foreseen the next ones."""
        return [block for block in (*self.victims, *self.policy) if block in cached]


class FollowingModel(ModelManager):
    """A model of a manager that evicts what a policy has chosen."""

    def __init__(self, model: ModelManager, witness: Witness) -> None:
        vars(self).update(vars(model))
        self.witness = witness

    def to_evict(self) -> list[int]:
        return self.witness.to_evict(self.cached)


def starting_as(start: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a method the first rule of a machine, with all that another machine's `start` draws."""
    drawn: Any = getattr(start, INITIALIZE_RULE_MARKER).arguments
    begin: Callable[[Callable[..., None]], Callable[..., None]] = initialize(**drawn)
    return begin


def checks(make_policy: MakePolicy) -> tuple[Check, ...]:
    """All checks of the policies that `make_policy` makes."""

    class Pool(PoolMachine):
        @starting_as(PoolMachine.start)
        def start(self, **drawn: Any) -> None:
            super().start(**drawn)
            self.witness = Witness(make_policy())
            self.pool = BlockPool(
                self.pool.num_blocks,
                num_reserved=self.pool.num_reserved,
                policy=self.witness,
                on_evict=self.evicted,
            )

        def to_evict(self) -> list[int]:
            return self.witness.to_evict(self.cached)

        @rule(n=st.integers(1, 3))
        def pass_by(self, n: int) -> None:
            """Blocks are taken, filled and given back, so that there is always something to evict."""
            for _ in range(min(n, len(self.empty) + len(self.cached))):
                block = self.empty[-1] if self.empty else self.to_evict()[0]
                self.take(1)
                self.publish(block, 1)
                self.release(block)

        @rule(which=st.integers(0, 7))
        def hit(self, which: int) -> None:
            if self.cached:
                self.share(self.cached[which % len(self.cached)])

    class Manager(ManagerMachine):
        def make_manager(self, *arguments: int, **options: Any) -> BlockManager:
            self.witness = Witness(make_policy())
            return BlockManager(*arguments, **(options | {"policy": self.witness}))

        @starting_as(ManagerMachine.start)
        def start(self, **drawn: Any) -> None:
            super().start(**drawn)
            self.model = FollowingModel(self.model, self.witness)

    return on_machine("a pool evicts by it", Pool), on_machine("a manager evicts by it", Manager)
