"""Failures that other engines had, each as its smallest scenario on our allocator.

A test's name begins with the row it restates; its docstring names the report. Rows of forks, pins, steps in flight and
media are in test_shared_blocks.py, that of exported identities (P10) in test_events.py, those of the scheduler in
test_engine.py, those of batch metadata in test_attention_plan.py, and that of buffers used again too early (M4) in
test_flashinfer_faults.py.
"""

from __future__ import annotations

import itertools
import random

import pytest

from kvproof.allocator import (
    Admission,
    BlockManager,
    BlockPool,
    BlockState,
    IllegalTransition,
    Merge,
    Namespace,
    Sequence,
    SequenceStateError,
)
from kvproof.allocator.hashing import SHARED
from kvproof.fuzz.machines.harness import NewestFirst, fingerprint, weakened


def admitted(manager: BlockManager, tokens: list[int], namespace: Namespace = SHARED) -> Sequence:
    seq = manager.sequence(tokens, namespace=namespace)
    assert manager.admit(seq) is Admission.NOW
    return seq


def computed(manager: BlockManager, tokens: list[int], namespace: Namespace = SHARED) -> Sequence:
    """Admitted, and the KV of all its tokens written."""
    seq = admitted(manager, tokens, namespace)
    manager.commit(seq, len(seq) - seq.num_computed)
    return seq


def cached(manager: BlockManager, tokens: list[int], namespace: Namespace = SHARED) -> list[int]:
    """Computed and released again: the blocks that held it."""
    seq = computed(manager, tokens, namespace)
    table = list(seq.block_table)
    manager.release(seq)
    return table


def found(manager: BlockManager, tokens: list[int], namespace: Namespace = SHARED) -> int:
    """Tokens of `tokens` that can be found; one more token keeps the last block from being held back."""
    return manager.match(manager.sequence([*tokens, 0], namespace=namespace))


# ---- lifetime


def test_l1_a_free_hit_is_consumed() -> None:
    """vllm#11565: 5 free blocks, 2 of them my hits, 4 more needed: touched before the check, then refused."""
    manager = BlockManager(6, 2)
    cached(manager, [1, 2, 3, 4])
    other = admitted(manager, [9])
    seq = manager.sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert (manager.num_free, manager.match(seq)) == (5, 4)
    before = fingerprint(manager)
    assert manager.admit(seq) is manager.can_admit(seq) is Admission.LATER
    assert fingerprint(manager) == before
    manager.release(other)
    assert manager.admit(seq) is Admission.NOW
    assert (manager.num_free, seq.num_cached) == (0, 4)


def test_l2_second_release_of_a_block() -> None:
    """vllm#42571, #42612: the same block is freed twice."""
    pool = BlockPool(2)
    (block,) = pool.take()
    pool.release(block)
    with pytest.raises(IllegalTransition, match=f"block {block} is free"):
        pool.release(block)
    assert (pool.refs(block), pool.num_free) == (0, 2)


def test_l2_second_release_of_a_sequence() -> None:
    """vllm#42571, #42612: a sequence is freed twice, here one whose block another one shares."""
    manager = BlockManager(4, 2)
    first, second = computed(manager, [1, 2, 3]), computed(manager, [1, 2, 4])
    shared = first.block_table[0]
    assert (second.block_table[0], manager.pool.refs(shared)) == (shared, 2)
    manager.release(first)
    before = fingerprint(manager)
    with pytest.raises(SequenceStateError, match="is not admitted"):
        manager.release(first)
    assert fingerprint(manager) == before
    assert manager.pool.refs(shared) == 1


@pytest.mark.parametrize("late", ["commit", "reserve", "release"])
def test_l3_late_output_after_abort(late: str) -> None:
    """vllm#33377: abort, then the late output of the same step frees again."""
    manager = BlockManager(4, 2)
    seq = admitted(manager, [1, 2, 3])
    manager.release(seq)
    other = admitted(manager, [4, 5, 6])
    seq.append(7)  # its last sampled token: known, but without a slot
    before = fingerprint(manager)
    with pytest.raises(SequenceStateError, match="is not admitted"):
        getattr(manager, late)(seq)
    assert fingerprint(manager) == before
    assert list(other.block_table) == [0, 1]  # the aborted one's, in good hands
    assert manager.admit(seq) is Admission.NOW  # an abort is no ban
    manager.release(seq)


