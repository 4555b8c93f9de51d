"""nano-vllm's interface: each fault of the original, gone, and the interface itself.

docs/nano-vllm.md has the table of the faults, each with what the original does.
"""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from time import perf_counter

import pytest

from kvproof.allocator import InvalidArgument, SequenceStateError
from kvproof.allocator.compat import BlockManager, OutOfBlocks
from kvproof.fuzz.machines.compat import weakened
from kvproof.fuzz.machines.harness import fingerprint
from kvproof.fuzz.nano import NanoSequence


def allocated(manager: BlockManager, *tokens: int) -> NanoSequence:
    seq = NanoSequence(list(tokens), manager.block_size)
    assert manager.can_allocate(seq)
    manager.allocate(seq)
    return seq


def grow(seq: NanoSequence, *tokens: int) -> None:
    for token in tokens:
        seq.append_token(token)


def append(manager: BlockManager, seq: NanoSequence, *tokens: int) -> None:
    grow(seq, *tokens)
    assert manager.can_append(seq)
    manager.may_append(seq)


# ---- the original's faults


def test_block_size_one() -> None:
    manager = BlockManager(3, 1)
    seq = allocated(manager, 7)
    append(manager, seq, 8)
    append(manager, seq, 9)
    assert seq.block_table == [0, 1, 2]
    grow(seq, 10)
    assert not manager.can_append(seq)


def test_several_tokens_at_once() -> None:
    manager = BlockManager(4, 4)
    seq = allocated(manager, 1, 2, 3)
    append(manager, seq, 4, 5, 6)
    assert seq.block_table == [0, 1]
    append(manager, seq, *range(7, 17))
    assert seq.block_table == [0, 1, 2, 3]
    grow(seq, 17)
    assert not manager.can_append(seq)


@pytest.mark.parametrize("length", [3, 4, 5], ids=["inside", "filled", "opened"])
def test_an_append_repeated(length: int) -> None:
    manager = BlockManager(4, 4)
    seq = allocated(manager, *range(length - 1))
    append(manager, seq, 9)
    table, before = seq.block_table[:], fingerprint(manager.manager)
    manager.may_append(seq)
    assert seq.block_table == table
    assert fingerprint(manager.manager) == before
    assert len(manager.hash_to_block_id) == (1 if length == 5 else 0)  # what this step writes is not written yet


@pytest.mark.parametrize("bits", [0, 1, 64])
def test_ancestry_is_verified(bits: int) -> None:
    """[2] [3] and [1] [3] share the tokens of a block and, with a constant hash, its hash, but not its KV."""
    manager = weakened(bits)(8, 1)
    first, second = allocated(manager, 1, 3, 9), allocated(manager, 2, 9)
    grow(first, 0)
    grow(second, 0)
    third = allocated(manager, 2, 3, 9)
    assert (first.block_table, second.block_table) == ([0, 1, 2], [3, 4])
    assert (third.block_table, third.num_cached_tokens) == ([3, 5, 6], 1)


def test_a_live_duplicate_is_found() -> None:
    manager = BlockManager(8, 2)
    older, newer = allocated(manager, 1), allocated(manager, 1)
    for token in (2, 3):
        append(manager, older, token)
        append(manager, newer, token)
    assert (older.block_table, newer.block_table) == ([0, 2], [1, 3])
    manager.deallocate(newer)
    seq = allocated(manager, 1, 2, 5)
    assert (seq.block_table[0], seq.num_cached_tokens) == (0, 2)


def test_a_finished_prefix_is_found_again() -> None:
    """The fork's own: it forgets a block when its last sequence goes."""
    manager = BlockManager(8, 2)
    seq = allocated(manager, 1, 2, 3)
    grow(seq, 4)
    manager.deallocate(seq)
    again = allocated(manager, 1, 2, 5)
    assert (again.block_table[0], again.num_cached_tokens) == (0, 2)
    manager.deallocate(again)
    assert (again.block_table, again.num_cached_tokens) == ([], 0)


