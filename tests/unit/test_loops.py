"""The compiled loops do what the Python loops do: from equal states to equal states, down to every array.

A manager is driven with them, call by call or not at all, beside one that is driven in Python alone.
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.allocator import (
    FIFO,
    LRU,
    BlockManager,
    BlockPool,
    KvproofError,
    MediaItem,
    Namespace,
    Sequence,
    loops,
    xxh3_chained,
)
from kvproof.allocator.batch import DecodeBatch
from kvproof.allocator.sequence import token_array

pytestmark = pytest.mark.skipif(loops.compiled is None, reason="the extension is not built, or KVPROOF_PURE is set")

COMPILED = loops.compiled


@contextmanager
def using(compiled: bool) -> Iterator[None]:
    loops.compiled = COMPILED if compiled else None
    try:
        yield
    finally:
        loops.compiled = COMPILED


def weak(tokens: bytes, parent_hash: int) -> int:
    return (sum(tokens) + parent_hash) % 3


def refused(tokens: bytes, parent_hash: int) -> int:
    """Every seventh is no hash: too large, or negative."""
    hash = xxh3_chained(tokens, parent_hash)
    return [hash, hash, 2**64, hash, hash, -1, hash][hash % 7] if len(tokens) > 4 else hash


HASHES = (xxh3_chained, weak, refused)
NAMESPACES = (Namespace(), Namespace(salt="a"))


class NosyLRU(LRU):
    """Calls `look` before it does anything."""

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__()
        self._look = look

    def insert(self, block: int, published: int) -> None:
        self._look()
        super().insert(block, published)

    def remove(self, block: int) -> None:
        self._look()
        super().remove(block)

    def pop(self) -> int:
        self._look()
        return super().pop()


class Side:
    """A manager, its sequences and its batch; an operation is named by integers, which fit any state.

    A nosy one looks at the rows of the batch whenever it is called back.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        fifo, nosy, hash_block = options.pop("fifo"), options.pop("nosy", False), options.pop("hash_block")

        def nosy_hash(tokens: bytes, parent_hash: int) -> int:
            self.look_at_rows()
            hash: int = hash_block(tokens, parent_hash)
            return hash

        policy = NosyLRU(self.look_at_rows) if nosy else FIFO() if fifo else LRU()
        self.manager = BlockManager(**options, policy=policy, hash_block=nosy_hash if nosy else hash_block)
        self.batch: DecodeBatch = self.manager.decode_batch(4)
        self.seqs: list[Sequence] = []
        self.pins: list[Any] = []
        self.steps: list[int] = []

    def do(self, name: str, a: int, b: int) -> object:
        """The operation's answer, or its error's text."""
        try:
            return getattr(self, name)(a, b)
        except KvproofError as error:
            self.look_at_rows()  # which of them it has brought up to date before is its own affair
            return type(error).__name__, str(error)

    def look_at_rows(self) -> None:
        for seq in self.batch:
            len(seq)

    def seq(self, a: int) -> Sequence:
        return self.seqs[a % len(self.seqs)]

    def create(self, a: int, b: int) -> object:
        """Prompts of few different tokens, so that they begin alike."""
        tokens = Random(a % 3 if a % 2 == 0 else a).choices(range(2), k=40)[: 1 + (b if a % 5 == 1 else b % 12)]
        media = (MediaItem("m", 0, 2),) if a % 7 == 6 else ()
        longest = len(tokens) + 8 if b % 3 == 0 else None
        seq = self.manager.sequence(tokens, max_length=longest, namespace=NAMESPACES[a % 5 == 0], media=media)
        self.seqs = [*self.seqs[-7:], seq]
        return self.manager.admit(seq)

    def admit(self, a: int, b: int) -> object:
        return self.manager.admit(self.seq(a)), self.seq(a).num_cached

    def prefill(self, a: int, b: int) -> object:
        seq = self.seq(a)
        merges = self.manager.commit(seq, len(seq) - seq.num_computed)
        seq.append(b % 2)
        return merges

    def commit(self, a: int, b: int) -> object:
        return self.manager.commit(self.seq(a), b % 4)

    def reserve(self, a: int, b: int) -> object:
        return self.manager.reserve(self.seq(a), b % 5)

    def append(self, a: int, b: int) -> object:
        return self.seq(a).append(b % 2)

    def release(self, a: int, b: int) -> object:
        return self.manager.release(self.seq(a))

    def truncate(self, a: int, b: int) -> object:
        return self.manager.truncate(self.seq(a), 1 + b % 12)

    def fork(self, a: int, b: int) -> object:
        self.seqs.append(self.manager.fork(self.seq(a)))
        return len(self.seqs)

    def pin(self, a: int, b: int) -> object:
        self.pins.append(self.manager.pin(self.seq(a)))
        return self.pins[-1].blocks

    def unpin(self, a: int, b: int) -> object:
        return self.manager.unpin(self.pins.pop()) if self.pins else None

    def launch(self, a: int, b: int) -> object:
        self.steps.append(self.manager.launch([self.seq(a), self.seq(b)]))
        return self.steps[-1]

    def retire(self, a: int, b: int) -> object:
        return self.manager.retire(self.steps.pop(0)) if self.steps else None

    def join(self, a: int, b: int) -> object:
        return self.batch.add(self.seq(a))

    def leave(self, a: int, b: int) -> object:
        return self.batch.remove(self.seq(a))

    def step(self, a: int, b: int) -> object:
        starved = self.batch.reserve()
        for seq in starved:
            self.manager.release(seq)
        merges = self.batch.commit([(a + row) % 2 for row in range(len(self.batch))])
        return len(starved), [merge[1:] for merge in merges]

    def steps_in_a_row(self, a: int, b: int) -> object:
        return [self.step(a + i, b) for i in range(1 + b % 9)]

    def view(self, a: int, b: int) -> object:
        """Someone reads every second row's table through its buffer, which therefore can't grow."""
        with ExitStack() as stack:
            for seq in [*self.batch][a % 2 :: 2]:
                stack.enter_context(memoryview(seq.block_table))
            return self.steps_in_a_row(a, b)

    def misstep(self, a: int, b: int) -> object:
        """No tokens for the rows, or too many, or some of an iterator, or before they have slots."""
        n = len(self.batch)
        tokens: list[Iterable[Any]] = [[-1] * n, [0] * (n + 1), ["0"] * n, iter([a % 2] * n), [b % 2] * n]
        return [merge[1:] for merge in self.batch.commit(tokens[b % 5])]

    def steps_to_the_end(self, a: int, b: int) -> object:
        """And no row is released for want of a block, or because it is at its `max_length`."""
        for i in range(1 + b % 30):
            if left := self.batch.reserve():
                return len(left)
            self.batch.commit([(a + i) % 2] * len(self.batch))
        return None

    def look(self, a: int, b: int) -> object:
        return len(self.seq(a)), list(self.seq(a).tokens())

    def state(self) -> object:
        names = {seq: i for i, seq in enumerate([*self.seqs, *self.manager.sequences])}

        def plain(value: object) -> object:
            if isinstance(value, dict):
                return [(plain(key), plain(entry)) for key, entry in value.items()]
            if isinstance(value, list | tuple):
                return [plain(entry) for entry in value]
            if isinstance(value, Sequence):
                return f"sequence {names[value]}"
            return value if isinstance(value, array | int | bytes | str | None | Namespace | MediaItem) else None

        manager, batch = self.manager, self.batch
        slots = [{slot: getattr(seq, slot) for slot in Sequence.__slots__} for seq in names]
        parts = [manager.pool, manager.pool._cached, manager.index, manager._flights, batch]
        return [manager.stats(), *(plain(slot) for slot in slots), *(plain(vars(part)) for part in parts)]


