"""What the machines for `BlockManager` stand on: a manager and its model, and the steps that bring both forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from kvproof.allocator import (
    FIFO,
    LRU,
    Admission,
    BlockManager,
    EvictionPolicy,
    KvproofError,
    Namespace,
    loops,
    xxh3_chained,
)
from kvproof.allocator.batch import DecodeBatch
from kvproof.fuzz.machines.oracles import ManagerOracles, Pair
from kvproof.fuzz.machines.router import Router
from kvproof.fuzz.model import Media, ModelManager, ModelSequence

NUM_SLOTS = 3
SLOTS = st.integers(0, NUM_SLOTS - 1)
LIMITS = st.none() | st.integers(1, 6)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
MEDIA: tuple[Media, ...] = (
    (),
    (),
    (),
    (("cat", 1, 2),),
    (("dog", 1, 2),),
    (("cat", 2, 2),),
    (("cat", 0, 3), ("dog", 3, 1)),
)
NAMESPACES = (Namespace(), Namespace(salt="x"), Namespace(adapter="x"))


class NewestFirst(LRU):
    """Evicts parents before their children: what a policy may do at worst."""

    def pop(self) -> int:
        newest = next(iter(self))
        self.remove(newest)
        return newest

    def __iter__(self) -> Iterator[int]:
        return reversed(list(super().__iter__()))


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU, "fifo": FIFO, "newest first": NewestFirst}


def weakened(bits: int) -> Callable[[bytes, int], int]:
    """The prefix hash with all but its lowest `bits` cut off; none left makes every block collide."""
    return lambda tokens, parent: xxh3_chained(tokens, parent) & ((1 << bits) - 1)


def fingerprint(manager: BlockManager) -> object:
    """All of a manager's state that an operation could change, the order of its free lists included."""
    pool = manager.pool
    blocks = range(pool.num_reserved, pool.num_blocks)
    return (
        [pool.refs(block) for block in blocks],
        [pool.content(block) for block in blocks],
        pool.free_lists(),
        manager.held_otherwise,
        [(seq, len(seq), seq.num_computed, seq.num_reserved, list(seq.block_table)) for seq in manager.sequences],
        {node.uid: node.blocks for node in manager.index.nodes()},
        manager.stats(),
        dict(manager._copies),
    )