def test_a_stale_answer_changes_nothing() -> None:
    manager = BlockManager(2, 2)
    first, second = NanoSequence([1, 2, 3], 2), NanoSequence([4, 5, 6], 2)
    assert manager.can_allocate(first)
    assert manager.can_allocate(second)
    manager.allocate(first)
    before = fingerprint(manager.manager)
    with pytest.raises(OutOfBlocks, match=r"^3 tokens don't fit in 0 free blocks of 2, block size 2$"):
        manager.allocate(second)
    assert fingerprint(manager.manager) == before
    assert (second.block_table, second.num_cached_tokens) == ([], 0)


def test_an_answer_about_other_tokens_is_not_used() -> None:
    manager = BlockManager(4, 2)
    seq = NanoSequence([1, 2, 3], 2)
    assert manager.can_allocate(seq)
    seq.token_ids[0] = 7
    manager.allocate(seq)
    grow(seq, 4)
    other = allocated(manager, 7, 2, 9)
    assert other.num_cached_tokens == 2
    assert manager.blocks[seq.block_table[0]].token_ids == [7, 2]


def test_what_can_not_be_allocated_is_rolled_back() -> None:
    manager = BlockManager(2, 1)
    seq = NanoSequence([1, 2, 3], 1)
    with pytest.raises(OutOfBlocks):
        manager.allocate(seq)
    assert (seq.block_table, list(manager.free_block_ids), set(manager.used_block_ids)) == ([], [0, 1], set())


def test_what_can_not_be_appended_is_rolled_back() -> None:
    manager = BlockManager(2, 2)
    seq = allocated(manager, 1, 2)
    grow(seq, 3, 4, 5)
    before = fingerprint(manager.manager)
    with pytest.raises(OutOfBlocks, match=r"^3 more tokens don't fit in 1 free blocks of 2, block size 2$"):
        manager.may_append(seq)
    assert fingerprint(manager.manager) == before
    assert seq.block_table == [0]
    del seq.token_ids[4:]
    seq.num_tokens = 4
    manager.may_append(seq)
    assert seq.block_table == [0, 1]


def test_a_second_free_is_refused() -> None:
    """Of the sequence itself, and of a copy of it, as pickling makes one, whose table still names the blocks."""
    manager = BlockManager(4, 2)
    seq = allocated(manager, 1, 2, 3)
    twin = copy.copy(seq)
    twin.block_table = seq.block_table[:]
    append(manager, seq, 4)
    sharer = allocated(manager, 1, 2, 5)
    manager.deallocate(seq)
    assert (seq.block_table, seq.num_cached_tokens) == ([], 0)
    for gone in (seq, twin):
        with pytest.raises(SequenceStateError, match="has no blocks here"):
            manager.deallocate(gone)
    assert [manager.blocks[block].ref_count for block in sharer.block_table] == [1, 1]
    assert set(manager.used_block_ids) == set(sharer.block_table)


def test_a_hit_does_not_search_the_free_list() -> None:
    """A cached block lies at the far end of the free list. The original finds it there in time proportional to it."""

    def fastest_hit(num_blocks: int) -> float:
        manager = BlockManager(num_blocks, 1)
        times = []
        for token in range(50):
            seq = NanoSequence([1, token], 1)
            start = perf_counter()
            manager.allocate(seq)
            times.append(perf_counter() - start)
            assert seq.num_cached_tokens == (1 if token else 0)
            grow(seq, 0)
            manager.deallocate(seq)
        return min(times)

    assert fastest_hit(200_000) < 10 * fastest_hit(200)  # the original: about 1000


def test_block_size_belongs_to_the_manager() -> None:
    """The sequence's own, in nano-vllm an attribute of its class, is another engine's business."""
    manager = BlockManager(8, 4)
    seq = NanoSequence(list(range(10)), block_size=256)
    manager.allocate(seq)
    assert seq.block_table == [0, 1, 2]
    append(manager, seq, 10, 11, 12)
    assert seq.block_table == [0, 1, 2, 3]


def test_checks_do_not_vanish_under_optimisation() -> None:
    script = """
from kvproof.allocator import KvproofError
from kvproof.allocator.compat import BlockManager
from kvproof.fuzz.nano import NanoSequence
manager = BlockManager(2, 1)
seq = NanoSequence([1], 1)
manager.allocate(seq)
for call in (manager.allocate, manager.can_allocate, manager.deallocate, manager.deallocate, manager.may_append):
    try:
        call(seq)
    except KvproofError as error:
        print(call.__name__, type(error).__name__)
"""
    run = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True)
    refusals = ["allocate", "can_allocate", "deallocate", "may_append"]
    assert run.stdout.splitlines() == [f"{name} SequenceStateError" for name in refusals]