# Twice what makes something to do for the rest.
OPERATIONS = ["create", "prefill", "join", "steps_in_a_row"] * 2 + [
    "admit", "append", "commit", "fork", "launch", "leave", "look", "misstep", "pin", "release", "release", "reserve",
    "retire", "step", "steps_to_the_end", "truncate", "unpin", "view",
]  # fmt: skip

options = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 24),
        "block_size": st.integers(1, 4),
        "prefix_caching": st.sampled_from([True, True, True, False]),
        "merge_duplicates": st.booleans(),
        "window": st.sampled_from([None, None, None, 3]),
        "hash_block": st.sampled_from(HASHES),
        "events": st.sampled_from([False, False, False, True]),
        "fifo": st.sampled_from([False, False, False, True]),
        "nosy": st.sampled_from([False, False, False, True]),
    }
)
operations = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 50), st.integers(0, 50), st.integers(0, 3)),
    min_size=20,
    max_size=60,
)


def assert_equal_lives(options: dict[str, Any], operations: list[tuple[str, int, int, int]]) -> None:
    pure, mixed = Side(dict(options)), Side(dict(options))
    for name, a, b, by in [("create", 0, 9, 1), *operations]:
        with using(False):
            expected = pure.do(name, a, b)
        with using(by > 0):
            assert mixed.do(name, a, b) == expected
        assert mixed.state() == pure.state(), f"after {name}"
    mixed.manager.check()


