"""The figures, worked out by hand. That they stay right whatever happens is the state machine's part."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from kvproof.allocator import Admission, BlockManager, Sequence, Stats


def computed(manager: BlockManager, tokens: list[int]) -> Sequence:
    seq = manager.sequence(tokens)
    assert manager.admit(seq) is Admission.NOW
    manager.commit(seq, len(tokens) - seq.num_computed)
    return seq


def changed(before: Stats, after: Stats) -> dict[str, int]:
    old = asdict(before)
    return {name: value - old[name] for name, value in asdict(after).items() if value != old[name]}


def test_of_a_new_manager() -> None:
    stats = BlockManager(5, 2, reserve_null_block=True).stats()
    assert {name: value for name, value in asdict(stats).items() if value} == {"num_blocks": 4, "num_free": 4}
    assert (stats.usage, stats.hit_rate, stats.mean_residency) == (0.0, 0.0, 0.0)


def test_of_a_life() -> None:
    manager = BlockManager(4, 2)
    seq = computed(manager, [1, 2, 3, 4, 5])
    assert manager.stats() == Stats(
        num_blocks=4, num_used=3, num_free=1, num_cached=0, num_sequences=1, admissions=1, readmissions=0,
        tokens_queried=5, tokens_hit=0, published=2, merged=0, evictions=0, residency=0,
    )  # fmt: skip
    assert manager.stats().usage == 0.75
    manager.release(seq)
    stats = manager.stats()
    assert (stats.num_used, stats.num_free, stats.num_cached, stats.usage) == (0, 4, 2, 0.0)
    before = stats
    computed(manager, [1, 2, 9])
    after = manager.stats()
    assert changed(before, after) == {
        "num_used": 2, "num_free": -2, "num_cached": -1, "num_sequences": 1, "admissions": 1, "tokens_queried": 3,
        "tokens_hit": 2,
    }  # fmt: skip
    assert after.hit_rate == 2 / 8


def test_questions_and_refusals_count_nothing() -> None:
    manager = BlockManager(4, 2)
    manager.release(computed(manager, [1, 2, 3]))
    computed(manager, [7] * 5)
    before = manager.stats()
    seq = manager.sequence([1, 2, 3, 4, 5])
    assert manager.match(seq) == 2
    assert manager.can_admit(seq) is manager.admit(seq) is Admission.LATER
    assert manager.stats() == before


def test_a_preempted_sequence_is_queried_once() -> None:
    manager = BlockManager(4, 2)
    seq = computed(manager, [1, 2, 3])
    manager.release(seq)
    before = manager.stats()
    assert manager.admit(seq) is Admission.NOW
    assert seq.num_cached == 2
    assert changed(before, manager.stats()) == {
        "num_used": 2, "num_free": -2, "num_cached": -1, "num_sequences": 1, "readmissions": 1,
    }  # fmt: skip


def test_a_fork_is_no_admission_and_neither_is_its_return() -> None:
    manager = BlockManager(4, 2)
    child = manager.fork(computed(manager, [1, 2]))
    assert manager.stats().admissions == 1
    manager.release(child)
    manager.admit(child)
    assert (manager.stats().admissions, manager.stats().readmissions) == (1, 1)


def test_without_prefix_caching_nothing_is_queried() -> None:
    manager = BlockManager(4, 2, prefix_caching=False)
    computed(manager, [1, 2, 3])
    stats = manager.stats()
    assert (stats.admissions, stats.tokens_queried, stats.published, stats.hit_rate) == (1, 0, 0, 0.0)


@pytest.mark.parametrize(("merge", "published", "merged"), [(True, 2, 2), (False, 4, 0)])
def test_duplicates_are_merged_or_published(merge: bool, published: int, merged: int) -> None:
    manager = BlockManager(8, 2, merge_duplicates=merge)
    seqs = [manager.sequence([1, 2, 3, 4]) for _ in range(2)]
    for seq in seqs:
        manager.admit(seq)
    for seq in seqs:
        manager.commit(seq, 4)
    assert (manager.stats().published, manager.stats().merged) == (published, merged)


def test_residency_is_counted_in_blocks_taken() -> None:
    manager = BlockManager(3, 1)
    manager.release(computed(manager, [1]))  # published when one block was taken
    manager.release(computed(manager, [2, 3]))  # two more: no eviction
    assert manager.stats().residency == 0
    computed(manager, [4])  # the fourth evicts [1]
    stats = manager.stats()
    assert (stats.evictions, stats.residency, stats.mean_residency) == (1, 3, 3.0)
    computed(manager, [5])  # the fifth evicts [2, 3], which was published when three were taken
    stats = manager.stats()
    assert (stats.evictions, stats.residency, stats.mean_residency) == (2, 5, 2.5)


def test_a_reset_evicts_nothing() -> None:
    manager = BlockManager(3, 1)
    manager.release(computed(manager, [1, 2]))
    manager.reset_prefix_cache()
    stats = manager.stats()
    assert (stats.num_cached, stats.evictions, stats.residency) == (0, 0, 0)