def test_nothing_is_found_before_it_is_written() -> None:
    manager = BlockManager(8, 2)
    first, same_step = allocated(manager, 1, 2, 3), allocated(manager, 1, 2, 3)
    assert same_step.num_cached_tokens == 0
    grow(first, 4)  # sampled: the step has run
    assert allocated(manager, 1, 2, 3).num_cached_tokens == 2


def test_what_never_ran_is_not_found_after_it_was_freed() -> None:
    manager = BlockManager(8, 2)
    manager.deallocate(allocated(manager, 1, 2, 3))
    assert allocated(manager, 1, 2, 3).num_cached_tokens == 0


def test_one_token_is_left_to_compute() -> None:
    manager = BlockManager(8, 2)
    grow(allocated(manager, 1, 2, 3, 4), 5)
    assert allocated(manager, 1, 2, 3, 4).num_cached_tokens == 2
    assert allocated(manager, 1, 2, 3, 4, 5).num_cached_tokens == 4


def test_a_cached_prefix_counts_for_admission() -> None:
    """Three blocks of the prompt are in use by another sequence: it fits in the one block that is free."""
    manager = BlockManager(5, 1)
    grow(allocated(manager, 1, 2, 3, 4), 5)
    assert len(manager.free_block_ids) == 1
    assert allocated(manager, 1, 2, 3, 9).block_table == [0, 1, 2, 4]


def test_tokens_that_changed_are_not_published() -> None:
    manager = BlockManager(8, 2)
    seq = allocated(manager, 1, 2, 3)
    seq.token_ids[1] = 7
    grow(seq, 4)
    before = fingerprint(manager.manager)
    with pytest.raises(SequenceStateError, match=r"has lost or changed some of the 3 tokens that have slots$"):
        manager.may_append(seq)
    assert fingerprint(manager.manager) == before
    manager.deallocate(seq)
    assert not manager.hash_to_block_id


def test_whoever_did_not_ask_first_finds_as_much() -> None:
    manager = BlockManager(8, 2)
    grow(allocated(manager, 1, 2, 3), 4)
    seq = NanoSequence([1, 2, 3], 2)
    manager.allocate(seq)
    assert seq.num_cached_tokens == 2


def test_what_was_preempted_gets_slots_for_its_new_tokens_too() -> None:
    manager = BlockManager(4, 4)
    seq = allocated(manager, 1, 2, 3, 4)
    append(manager, seq, 5)
    manager.deallocate(seq)
    assert manager.can_allocate(seq)
    manager.allocate(seq)
    assert len(seq.block_table) == 2


def test_a_block_that_others_publish_may_have_been_filled_token_by_token() -> None:
    manager = BlockManager(8, 4)
    seq = allocated(manager, 0)
    for token in (1, 2, 3):
        append(manager, seq, token)
    grow(seq, 4)
    assert allocated(manager, 0, 1, 2, 3, 9).num_cached_tokens == 4