@settings(max_examples=150, deadline=None)
@given(options, operations)
def test_equal_lives(options: dict[str, Any], operations: list[tuple[str, int, int, int]]) -> None:
    assert_equal_lives(options, operations)


def test_equal_lives_of_full_pools() -> None:
    """Without Hypothesis, which likes short lives: evictions in every one of these."""
    evictions = 0
    for seed in range(30):
        random = Random(seed)
        chosen = {"num_blocks": 14, "block_size": 2, "hash_block": HASHES[seed % 2], "fifo": False}
        steps = [(random.choice(OPERATIONS), random.randrange(50), random.randrange(50), 1) for _ in range(150)]
        assert_equal_lives(chosen, steps)
        side = Side(dict(chosen))
        for name, a, b, _ in [("create", 0, 9, 1), *steps]:
            side.do(name, a, b)
        evictions += side.manager.stats().evictions
    assert evictions > 100


values = st.one_of(st.integers(0, 2**31 - 1), st.integers(-(2**70), 2**70), st.booleans(), st.none(), st.floats())


@given(st.lists(st.integers(0, 2**31 - 1)), st.lists(values, max_size=2))
def test_tokens_are_taken_or_refused_alike(good: list[int], others: list[Any]) -> None:
    def answer(tokens: list[Any]) -> object:
        try:
            taken = token_array(tokens)
        except KvproofError as error:
            return str(error)
        return taken.typecode, taken

    with using(False):
        expected = answer([*good, *others])
    assert answer([*good, *others]) == expected


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("method", ["share_all", "release_all"])
@pytest.mark.parametrize("bad", [-1, 7, 2**31, 2**80, 0, 5])
def test_a_run_ends_where_a_block_is_wrong(compiled: bool, method: str, bad: int) -> None:
    """Block 0 is reserved, block 5 free, and the rest of the bad ones are none."""
    with using(compiled):
        pool = BlockPool(7, num_reserved=1)
        taken = pool.take(3)
        with pytest.raises(KvproofError, match=rf"block {bad}\b" if bad != 5 else "block 5 is free"):
            getattr(pool, method)([*taken[:2], bad, taken[2]])
        assert [pool.refs(block) for block in taken] == ([2, 2, 1] if method == "share_all" else [0, 0, 1])


def test_a_block_is_released_as_often_as_it_is_held() -> None:
    pool = BlockPool(3)
    (block,) = pool.take()
    with pytest.raises(KvproofError, match="no reference to release"):
        pool.release_all([block, block])
    assert pool.free_lists() == ([0, 1, 2], [])


def drive(rounds: int, hash_block: Callable[[bytes, int], int] = xxh3_chained) -> BlockManager:
    """Admissions, hits, duplicates, decode steps and evictions, in a pool that is always full."""
    random, manager = Random(1), BlockManager(40, 4, hash_block=hash_block)
    batch = manager.decode_batch(4)
    for _ in range(rounds):
        while len(batch) < 4:
            seq = manager.sequence([random.randrange(300) for _ in range(4)] * random.randrange(1, 4) + [7])
            manager.admit(seq)
            manager.commit(seq, len(seq) - seq.num_computed)
            seq.append(1)
            assert batch.add(seq)
        for _ in range(9):
            for seq in batch.reserve():
                manager.release(seq)
            batch.commit([random.randrange(300, 10_000) for _ in batch])
        for seq in list(batch)[:2]:
            manager.release(seq)
    return manager