class ManagerHarness(ManagerOracles):
    """Drives `make_manager`, so that a broken or foreign manager can be put in the place of ours."""

    make_manager: Callable[..., BlockManager] = staticmethod(BlockManager)

    @initialize(
        num_blocks=st.integers(1, 8),
        block_size=st.sampled_from((1, 2, 3, 4)),
        caching=st.sampled_from((True, True, True, False)),
        merge=st.booleans(),
        policy=st.sampled_from(tuple(POLICIES)),
        hash_bits=st.sampled_from((0, 1, 4, 64)),
        null_block=st.sampled_from((False, False, True)),
        window=st.sampled_from((None, None, None, None, 1, 2, 3, 5, 9)),
        watermark=st.sampled_from((0, 0, 1, 2)),
        patience=st.sampled_from((None, 0, 0, 5)),
        debug=st.booleans(),
        log_steps=st.sampled_from((1, 2, 64)),
        compiled=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        caching: bool,
        merge: bool,
        policy: str,
        hash_bits: int,
        null_block: bool,
        window: int | None,
        watermark: int,
        patience: int | None,
        debug: bool,
        log_steps: int,
        compiled: bool,
    ) -> None:
        """`patience` is how many steps' events are left to pile up; None for no events. Without `compiled` the loops
        run in Python even if they are compiled."""
        self.compiled = loops.compiled
        if not compiled:
            loops.compiled = None
        usable, num_blocks = num_blocks, num_blocks + (null_block or window is not None)
        watermark = min(watermark, usable)
        self.manager = self.make_manager(
            num_blocks,
            block_size,
            prefix_caching=caching,
            merge_duplicates=merge,
            policy=POLICIES[policy](),
            hash_block=weakened(hash_bits),
            reserve_null_block=null_block,
            window=window,
            watermark=watermark,
            events=patience is not None,
            debug=debug,
        )
        self.debug = debug
        self.router = Router(block_size)
        self.patience = self.waited = patience
        self.model = ModelManager(
            num_blocks,
            block_size,
            caching=caching,
            merge=merge,
            policy=policy,
            null_block=null_block,
            window=window,
            watermark=watermark,
        )
        self.capacity = usable * block_size
        self.slots = [None] * NUM_SLOTS
        self.prompts: list[list[int]] = [[0]]
        self.pins = []
        with patch.object(DecodeBatch, "max_log_steps", log_steps):
            self.batch = self.manager.decode_batch(NUM_SLOTS)
        self.rows: list[Pair] = []  # those in the batch, by row
        self.memory = {}

    def teardown(self) -> None:
        try:
            if hasattr(self, "manager"):
                self.finish()
        finally:
            if hasattr(self, "compiled"):
                loops.compiled = self.compiled

    def finish(self) -> None:
        """I11: when every sequence is released, every block is unreferenced."""
        for slot in range(NUM_SLOTS):
            self.vacate(slot)
        self.let_go()
        self.agrees_with_model()
        if self.patience is not None:
            self.read_events()
        assert self.manager.num_used == 0
        assert self.manager.num_free == self.manager.num_blocks

    # ---- making a slot ready

    def occupied(self, slot: int) -> Pair:
        pair = self.slots[slot]
        if pair in self.rows:
            self.leave(pair)
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
            self.let_go()
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
        self.snapshot_agrees()
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
        self.copy()
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

    def try_reserve(self, pair: Pair, n: int, lookahead: int = 0) -> None:
        if pair.model.max_length is not None:
            n = min(n, pair.model.max_length - pair.model.computed)
        before = fingerprint(self.manager)
        granted = self.manager.reserve(pair.real, n, lookahead=lookahead)
        assert granted == self.model.reserve(pair.model, n, lookahead)
        if not granted:
            event("reserve refused")
            assert fingerprint(self.manager) == before, "a refused reserve changed something"

    def leave(self, pair: Pair) -> None:
        self.batch.remove(pair.real)
        self.forget_row(pair)

    def forget_row(self, pair: Pair) -> None:
        """The last row takes its place."""
        row, last = self.rows.index(pair), self.rows.pop()
        if last is not pair:
            self.rows[row] = last
        self.model.keep_slots(pair.model, pair.model.computed)

    def release_pair(self, pair: Pair) -> None:
        if pair.model.admitted:
            self.manager.release(pair.real)
            if pair in self.rows:
                self.forget_row(pair)
            self.model.release(pair.model)

    def vacate(self, slot: int) -> None:
        pair = self.slots[slot]
        if pair is not None:
            self.release_pair(pair)
            self.slots[slot] = None

    def copy(self) -> None:
        """Carry out the copies that were ordered: all sources are read before any destination is written."""
        orders = self.manager.take_copies()
        assert sorted((d, s) for s, d in orders) == sorted(self.model.copies.items())
        self.model.copies.clear()
        slots = range(self.manager.block_size)
        read = {(d, i): self.memory[s, i] for s, d in orders for i in slots if (s, i) in self.memory}
        self.memory.update(read)
        if orders:
            event("copied on write")

    def let_go(self) -> None:
        """Give up the pins and retire the steps in flight."""
        while self.pins:
            pin, blocks = self.pins.pop()
            self.manager.unpin(pin)
            self.model.unpin(blocks)
        for step in list(self.model.flights):
            self.manager.retire(step)
            self.model.retire(step)

    def refused(self, call: Callable[[], object], name: str = "the call") -> None:
        before = fingerprint(self.manager)
        try:
            call()
        except KvproofError as error:
            event(f"refused: {type(error).__name__}")
        else:
            raise AssertionError(f"{name} was accepted")
        assert fingerprint(self.manager) == before, f"{name} changed something"