def test_the_allocator_hears_of_full_blocks_and_of_each_question_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = BlockManager(8, 4)
    calls: list[str] = []
    for name in ("sequence", "commit"):
        method = getattr(manager.manager, name)

        def counted(*args: object, name: str = name, method: Callable[..., object] = method) -> object:
            calls.append(name)
            return method(*args)

        monkeypatch.setattr(manager.manager, name, counted)
    seq = NanoSequence([0], 4)
    for _ in range(3):
        assert manager.can_allocate(seq)
    manager.allocate(seq)
    assert calls == ["sequence"]
    for token in range(1, 13):
        append(manager, seq, token)
        assert calls == ["sequence"] + ["commit"] * (token // 4)


# ---- the interface

SIGNATURES = {
    "__init__": "(self, num_blocks, block_size)",
    "compute_hash": "(token_ids, prefix=-1)",  # a class method
    "can_allocate": "(self, seq)",
    "allocate": "(self, seq)",
    "can_append": "(self, seq)",
    "may_append": "(self, seq)",
    "deallocate": "(self, seq)",
}


def test_signatures() -> None:
    public = {name for name, value in vars(BlockManager).items() if callable(value) or isinstance(value, classmethod)}
    assert {name for name in public if name == "__init__" or not name.startswith("_")} == set(SIGNATURES)
    for name, expected in SIGNATURES.items():
        signature = inspect.signature(getattr(BlockManager, name))
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        assert str(inspect.Signature(bare)) == expected, name


def test_hashes_are_those_of_the_original() -> None:
    """Values that nano-vllm-fork 20260210 computes."""
    first = BlockManager.compute_hash([1, 2, 3, 4])
    assert first == 8356527653647720045
    assert BlockManager.compute_hash([5, 2**31 - 1, 0, 7], first) == 18149045377158898977
    assert BlockManager.compute_hash([151643]) == 16020265355438487932
    manager = BlockManager(2, 4)
    append(manager, allocated(manager, 1, 2, 3, 4), 5)
    assert manager.blocks[0].hash == first


def test_views_are_live() -> None:
    manager = BlockManager(3, 2)
    blocks, free, used = manager.blocks, manager.free_block_ids, manager.used_block_ids
    hashes = manager.hash_to_block_id
    assert (len(blocks), list(free), set(used), dict(hashes)) == (3, [0, 1, 2], set(), {})
    seq = allocated(manager, 1, 2, 3)
    assert (len(free), free[0], 2 in free, 0 in free) == (1, 2, True, False)
    assert (len(used), 0 in used, 2 in used, 9 in used, used & {0, 2}) == (2, True, False, False, {0})
    assert [block.ref_count for block in blocks] == [1, 1, 0]
    assert (blocks[0].block_id, blocks[0].hash, blocks[0].token_ids) == (0, -1, [])
    append(manager, seq, 4)
    hash = BlockManager.compute_hash([1, 2])
    assert (blocks[0].hash, blocks[0].token_ids, dict(hashes)) == (hash, [1, 2], {hash: 0})
    assert hash + 1 not in hashes
    manager.deallocate(seq)
    assert (list(free), len(used), dict(hashes)) == ([1, 2, 0], 0, {hash: 0})
    assert repr(free) == "FreeBlocks([1, 2, 0])"


def test_views_are_read_only() -> None:
    manager = BlockManager(2, 1)
    assert isinstance(manager.blocks, Sequence)
    assert isinstance(manager.free_block_ids, Sequence)
    assert isinstance(manager.used_block_ids, Set)
    assert isinstance(manager.hash_to_block_id, Mapping)
    for name in ("blocks", "free_block_ids", "used_block_ids", "hash_to_block_id"):
        view = getattr(manager, name)
        assert not {"append", "popleft", "add", "discard", "remove", "pop", "clear", "update"} & set(dir(view))
        with pytest.raises(AttributeError):
            setattr(manager, name, view)
        with pytest.raises(TypeError):
            view[0] = 0
    for field in ("block_id", "ref_count", "hash", "token_ids"):
        with pytest.raises(AttributeError):
            setattr(manager.blocks[0], field, 0)


@pytest.mark.parametrize(
    ("num_tokens", "token_ids", "message"),
    [
        (2, [1], "num_tokens is 2, and there are 1 token_ids"),
        (0, [], "a sequence needs at least one token"),
        (1, [-1], "-1 is no token id, must be an integer from 0 to 2147483647"),
    ],
)
def test_what_is_no_sequence_is_refused(num_tokens: int, token_ids: list[int], message: str) -> None:
    manager = BlockManager(2, 1)
    seq = NanoSequence(token_ids, 1)
    seq.num_tokens = num_tokens
    for call in (manager.can_allocate, manager.allocate):
        with pytest.raises(InvalidArgument, match=f"^{message}$"):
            call(seq)
    assert not manager.used_block_ids


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 1), (1, 0)])
def test_bounds(num_blocks: int, block_size: int) -> None:
    with pytest.raises(InvalidArgument, match="is 0, must be an integer from 1"):
        BlockManager(num_blocks, block_size)