def test_nothing_is_leaked_or_given_back_twice() -> None:
    """Reference counts are where C goes wrong."""
    for _ in range(3):  # the interpreter has its own things to settle
        drive(300)
    constants: tuple[object, ...] = (None, True, 0, 1, 7, b"", xxh3_chained, LRU, array)
    gc.collect()
    blocks, counts = sys.getallocatedblocks(), [sys.getrefcount(constant) for constant in constants]
    evictions = drive(3000).stats().evictions
    gc.collect()
    assert evictions > 3000
    assert abs(sys.getallocatedblocks() - blocks) < 20
    assert all(abs(sys.getrefcount(constant) - count) < 50 for constant, count in zip(constants, counts, strict=True))


def test_a_hash_function_that_fails_leaks_nothing() -> None:
    def fails(tokens: bytes, parent_hash: int) -> int:
        if len(tokens) and tokens[0] == 9:
            raise ZeroDivisionError
        return xxh3_chained(tokens, parent_hash)

    manager = BlockManager(40, 2, hash_block=fails)
    seq = manager.sequence([1, 2, 3, 4, 9, 9, 1, 1])
    manager.admit(seq)
    manager.commit(seq, 4)

    def refused() -> None:
        with pytest.raises(ZeroDivisionError):
            manager.commit(seq, 4)

    refused()
    gc.collect()
    blocks = sys.getallocatedblocks()
    for _ in range(2000):
        refused()
    gc.collect()
    assert abs(sys.getallocatedblocks() - blocks) < 100
    manager.check()


@pytest.mark.parametrize("compiled", [True, False])
def test_blocks_that_nobody_holds_are_shared_and_too_many_are_refused(compiled: bool) -> None:
    with using(compiled):
        manager = BlockManager(5, 1)
        seq = manager.sequence(range(4))
        manager.admit(seq)
        manager.commit(seq, 4)
        manager.release(seq)
        pool = manager.pool
        pool.share_all([1, 3])
        assert pool.free_lists() == ([4], [2, 0])
        with pytest.raises(KvproofError, match="cannot take 4 blocks, 3 are free"):
            pool.take(4)
        assert pool.free_lists() == ([4], [2, 0])
        pool.release_all([1, 3])
        assert pool.free_lists() == ([4], [2, 0, 1, 3])


def test_a_row_that_is_looked_at_in_the_middle_of_a_commit_is_not_counted_twice() -> None:
    """By a policy that is told of another row's merge; both rows have filled a block in this step."""

    def life() -> object:
        policy = NosyLRU(lambda: [len(seq) for manager in managers for seq in manager.sequences])
        managers = [BlockManager(12, 2, policy=policy)]
        manager = managers[0]
        gone = manager.sequence([5, 5, 6, 6])
        manager.admit(gone)
        manager.commit(gone, 4)
        manager.release(gone)
        batch = manager.decode_batch(3)
        rows = [manager.sequence([*prompt]) for prompt in ([5, 5, 6], [7, 7, 8], [7, 7, 9])]
        for seq in rows:
            manager.admit(seq)
            manager.commit(seq, len(seq) - seq.num_computed)
            seq.append(seq.tokens()[-1])
            assert batch.add(seq)
        merges = [[merge[1:] for merge in batch.commit([10, 20, 30])]]
        assert len(merges[0]) == 1
        merges.append(batch.reserve())
        merges.append(batch.commit([11, 21, 31]))
        manager.check()
        return merges, [(seq.tokens(), seq.block_table, seq.num_computed) for seq in rows], manager.stats()

    with using(False):
        expected = life()
    assert life() == expected


