"""A state machine for `BlockManager`: every operation against the executable model and a shadow memory.

The shadow memory stands for the KV cache. A slot holds the whole prefix its KV was computed from, as real KV does, so
reading a sequence back through its table shows any aliasing, whatever went wrong to cause it (invariant I13).

Rules are total: a rule whose sequence is in the wrong state brings it to the right one first, so no draw is wasted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvproof.allocator import (
    LRU,
    Admission,
    BlockManager,
    KvproofError,
    Namespace,
    Sequence,
    xxh3_chained,
)
from kvproof.allocator.sequence import MAX_LENGTH
from kvproof.fuzz.model import ModelManager, ModelSequence, Prefix

NUM_SLOTS = 3
SLOTS = st.integers(0, NUM_SLOTS - 1)
LIMITS = st.none() | st.integers(1, 6)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
NAMESPACES = (Namespace(), Namespace(salt="x"), Namespace(adapter="x"))


class NewestFirst(LRU):
    """Evicts parents before their children: what a policy may do at worst."""

    def pop(self) -> int:
        return self._order.popitem(last=True)[0]

    def __iter__(self) -> Iterator[int]:
        return reversed(self._order)


def weakened(bits: int) -> Callable[[bytes, int], int]:
    """The prefix hash with all but its lowest `bits` cut off; none left makes every block collide."""
    return lambda tokens, parent: xxh3_chained(tokens, parent) & ((1 << bits) - 1)


def fingerprint(manager: BlockManager) -> object:
    """All of a manager's state that an operation could change, the order of its free lists included."""
    pool = manager.pool
    blocks = range(pool.num_blocks)
    return (
        [pool.refs(block) for block in blocks],
        [pool.content(block) for block in blocks],
        pool.free_lists(),
        [(seq, len(seq), seq.num_computed, seq.num_reserved, list(seq.block_table)) for seq in manager.sequences],
        {node.uid: list(node.blocks) for node in manager.index.nodes()},
    )


@dataclass
class Pair:
    """One sequence twice: as the manager knows it and as the model does."""

    real: Sequence
    model: ModelSequence