def test_l5_duplicate_freed_and_table_rewritten_at_once() -> None:
    """mini-sglang#142: the second of two equal prompts frees its duplicate blocks, and its table still names them."""
    manager = BlockManager(6, 2)
    first, second = admitted(manager, [1, 2, 3, 4, 5]), admitted(manager, [1, 2, 3, 4, 5])
    assert (list(first.block_table), list(second.block_table)) == ([0, 1, 2], [3, 4, 5])
    assert manager.commit(first, 5) == []
    assert manager.commit(second, 5) == [Merge(0, 3, 0), Merge(1, 4, 1)]
    assert list(second.block_table) == [0, 1, 5]
    assert [manager.pool.refs(block) for block in range(6)] == [2, 2, 1, 0, 0, 1]
    third = admitted(manager, [8, 8, 8])
    assert set(third.block_table) == {3, 4}
    manager.check()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("merge", [True, False])
def test_l8_free_list_is_a_set(merge: bool, order: tuple[int, ...]) -> None:
    """kvcached#402, dynamo#13398: a block that occurs twice among the freed is queued twice."""
    manager = BlockManager(8, 1, merge_duplicates=merge)
    seqs = [admitted(manager, [1, 2]) for _ in range(2)]
    for seq in seqs:
        manager.commit(seq, 2)
    seqs.append(computed(manager, [1, 2, 3]))  # shares whichever copies are found
    for i in order:
        manager.release(seqs[i])
    empty, rest = manager.pool.free_lists()
    assert sorted(empty + rest) == list(range(8))
    assert sorted(manager.pool.take(8)) == list(range(8))


def test_l9_no_half_operations() -> None:
    """nano-vllm: in a pool of 2 a 3-block sequence fails at its third block and keeps two."""
    manager = BlockManager(2, 1)
    seq = admitted(manager, [1])
    other = manager.sequence([2, 3, 4])
    before = fingerprint(manager)
    assert manager.admit(other) is Admission.NEVER
    assert manager.reserve(seq, 3) is False
    with pytest.raises(IllegalTransition, match="cannot take 2 blocks, 1 are free"):
        manager.pool.take(2)
    assert fingerprint(manager) == before
    assert manager.reserve(seq, 2) is True


def test_l10_a_revived_block_counts_each_owner_once() -> None:
    """sglang#13483, #29310: a cached block is revived by two owners in one insert."""
    manager = BlockManager(4, 2)
    block = cached(manager, [1, 2])[0]
    assert manager.pool.state(block) is BlockState.CACHED
    first, second = admitted(manager, [1, 2, 3]), admitted(manager, [1, 2, 4])
    assert first.block_table[0] == second.block_table[0] == block
    assert (manager.pool.refs(block), manager.num_used) == (2, 3)
    manager.release(first)
    assert (manager.pool.refs(block), manager.num_free) == (1, 2)
    assert block not in manager.pool.take(2)
    manager.release(second)
    assert (manager.pool.state(block), manager.num_free) == (BlockState.CACHED, 2)


# ---- wrong hits


@pytest.mark.parametrize("bits", [0, 1, 4, 8, 12])
def test_p1_own_tokens_match_and_ancestry_does_not(bits: int) -> None:
    """nano-vllm, vllm#8229, GHSA-rm76-4mrf-v9r8: with a short hash another sequence's KV is served."""
    manager = BlockManager(8, 2, hash_block=weakened(bits))
    cached(manager, [1, 1, 5, 5])
    assert found(manager, [2, 2, 5, 5]) == 0
    blocks = cached(manager, [2, 2, 5, 5])
    seq = admitted(manager, [2, 2, 5, 5, 0])
    assert list(seq.block_table[:2]) == blocks
    assert found(manager, [1, 1, 5, 5]) == 4


@pytest.mark.parametrize("bits", [0, 1, 4, 8, 12, 64])
def test_p1_hits_are_exactly_the_longest_common_prefix(bits: int) -> None:
    """The whole family: whatever the hash, what is found is what a comparison of all the tokens finds."""
    draw = random.Random(bits)
    manager = BlockManager(1000, 2, hash_block=weakened(bits))
    known: set[tuple[int, ...]] = set()
    for _ in range(120):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 16))]
        expected = max(stop for stop in range(0, len(tokens), 2) if not stop or tuple(tokens[:stop]) in known)
        seq = computed(manager, tokens)
        assert seq.num_cached == expected
        known.update(tuple(tokens[:stop]) for stop in range(2, len(tokens) + 1, 2))
        manager.release(seq)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Namespace(salt="X"), Namespace(adapter="X")),
        (Namespace(salt="X"), Namespace()),
        (Namespace(salt=""), Namespace()),
        (Namespace(salt="ab", adapter="c"), Namespace(salt="a", adapter="bc")),
        (Namespace(salt="X", adapter="X"), Namespace(salt="X")),
    ],
)
def test_p2_namespaces_are_not_strings(one: Namespace, other: Namespace) -> None:
    """vllm#44701, sglang#24638: an adapter named X and a salt X give one key."""
    manager = BlockManager(8, 2)
    cached(manager, [1, 2, 3, 4], one)
    assert found(manager, [1, 2, 3, 4], one) == 4
    assert found(manager, [1, 2, 3, 4], other) == 0