@pytest.mark.parametrize("error", [ZeroDivisionError, TypeError, OverflowError])
@pytest.mark.parametrize("batched", [False, True])
def test_a_hash_function_that_fails_is_called_as_often_and_heard(error: type[Exception], batched: bool) -> None:
    """What it has answered before it failed is kept, and its own error is no refusal of what it answers."""

    def life() -> object:
        calls: list[int] = []

        def fails(tokens: bytes, parent_hash: int) -> int:
            calls.append(len(calls))
            if len(calls) == 5:
                raise error("of the hash function")
            return xxh3_chained(tokens, parent_hash)

        manager = BlockManager(40, 2, hash_block=fails)
        seq = manager.sequence(range(7 if batched else 12))
        assert manager.admit(seq) == "now"
        batch = manager.decode_batch(1)
        manager.commit(seq, 6 if batched else 4)
        if batched:
            batch.add(seq)
            batch.commit([9])
        with pytest.raises(error, match="of the hash function"):
            batch.commit([9]) if batched else manager.commit(seq, 8)
        manager.check()
        return calls, seq._hashes, seq.tokens(), seq.num_computed, len(calls)

    with using(False):
        expected = life()
    assert life() == expected


@pytest.mark.parametrize("max_length", [10**30, float("inf"), 2**31 - 1])
def test_a_row_may_become_as_long_as_anybody_says(max_length: Any) -> None:
    manager = BlockManager(8, 2)
    batch = manager.decode_batch(1)
    seq = manager.sequence([1, 2, 3], max_length=4)
    manager.admit(seq)
    manager.commit(seq, 2)
    batch.add(seq)
    seq.max_length = max_length
    for token in range(9):
        assert batch.reserve() == []
        batch.commit([token])
    assert (seq.num_computed, seq.num_reserved, len(seq.block_table)) == (11, 12, 6)


def test_a_policy_that_holds_what_is_no_block_is_refused() -> None:
    policy = LRU()
    pool = BlockManager(4, 2, policy=policy).pool
    policy.insert(10**6, 0)
    with pytest.raises(KvproofError, match="there is no block 1000000"):
        pool.take(5)
    assert pool.free_lists()[0] == [0, 1, 2, 3]


def test_what_can_fail_of_taking_blocks_fails_before_the_first_one() -> None:
    """An array that can't grow stands for memory that is not there."""
    manager = BlockManager(6, 1)
    seq = manager.sequence(range(4))
    manager.admit(seq)
    manager.commit(seq, 4)
    manager.release(seq)
    with memoryview(manager.index._free_places), pytest.raises(BufferError):
        manager.pool.take(4)
    manager.check()
    assert manager.pool.take(4) == [4, 5, 3, 2]


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROOF_PURE", "1")
    assert loops._load() is None
    for value in ("0", ""):
        monkeypatch.setenv("KVPROOF_PURE", value)
        assert loops._load() is COMPILED


def test_nothing_else_runs_while_a_view_is_open() -> None:
    """A collection calls what waits for its objects, in Python 3.11 in the middle of an allocation."""
    manager = BlockManager(60, 2)
    batch = manager.decode_batch(3)
    runs, open_views = 0, []

    def probe(phase: str, info: object) -> None:
        nonlocal runs
        runs += 1
        index, pool = manager.index, manager.pool
        arrays: list[Any] = [index._records, index._keys, index._lookup, index._free_places, pool._refs, pool._content]
        arrays += [pool._published, pool._empty, batch._log, batch._tables]
        for seq in batch:
            arrays += [seq._tokens, seq._hashes, seq._table]
        for part in arrays:
            try:
                part.append(0)
                part.pop()
            except BufferError:
                open_views.append(sys._getframe(1).f_code.co_name)

    hoard: list[object] = []

    def hungry() -> None:
        """The interpreter keeps some dead lists and dicts: without them, the next new one may set a collection off."""
        hoard.append(([[] for _ in range(100)], [{} for _ in range(100)]))

    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    gc.callbacks.append(probe)
    try:
        for i in range(6):
            seq = manager.sequence([1, 1, 1, i], max_length=20 + i)
            hungry()
            manager.admit(seq)
            manager.commit(seq, len(seq) - seq.num_computed)
            seq.append(i)
            manager.reserve(seq, 1 + i)
            if len(batch) < 3:
                batch.add(seq)
            else:
                manager.release(seq)
            for token in range(i):
                hungry()
                batch.reserve()
                hungry()
                batch.commit([token] * len(batch))
    finally:
        gc.callbacks.remove(probe)
        gc.set_threshold(*thresholds)
    assert runs > 100
    assert open_views == []
