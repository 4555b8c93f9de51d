"""What is found out from the changes between two steps is what looking at everything finds out."""

from __future__ import annotations

from array import array
from ctypes import c_int64
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.allocator import InvalidArgument
from kvproof.attention import BatchPlan, CacheSpec, InvalidBatch, ownership
from kvproof.attention.ownership import Ownership
from kvproof.attention.torch_paged import TorchAttention

NUM_BLOCKS = 16

Row = tuple[list[int], int, int]
"""Table, tokens before the step, and those of the step."""
EMPTY: Row = ([], 0, 0)

needs_library = pytest.mark.skipif(ownership.load() is None, reason="no C compiler")


def cache(block_size: int, window: int | None = None) -> CacheSpec:
    return CacheSpec(
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=1,
        dtype="float32",
        num_blocks=NUM_BLOCKS,
        block_size=block_size,
        window=window,
    )


def plan_of(rows: list[Row], block_size: int) -> BatchPlan:
    """Rows of one token come first, whatever their order here."""
    tables, computed, query = zip(*sorted(rows, key=lambda row: row[2] != 1), strict=True)
    lens = [before + now for before, now in zip(computed, query, strict=True)]
    return BatchPlan.build([array("i", table) for table in tables], lens, query, block_size)


def refusal(plan: BatchPlan, spec: CacheSpec, known: Ownership | None = None) -> str | None:
    try:
        plan.validate(spec, known)
    except InvalidBatch as error:
        return str(error)
    return None


def follows(known: Ownership, plan: BatchPlan) -> bool:
    kv_indptr, qo_indptr, seq = (x.numpy().astype(np.int64) for x in (plan.kv_indptr, plan.qo_indptr, plan.seq_lens))
    return known.follow(kv_indptr, plan.kv_indices.numpy(), seq - np.diff(qo_indptr))