def test_p3_an_adapter_is_its_content() -> None:
    """vllm#27211, #42125: an adapter is reloaded under the same name, with other weights."""
    manager = BlockManager(8, 2)
    cached(manager, [1, 2, 3, 4], Namespace(adapter="sql, sha256 8f3a"))
    assert found(manager, [1, 2, 3, 4], Namespace(adapter="sql, sha256 c01d")) == 0
    assert found(manager, [1, 2, 3, 4], Namespace(adapter="sql, sha256 8f3a")) == 4


@pytest.mark.parametrize(("written", "hit"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (5, 4)])
def test_p5_nothing_is_found_before_it_is_written(written: int, hit: int) -> None:
    """vllm#29387, nano-vllm#208: a request hits a block that another one of its step has not written yet."""
    manager = BlockManager(8, 2)
    first = admitted(manager, [1, 2, 3, 4, 5])
    manager.commit(first, written)
    assert admitted(manager, [1, 2, 3, 4, 5]).num_cached == hit


@pytest.mark.parametrize(("chunk", "hit"), [(1, 0), (3, 0), (4, 4), (5, 4), (11, 8)])
def test_p6_only_the_first_chunk_was_computed(chunk: int, hit: int) -> None:
    """TensorRT-LLM#12673, #15018, TGI#2489: freed after the first chunk of a chunked prefill, all of it cached."""
    manager = BlockManager(8, 4)
    prompt = list(range(12))
    seq = manager.sequence(prompt)
    assert manager.admit(seq, limit=chunk) is Admission.NOW
    manager.commit(seq, chunk)
    assert manager.reserve(seq, 12 - chunk) is True  # the next chunk has its slots, and is never written
    manager.release(seq)
    assert found(manager, prompt) == hit
    assert len(manager.pool.free_lists()[1]) == hit // 4


def test_p8_a_stale_answer_cannot_be_committed() -> None:
    """vllm#37076: A looks up, B takes the block, A allocates with the old answer."""
    manager = BlockManager(3, 2)
    cached(manager, [1, 2, 3, 4])
    first = manager.sequence([1, 2, 3, 4, 5])
    assert (manager.match(first), manager.can_admit(first)) == (4, Admission.NOW)
    second = admitted(manager, [7, 7, 7, 7, 7])
    assert manager.admit(first) is Admission.LATER
    manager.release(second)
    assert manager.admit(first) is Admission.NOW
    assert first.num_cached == 0


def test_p9_a_refilled_block_is_known_by_its_new_content_only() -> None:
    """nano-vllm#163: a block is refilled with other content, and the old mapping survives."""
    manager = BlockManager(1, 2)
    for tokens in ([1, 2], [3, 4], [1, 2]):
        assert cached(manager, tokens) == [0]
        assert {tuple(other): found(manager, other) for other in ([1, 2], [3, 4])} == {
            (1, 2): 2 * (tokens == [1, 2]),
            (3, 4): 2 * (tokens == [3, 4]),
        }


def test_p11_tenants_never_share() -> None:
    """vllm#17045: equal prompts under two salts; the second tenant is served as if it were alone."""
    manager = BlockManager(8, 2)
    prompt = [1, 2, 3, 4, 5]
    first = computed(manager, prompt, Namespace(salt="a"))
    second = admitted(manager, prompt, Namespace(salt="b"))
    assert second.num_cached == 0
    assert not set(first.block_table) & set(second.block_table)
    assert manager.commit(second, 5) == []  # nor does it learn of the first one by a merge
    assert found(manager, prompt[:4], Namespace(salt="a")) == found(manager, prompt[:4], Namespace(salt="b")) == 4


# ---- lost hits and wrong eviction


@pytest.mark.parametrize("survivor", [0, 1])
@pytest.mark.parametrize("merge", [True, False])
def test_e1_found_as_long_as_one_copy_lives(merge: bool, survivor: int) -> None:
    """nano-vllm#219, #243: of two equal prompts in one step one copy is evicted, and the live one can't be found."""
    manager = BlockManager(6, 2, merge_duplicates=merge)
    seqs = [admitted(manager, [1, 2, 3, 4]) for _ in range(2)]
    for seq in seqs:
        manager.commit(seq, 4)
    manager.release(seqs[1 - survivor])
    admitted(manager, [9] * 2 * manager.num_free)  # takes, and so evicts, all that is free
    assert found(manager, [1, 2, 3, 4]) == 4
    manager.check()