class ManagerMachine(RuleBasedStateMachine):
    """Drives `make_manager`, so that a broken or foreign manager can be put in the place of ours."""

    make_manager: Callable[..., BlockManager] = staticmethod(BlockManager)

    @initialize(
        num_blocks=st.integers(1, 8),
        block_size=st.sampled_from((1, 2, 3, 4)),
        caching=st.sampled_from((True, True, True, False)),
        merge=st.booleans(),
        newest_first=st.booleans(),
        hash_bits=st.sampled_from((0, 1, 4, 64)),
    )
    def start(
        self, num_blocks: int, block_size: int, caching: bool, merge: bool, newest_first: bool, hash_bits: int
    ) -> None:
        self.manager = self.make_manager(
            num_blocks,
            block_size,
            prefix_caching=caching,
            merge_duplicates=merge,
            policy=NewestFirst() if newest_first else LRU(),
            hash_block=weakened(hash_bits),
        )
        self.model = ModelManager(num_blocks, block_size, caching=caching, merge=merge, newest_first=newest_first)
        self.capacity = num_blocks * block_size
        self.slots: list[Pair | None] = [None] * NUM_SLOTS
        self.prompts: list[list[int]] = [[0]]
        self.memory: dict[tuple[int, int], Prefix] = {}

    # ---- rules

    @rule(
        slot=SLOTS,
        base=st.integers(0, 7),
        keep=st.none() | st.integers(0, 12),
        suffix=st.lists(st.integers(0, 1), max_size=6),
        namespace=st.sampled_from((0, 0, 0, 1, 2)),
        headroom=st.none() | st.integers(0, 5),
        limit=LIMITS,
    )
    def admit(
        self,
        slot: int,
        base: int,
        keep: int | None,
        suffix: list[int],
        namespace: int,
        headroom: int | None,
        limit: int | None,
    ) -> None:
        """A new sequence, whose prompt usually begins like one that was seen before."""
        self.vacate(slot)
        prompt = (self.prompts[-1 - base % len(self.prompts)][:keep] + suffix)[: self.capacity + 1] or [0]
        self.prompts.append(prompt)
        max_length = None if headroom is None else len(prompt) + headroom
        pair = Pair(
            self.manager.sequence(prompt, max_length=max_length, namespace=NAMESPACES[namespace]),
            ModelSequence(NAMESPACES[namespace], list(prompt), max_length),
        )
        self.slots[slot] = pair
        self.try_admit(pair, limit)

    @rule(slot=SLOTS, limit=LIMITS)
    def readmit(self, slot: int, limit: int | None) -> None:
        """Preemption by recompute: release, and later admit what is now a longer prompt."""
        pair = self.occupied(slot)
        self.release_pair(pair)
        self.try_admit(pair, limit)

    @rule(slot=SLOTS, n=st.none() | st.integers(0, 8), dies=st.sampled_from((False, False, True)))
    def compute(self, slot: int, n: int | None, dies: bool) -> None:
        """The KV of a chunk is written, and committed unless the step dies before."""
        pair = self.running(slot)
        self.write(pair, n)
        if not dies:
            self.commit(pair, n)

    @rule(slot=SLOTS, tokens=TOKENS)
    def sample(self, slot: int, tokens: list[int]) -> None:
        """Tokens become known, by sampling one or by accepting several drafts."""
        self.extend(self.occupied(slot), tokens)

    @rule(slot=SLOTS, n=st.integers(0, 9))
    def reserve(self, slot: int, n: int) -> None:
        self.try_reserve(self.running(slot), n)

    @rule(slot=SLOTS, tokens=TOKENS)
    def step(self, slot: int, tokens: list[int]) -> None:
        """An engine's step, over every running sequence. All sample alike, so that equal ones stay equal."""
        self.running(slot)
        batch = [pair for pair in self.slots if pair is not None and pair.model.admitted]
        for pair in batch:
            self.write(pair)
        for pair in batch:
            self.commit(pair)
        for pair in batch:
            self.extend(pair, tokens)
            self.try_reserve(pair, max(0, len(pair.model.tokens) - pair.model.reserved))

    @rule(slot=SLOTS)
    def release(self, slot: int) -> None:
        self.vacate(slot)

    @rule(slot=SLOTS, which=st.integers(0, 63))
    def misuse(self, slot: int, which: int) -> None:
        """Bad input is refused with an error of ours, and nothing changes."""
        manager, seq = self.manager, self.running(slot).real
        foreign = BlockManager(1, 1).sequence([0])
        idle = manager.sequence([0])
        outgrown = manager.sequence([0], max_length=1)
        outgrown.append(0)
        room = (MAX_LENGTH if seq.max_length is None else seq.max_length) - seq.num_reserved
        calls: tuple[Callable[[], object], ...] = (
            lambda: manager.admit(seq),
            lambda: manager.can_admit(seq),
            lambda: manager.can_admit(foreign),
            lambda: manager.can_admit(outgrown),
            lambda: manager.can_admit(idle, 0),
            lambda: manager.match(foreign),
            lambda: manager.commit(seq, min(len(seq), seq.num_reserved) - seq.num_computed + 1),
            lambda: manager.commit(seq, -1),
            lambda: manager.commit(idle, 0),
            lambda: manager.reserve(seq, room + 1),
            lambda: manager.reserve(seq, -1),
            lambda: manager.reserve(seq, True),
            lambda: manager.reserve(idle, 0),
            lambda: manager.release(foreign),
            lambda: manager.release(idle),
            lambda: seq.extend([0, -1]),
            lambda: seq.extend([0, 2**31]),
            lambda: manager.sequence([]),
            lambda: manager.sequence([0, 0], max_length=1),
        )
        call = calls[which % len(calls)]
        before = fingerprint(manager)
        try:
            call()
        except KvproofError as error:
            event(f"refused: {type(error).__name__}")
        else:
            raise AssertionError(f"misuse {calls.index(call)} was accepted")
        assert fingerprint(manager) == before, f"misuse {calls.index(call)} changed something"

    # ---- invariants

    @invariant()
    def agrees_with_model(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, model = self.manager, self.model
        blocks = range(model.num_blocks)
        assert [manager.pool.refs(block) for block in blocks] == model.refs
        cached = model.cached[::-1] if model.newest_first else model.cached
        assert manager.pool.free_lists() == (model.empty[::-1], cached)
        assert {block for block in blocks if manager.pool.content(block) is not None} == set(model.holds)
        for pair in filter(None, self.slots):
            real, seq = pair.real, pair.model
            assert list(real.block_table) == seq.table
            assert (len(real), real.num_computed, real.num_reserved) == (len(seq.tokens), seq.computed, seq.reserved)
        assert manager.num_used == sum(1 for refs in model.refs if refs)

    @invariant()
    def audit_passes(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        """I13, the content oracle."""
        for pair in filter(None, getattr(self, "slots", ())):
            for i in range(pair.real.num_computed):
                block, offset = divmod(i, self.manager.block_size)
                read = self.memory.get((pair.real.block_table[block], offset))
                assert read == pair.model.prefix(i + 1), f"token {i} of {pair.real} reads {read}"

    def teardown(self) -> None:
        """I11: when every sequence is released, every block is unreferenced."""
        if hasattr(self, "manager"):
            for slot in range(NUM_SLOTS):
                self.vacate(slot)
            self.agrees_with_model()
            assert self.manager.num_used == 0
            assert self.manager.num_free == self.manager.num_blocks

    # ---- making a slot ready

    def occupied(self, slot: int) -> Pair:
        pair = self.slots[slot]
        if pair is None:
            prompt = self.prompts[-1][: self.capacity]
            pair = Pair(self.manager.sequence(prompt), ModelSequence(NAMESPACES[0], list(prompt)))
            self.slots[slot] = pair
        return pair

    def running(self, slot: int) -> Pair:
        """An admitted sequence in `slot`; the others make room for it if they must."""
        pair = self.occupied(slot)
        if not pair.model.admitted and not self.try_admit(pair, None):
            for other in filter(None, self.slots):
                self.release_pair(other)
            if not self.try_admit(pair, None):  # it has outgrown the pool
                self.slots[slot] = None
                pair = self.occupied(slot)
                assert self.try_admit(pair, None)
        return pair

    def try_admit(self, pair: Pair, limit: int | None) -> bool:
        before = fingerprint(self.manager)
        expected = self.model.hits(pair.model) if self.model.caching else []
        assert self.manager.match(pair.real) == len(expected) * self.model.block_size
        assert self.manager.can_admit(pair.real, limit) == self.model.answer(pair.model, limit)
        assert fingerprint(self.manager) == before, "a question changed something"
        answer = self.manager.admit(pair.real, limit)
        assert answer == self.model.admit(pair.model, limit)
        if answer is Admission.NOW:
            assert pair.real.num_cached == pair.model.computed
            if pair.model.computed:
                event("admitted with a hit")
            return True
        event(f"admission {answer}")
        assert fingerprint(self.manager) == before, "a refused admission changed something"
        return False

    def chunk_end(self, pair: Pair, n: int | None) -> int:
        """Where the next `n` tokens end that could be computed now; None for all of them."""
        seq = pair.model
        stop = min(seq.reserved, len(seq.tokens))
        return stop if n is None else min(stop, seq.computed + n)

    def write(self, pair: Pair, n: int | None = None) -> None:
        """The KV of the next `n` tokens is written, slot by slot."""
        pool = self.manager.pool
        for i in range(pair.real.num_computed, self.chunk_end(pair, n)):
            entry, offset = divmod(i, self.manager.block_size)
            block = pair.real.block_table[entry]
            # I5
            assert pool.refs(block) == 1, f"block {block} is written and has {pool.refs(block)} owners"
            assert pool.content(block) is None, f"block {block} is written and published"
            self.memory[block, offset] = pair.model.prefix(i + 1)

    def commit(self, pair: Pair, n: int | None = None) -> None:
        n = self.chunk_end(pair, n) - pair.model.computed
        merges = self.manager.commit(pair.real, n)
        assert [tuple(merge) for merge in merges] == self.model.commit(pair.model, n)
        if merges:
            event("merged a duplicate")

    def extend(self, pair: Pair, tokens: list[int]) -> None:
        """`tokens` become known, as far as the declared length and the pool allow."""
        seq = pair.model
        limit = self.capacity if seq.max_length is None else seq.max_length
        tokens = tokens[: max(0, limit - len(seq.tokens))]
        pair.real.extend(tokens)
        seq.tokens += tokens
        self.prompts.append(list(seq.tokens))  # the next turn of a conversation begins like this

    def try_reserve(self, pair: Pair, n: int) -> None:
        if pair.model.max_length is not None:
            n = min(n, pair.model.max_length - pair.model.reserved)
        before = fingerprint(self.manager)
        granted = self.manager.reserve(pair.real, n)
        assert granted == self.model.reserve(pair.model, n)
        if not granted:
            event("reserve refused")
            assert fingerprint(self.manager) == before, "a refused reserve changed something"

    def release_pair(self, pair: Pair) -> None:
        if pair.model.admitted:
            self.manager.release(pair.real)
            self.model.release(pair.model)

    def vacate(self, slot: int) -> None:
        pair = self.slots[slot]
        if pair is not None:
            self.release_pair(pair)
            self.slots[slot] = None