def grown(rows: list[Row], at: int, tokens: int, block_size: int, random: Random) -> Row:
    """The row a step later, mostly with free blocks for what is missing; one that is in use breaks a rule."""
    table, computed, query = rows[at]
    table = table[:]
    while len(table) < -(-(computed + query + tokens) // block_size):
        used = {block for other in (table, *(other for other, *_ in rows)) for block in other}
        free = [block for block in range(NUM_BLOCKS) if block not in used]
        table.append(random.choice(free) if free and random.random() < 0.95 else random.randrange(NUM_BLOCKS))
    return table, computed + query, tokens


def changed(rows: list[Row], block_size: int, random: Random) -> list[Row]:
    """What an engine does between two steps, and what none should."""
    rows = [row for row in rows if random.random() < 0.93]
    for at in range(len(rows)):
        rows[at] = grown(rows, at, random.choice((1, 1, 1, 1, 1, 4)), block_size, random)
    if random.random() < 0.5 or not rows:  # a new one, which may begin with the blocks of another
        start = random.choice(rows)[0] if rows and random.random() < 0.5 else []
        start = start[: random.randint(0, len(start))]
        rows.insert(random.randint(0, len(rows)), (start, len(start) * block_size, 0))
        at = next(at for at, row in enumerate(rows) if not row[2])
        rows[at] = grown(rows, at, random.randint(1, 3), block_size, random)
    if random.random() < 0.1:  # back by some tokens, as after a draft
        table, computed, query = rows.pop()
        computed = random.randint(0, computed)
        rows.append((table[: -(-(computed + query) // block_size)], computed, query))
    if random.random() < 0.2:
        random.shuffle(rows)
    if random.random() < 0.1:  # another table, of the same length
        table = random.choice(rows)[0]
        table[random.randrange(len(table))] = random.randrange(NUM_BLOCKS)
    return rows


@needs_library
@settings(max_examples=400, deadline=None)
@given(block_size=st.integers(1, 3), seed=st.integers(0, 2**32), steps=st.integers(1, 12))
def test_a_series_of_steps_is_judged_as_each_step_alone(block_size: int, seed: int, steps: int) -> None:
    random, spec = Random(seed), cache(block_size)
    known, beside = Ownership(spec), Ownership(spec)
    rows: list[Row] = []
    for _ in range(steps):
        new = changed(rows, block_size, random)
        plan = plan_of([*new, *[EMPTY] * random.randint(0, 1)], block_size)
        right = refusal(plan, spec)
        assert follows(beside, plan) == (right is None)
        assert refusal(plan, spec, known) == right
        if right is None or random.random() < 0.2:  # else the engine tries again from where it was
            rows = new


@needs_library
def test_rows_that_go_on_are_not_counted_again() -> None:
    known, kept = Ownership(cache(2)), list[int]()
    library = known._library

    class Spy:
        def kvproof_follow(self, last: Any, step: Any, computed: int, *others: int) -> int:
            assert library is not None
            sound: int = library.kvproof_follow(last, step, computed, *others)
            kept[:] = (c_int64 * step._obj.rows).from_address(others[-1])
            return sound

    known._library = Spy()  # type: ignore[assignment]
    assert follows(known, plan_of([([3, 1], 2, 1), ([4, 5], 3, 1), ([7, 8, 9], 4, 1), ([10], 0, 1)], 2))
    assert kept == [0, 0, 0, 0]
    rows: list[Row] = [([7, 8, 9], 5, 1), ([3, 1], 3, 1), ([10], 1, 1), ([11], 0, 1), ([4, 5, 2, 6], 4, 3)]
    assert follows(known, plan_of(rows, 2))
    assert kept == [3, 2, 1, 0, 2]


@needs_library
def test_memory_is_that_of_one_step() -> None:
    known = Ownership(cache(1))
    for length in (9, 2):
        plan = plan_of([(list(range(length)), length - 1, 1)], 1)
        assert follows(known, plan)
        assert known._held is not None
        assert [kept.size for kept in known._held] == [2, length]


def test_a_refused_step_leaves_the_plan_and_what_follows_is_judged_as_ever() -> None:
    backend = TorchAttention(cache(2))
    first, second = plan_of([([3, 1], 2, 1), ([4], 1, 1)], 2), plan_of([([3, 1], 3, 1), ([4, 5], 2, 1)], 2)
    broken = plan_of([([3, 1], 3, 1), ([4, 1], 2, 1)], 2)
    for plan in (first, second):
        backend.plan(plan)
        for _ in range(2):
            with pytest.raises(InvalidBatch, match=r"^block-shared: row 0 writes block 1, which row 1 names too$"):
                backend.plan(broken)
        assert backend.batch.kv_indices.tolist() == plan.kv_indices.tolist()


def test_what_a_caller_writes_into_a_planned_batch_is_not_taken_for_planned() -> None:
    """Else the next step would be compared with tables that nobody has looked at."""
    backend, plan = TorchAttention(cache(2)), plan_of([([3, 1], 2, 1), ([4, 5], 2, 1)], 2)
    backend.plan(plan)
    plan.kv_indices[2] = 3
    plan.kv_indices[0] = 4
    backend.plan(plan)
    plan.kv_indices[0] = 5
    with pytest.raises(InvalidBatch, match=r"^block-shared: row 1 writes block 5"):
        backend.plan(plan)


@pytest.mark.parametrize("window", [None, 1])
def test_without_its_library_or_with_a_window_everything_is_looked_at(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if window is None:
        monkeypatch.setattr(ownership, "load", lambda: None)
    known = Ownership(cache(2, window))
    plan = plan_of([([3, 1], 2, 1), ([4], 1, 1)], 2)
    assert not follows(known, plan)
    plan.validate(cache(2, window), known)


def test_the_ownership_of_another_cache_is_refused() -> None:
    """Blocks of one may be out of the other's range, where counts would be written."""
    with pytest.raises(InvalidArgument, match=r"^the ownership is of .*block_size=1.*; the plan is for .*block_size=2"):
        plan_of([([3, 1], 2, 1)], 2).validate(cache(2), Ownership(cache(1)))


@needs_library
def test_what_a_backend_shows_of_its_plan_is_not_what_it_remembers() -> None:
    backend, plan = TorchAttention(cache(2)), plan_of([([3, 1], 2, 1), ([4, 5], 2, 1)], 2)
    backend.plan(plan)
    backend.batch.kv_indices.fill_(2**30)
    backend.plan(plan_of([([3, 1], 3, 1), ([4, 5], 3, 1)], 2))