def test_e2_the_chain_continues_from_the_hit() -> None:
    """vllm#12415, #14073: after a 2-block hit the third block is hashed as if it were the first."""
    manager = BlockManager(8, 2)
    cached(manager, [1, 2, 3, 4])
    seq = computed(manager, [1, 2, 3, 4, 5])
    assert seq.num_cached == 4
    seq.append(6)
    assert manager.reserve(seq) is True
    manager.commit(seq)
    assert found(manager, [1, 2, 3, 4, 5, 6]) == 6
    assert found(manager, [5, 6]) == 0


def test_e3_least_recently_used_first_tail_before_head() -> None:
    """transformers: eviction takes the block that was freed last."""
    manager = BlockManager(6, 1)
    old, new = cached(manager, [1, 2]), cached(manager, [3, 4])
    assert manager.pool.free_lists()[1] == [old[1], old[0], new[1], new[0]]
    manager.release(admitted(manager, [1, 2, 5]))  # used again: now the newest
    assert manager.pool.free_lists()[1] == [new[1], new[0], old[1], old[0]]
    admitted(manager, [9, 9, 9])  # two contentless blocks, and one by eviction
    assert (found(manager, [1, 2]), found(manager, [3, 4])) == (2, 1)


def test_e4_useless_blocks_first() -> None:
    """nano-vllm, vllm#42656: freed blocks that were never published queue behind cached ones."""
    manager = BlockManager(4, 2)
    useful = cached(manager, [1, 2, 3, 4])
    useless = admitted(manager, [5, 6, 7, 8])
    blocks = set(useless.block_table)
    manager.release(useless)  # nothing of it was computed
    assert set(admitted(manager, [9, 9, 9]).block_table) == blocks
    assert found(manager, [1, 2, 3, 4]) == 4
    assert manager.pool.free_lists() == ([], useful[::-1])


@pytest.mark.parametrize("length", [2, 3, 5])
def test_e5_no_child_outlives_its_parent(length: int) -> None:
    """TensorRT-LLM#3735, #699: a parent is evicted while its children stay cached and unreachable."""
    manager = BlockManager(length, 1, policy=NewestFirst())  # evicts heads first, against all advice
    cached(manager, list(range(length)))
    assert len(manager.pool.free_lists()[1]) == length
    (taken,) = manager.pool.take()
    assert manager.pool.free_lists()[1] == []
    assert [manager.pool.state(block) for block in range(length) if block != taken] == [BlockState.FREE] * (length - 1)
    assert list(manager.index.nodes()) == []


def test_e5_lru_evicts_children_first() -> None:
    """The same with our own policy: the head of a sequence is the last of it to go."""
    manager = BlockManager(4, 1)
    cached(manager, [1, 2, 3, 4])
    left = []
    for _ in range(4):
        manager.pool.take()
        left.append(found(manager, [1, 2, 3, 4]))
    assert left == [3, 2, 1, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 6, 16, 17, 32, 33])
def test_e6_one_token_is_left_to_compute(size: int, length: int) -> None:
    """vllm#11186, nano-vllm#114, #144, #199: a prompt of whole blocks, all cached: no token left to compute."""
    manager = BlockManager(40, size)
    prompt = list(range(length))
    cached(manager, prompt)
    seq = admitted(manager, prompt)
    assert seq.num_cached == (length - 1) // size * size
    assert 1 <= length - seq.num_cached <= size


