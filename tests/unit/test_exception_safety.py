"""An operation in which something fails leaves everything as it was.

What can fail inside an operation is what it asks of others: the hash function, the eviction policy's choice, and memory
for new nodes. Each is made to fail at its first call, its second, and so on, in every operation that can be made in the
states of a random walk. Decode batches are in test_batch.py. A policy's other calls must not fail.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from random import Random

import pytest

from kvproof.allocator import LRU, Admission, BlockManager, PrefixIndex, Sequence, xxh3_chained
from kvproof.fuzz.spec.scopes import Scope, scope_named
from kvproof.fuzz.world import Action, World


class InjectedError(Exception):
    """Nobody expects it."""


class Fuse:
    """Blows at the `n`-th call, counting from 1; never with 0."""

    def __init__(self) -> None:
        self.n = self.calls = 0

    def burn(self) -> None:
        self.calls += 1
        if self.calls == self.n:
            raise InjectedError

    def light(self, n: int) -> None:
        self.n, self.calls = n, 0


FUSE = Fuse()


def hash_block(tokens: bytes, parent_hash: int) -> int:
    FUSE.burn()
    return xxh3_chained(tokens, parent_hash)


def burning(method: Callable[..., object]) -> Callable[..., object]:
    def burns(*args: object) -> object:
        FUSE.burn()
        return method(*args)

    return burns


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scope, int, int], dict[str, int]]:
    def walk(scope: Scope, seed: int, length: int) -> dict[str, int]:
        """By action, how often it failed and left everything as it was."""
        random, failures = Random(seed), dict[str, int]()
        world = World(scope, hash_block)
        for _ in range(length):
            saved = pickle.dumps(world)
            actions = list(world.actions())
            for action in random.sample(actions, min(len(actions), 6)):
                for n in range(1, 100):
                    if not fails(saved, action, n):
                        break
                    failures[action.name] = failures.get(action.name, 0) + 1
            while not world.perform(random.choice(actions)):
                pass
        return failures

    def fails(saved: bytes, action: Action, n: int) -> bool:
        world: World = pickle.loads(saved)
        before = world.state(), world.manager.stats()
        FUSE.light(n)
        try:
            world.perform(action)
        except InjectedError:
            pass
        else:
            return False
        finally:
            FUSE.light(0)
        assert (world.state(), world.manager.stats()) == before, f"{action} failed at call {n} and changed something"
        world.check()
        undisturbed: World = pickle.loads(saved)
        assert world.perform(action) == undisturbed.perform(action)
        assert world.state() == undisturbed.state(), f"{action} is not the same after it has failed"
        return True

    return walk


SCOPES = ("orphans", "pins", "rewrites", "everything", "namespaces")


@pytest.mark.parametrize("scope", SCOPES)
def test_a_hash_function_that_fails(walks: Callable[[Scope, int, int], dict[str, int]], scope: str) -> None:
    failures = walks(scope_named(scope), 1, 60)
    assert sum(failures.values()) > 5
    assert set(failures) <= {"Admit", "Commit"}


@pytest.mark.parametrize("scope", SCOPES)
def test_no_memory_for_a_node(
    walks: Callable[[Scope, int, int], dict[str, int]], monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    monkeypatch.setattr(PrefixIndex, "make_room", burning(PrefixIndex.make_room))
    failures = walks(scope_named(scope), 2, 60)
    assert failures["Commit"] > 5


class FailingLRU(LRU):
    def pop(self) -> int:
        FUSE.burn()
        return super().pop()


@pytest.mark.parametrize(("operation", "evictions"), [("admit", 2), ("reserve", 1)])
def test_a_policy_that_fails_costs_cached_content_only(operation: str, evictions: int) -> None:
    """What it has evicted before it failed stays evicted. References, tables and counts are as they were."""
    for n in range(1, evictions + 2):
        manager = BlockManager(6, 2, policy=FailingLRU())
        old = manager.sequence(range(6))
        manager.admit(old)
        manager.commit(old, 6)
        manager.release(old)
        waiting = manager.sequence([0, 1, *range(10, 17)])
        running = manager.sequence([90])
        manager.admit(running)

        def counts(manager: BlockManager = manager, *seqs: Sequence) -> object:
            refs = [manager.pool.refs(block) for block in range(6)]
            return manager.num_free, refs, [(seq.num_reserved, list(seq.block_table)) for seq in seqs]

        before = counts(manager, waiting, running)
        FUSE.light(n)
        try:
            answer = manager.admit(waiting) if operation == "admit" else manager.reserve(running, 8)
        except InjectedError:
            assert n <= evictions
            assert counts(manager, waiting, running) == before
        else:
            assert (n, answer) == (evictions + 1, Admission.NOW if operation == "admit" else True)
        FUSE.light(0)
        manager.check()