# ---- arithmetic at block boundaries


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_a1_every_token_has_a_slot_of_its_own(size: int) -> None:
    """nano-vllm: at block size 1 `len % size == 1` is never true, and KV is overwritten."""
    manager = BlockManager(40, size)
    seqs = [computed(manager, [i, i]) for i in range(2)]
    for _ in range(18):
        for seq in seqs:
            seq.append(7)
            assert manager.reserve(seq) is True
            manager.commit(seq)
    slots = {(seq.block_table[i // size], i % size) for seq in seqs for i in range(20)}
    assert len(slots) == 40
    assert [len(seq.block_table) for seq in seqs] == [-(-20 // size)] * 2


def test_a2_a_draft_crosses_a_boundary() -> None:
    """nano-vllm, sglang#7130, #26972: 16-token blocks, a draft of 5, of which 2 are accepted."""
    manager = BlockManager(4, 16)
    seq = computed(manager, [1] * 14)
    assert manager.reserve(seq, 6) is True  # the sampled token and its draft
    assert (seq.num_reserved, len(seq.block_table)) == (20, 2)
    seq.extend([2, 3, 4])
    manager.commit(seq, 3)
    assert (seq.num_computed, seq.num_reserved) == (17, 20)
    assert manager.reserve(seq, 3) is True  # the surplus is kept, and is what the next tokens use
    assert (seq.num_reserved, len(seq.block_table)) == (20, 2)
    assert manager.reserve(seq, 6) is True
    assert (seq.num_reserved, len(seq.block_table)) == (23, 2)
    manager.truncate(seq, 17)  # or it is given back
    assert (seq.num_reserved, len(seq.block_table)) == (17, 2)
    manager.release(seq)
    assert (manager.num_used, manager.num_free) == (0, 4)


@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 33])
def test_a2_several_tokens_at_once(size: int, n: int) -> None:
    """The family: any number of tokens over any number of boundaries, exact to the last free block."""
    manager = BlockManager(-(-(n + 3) // size), size)
    seq = computed(manager, [1, 2, 3])
    assert manager.reserve(seq, n) is True
    assert (len(seq.block_table), manager.num_free) == (manager.num_blocks, 0)
    rest = manager.num_blocks * size - 3
    assert manager.reserve(seq, rest) is True
    assert manager.reserve(seq, rest) is True, "asking twice is asking once"
    assert manager.reserve(seq, rest + 1) is False


def test_a4_tokens_and_blocks_are_not_the_same() -> None:
    """sglang#5081, #22495, FreeToken#367: one free block of 8 and two 2-token requests, admitted by tokens."""
    manager = BlockManager(1, 8)
    first, second = manager.sequence([1, 1]), manager.sequence([2, 2])
    assert [manager.can_admit(seq) for seq in (first, second)] == [Admission.NOW, Admission.NOW]
    assert [manager.admit(seq) for seq in (first, second)] == [Admission.NOW, Admission.LATER]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a4_the_exact_fit_is_admitted(size: int) -> None:
    """The family: for every length and every number of free blocks the question and the deed agree, to the token."""
    for used, length in itertools.product(range(4), range(1, 4 * size + 2)):
        manager = BlockManager(4, size)
        manager.pool.take(used)
        seq = manager.sequence([1] * length)
        if length > 4 * size:
            expected = Admission.NEVER
        else:
            expected = Admission.NOW if length <= (4 - used) * size else Admission.LATER
        assert manager.can_admit(seq) is manager.admit(seq) is expected


def test_a5_nothing_appended() -> None:
    """vllm#7380: an append of no tokens."""
    manager = BlockManager(2, 2)
    seq = computed(manager, [1, 2])
    other = computed(manager, [3, 4])
    assert manager.num_free == 0
    before = fingerprint(manager)
    seq.extend([])
    assert manager.reserve(seq, 0) is True
    assert manager.commit(seq, 0) == []
    assert fingerprint(manager) == before
    manager.release(other)


# ---- progress


def test_g1_what_can_never_fit_is_refused_at_admission() -> None:
    """nano-vllm#274, MinivLLM#94, vllm#39734: the only running sequence needs one block more than there are."""
    manager = BlockManager(2, 2)
    assert manager.admit(manager.sequence([1], max_length=5)) is Admission.NEVER
    assert manager.admit(manager.sequence([1] * 5)) is Admission.NEVER
    assert manager.admit(manager.sequence([1], max_length=4)) is Admission.NOW


def test_g1_an_undeclared_one_finds_out_and_the_engine_lives_on() -> None:
    """The same without a declared length: the answer comes at the boundary, and again at admission."""
    manager = BlockManager(2, 2)
    seq = computed(manager, [1, 2, 3, 4])
    seq.append(5)
    assert manager.reserve(seq) is False
    manager.release(seq)
    assert manager.can_admit(seq) is Admission.NEVER
    assert admitted(manager, [1, 2, 3, 4]).num_cached == 2


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_g1_whoever_is_admitted_alone_reaches_its_declared_end(size: int, caching: bool) -> None:
    """Invariant I12, in a pool full of other content."""
    manager = BlockManager(3, size, prefix_caching=caching)
    cached(manager, [9] * 3 * size)
    seq = manager.sequence([1], max_length=3 * size)
    assert manager.admit(seq) is Admission.NOW
    manager.commit(seq)
    while len(seq) < 3 * size:
        seq.append(1)
        assert manager.reserve(seq) is True
        manager.commit(seq)
    assert seq.num_computed == 3 * size
