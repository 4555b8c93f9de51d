"""Batch metadata: built right, and refused when any rule is broken."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvproof.attention import BatchPlan, CacheSpec, InvalidBatch
from kvproof.attention.plan import ARRAYS

BLOCK_SIZE = 4


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cache(block_size: int = BLOCK_SIZE, num_blocks: int = 10) -> CacheSpec:
    return CacheSpec(
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=1,
        dtype="float32",
        num_blocks=num_blocks,
        block_size=block_size,
    )


def build(rows: list[tuple[list[int], int, int]], block_size: int = BLOCK_SIZE) -> BatchPlan:
    """The plan of rows given as (table, seq_len, query_len)."""
    tables, seq_lens, query_lens = zip(*rows, strict=True)
    return BatchPlan.build([array("i", table) for table in tables], seq_lens, query_lens, block_size)


# Two decodes that share block 5 read-only, a chunk of two tokens after a context of four, an empty row; the first
# and third tables are longer than needed.
ROWS = [([5, 1, 9], 7, 1), ([5, 2, 8], 9, 1), ([3, 4, 7], 6, 2), ([], 0, 0)]


def test_build_writes_the_metadata_of_every_row() -> None:
    plan = build(ROWS)
    expected = {
        "qo_indptr": [0, 1, 2, 4, 4],
        "kv_indptr": [0, 2, 5, 7, 7],
        "kv_indices": [5, 1, 5, 2, 8, 3, 4],
        "kv_last_page_len": [3, 1, 2, 0],
        "slot_mapping": [1 * 4 + 2, 8 * 4 + 0, 4 * 4 + 0, 4 * 4 + 1],
        "positions": [6, 8, 4, 5],
        "seq_lens": [7, 9, 6, 0],
    }
    assert {name: getattr(plan, name).tolist() for name in ARRAYS} == expected
    assert (plan.num_decodes, plan.num_rows, plan.num_tokens) == (2, 4, 4)
    plan.validate(cache())


def test_build_keeps_no_hold_on_the_tables() -> None:
    table = array("i", [3, 1])
    plan = BatchPlan.build([table], [8], [1], BLOCK_SIZE)
    table.append(2)
    table[0] = 7
    assert plan.kv_indices.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("rows", "rule", "words"),
    [
        ([([3], 5, 1)], "seq-len", ["row 0", "2 blocks", "has 1"]),
        ([([3], 3, 4)], "query-len", ["row 0", "4", "3"]),
        ([([3], 3, -1)], "query-len", ["row 0", "-1"]),
        ([([3], -1, -1)], "query-len", ["row 0", "-1"]),
        ([([3], 3, 0)], "empty-row", ["row 0", "query_len 0", "seq_len 3"]),
        ([([3], 2, 2), ([4], 3, 1)], "decodes-first", ["row 0", "query_len 2"]),
        ([([], 0, 0), ([4], 3, 1)], "decodes-first", ["row 0", "query_len 0"]),
    ],
)
def test_build_refuses_rows_it_cannot_describe(rows: Any, rule: str, words: list[str]) -> None:
    with pytest.raises(InvalidBatch) as refusal:
        build(rows)
    assert refusal.value.rule == rule
    assert [word for word in words if word not in str(refusal.value)] == []


def test_build_refuses_no_rows_and_lengths_that_disagree() -> None:
    for seq_lens in ([], [3]):
        with pytest.raises(InvalidBatch, match=r"^lengths: "):
            BatchPlan.build([], seq_lens, [], BLOCK_SIZE)


@st.composite
def plans(draw: st.DrawFn) -> tuple[BatchPlan, CacheSpec]:
    """A valid plan whose rows may share the blocks of a common prefix that none of them writes."""
    block_size = draw(st.integers(1, 5))
    shape = st.tuples(st.integers(0, 13), st.integers(1, 6))
    contexts = sorted(draw(st.lists(shape, max_size=6)), key=lambda row: row[1] != 1)
    blocks = iter(draw(st.permutations(range(200))))
    shared = [next(blocks) for _ in range(draw(st.integers(0, 2)))]
    rows: list[tuple[list[int], int, int]] = []
    for context, query in contexts:
        prefix = shared[: context // block_size]
        needed = -(-(context + query) // block_size)
        spare = draw(st.integers(0, 1))
        rows.append((prefix + [next(blocks) for _ in range(needed + spare - len(prefix))], context + query, query))
    rows += [([], 0, 0)] * draw(st.integers(0 if rows else 1, 2))
    return build(rows, block_size), cache(block_size, num_blocks=200)


@settings(max_examples=150, deadline=None)
@given(plans())
def test_build_makes_valid_plans(case: tuple[BatchPlan, CacheSpec]) -> None:
    plan, spec = case
    plan.validate(spec)
    slots = []
    for row in range(plan.num_rows):
        blocks = plan.kv_indices[plan.kv_indptr[row] : plan.kv_indptr[row + 1]].tolist()
        seq_len, query_len = int(plan.seq_lens[row]), int(plan.qo_indptr[row + 1] - plan.qo_indptr[row])
        every_slot = [block * spec.block_size + offset for block in blocks for offset in range(spec.block_size)]
        slots += every_slot[seq_len - query_len : seq_len]
    assert plan.slot_mapping.tolist() == slots
    assert len(set(slots)) == len(slots)


@settings(max_examples=300, deadline=None)
@given(plans(), st.data())
def test_a_change_to_any_number_is_refused(case: tuple[BatchPlan, CacheSpec], data: st.DataObject) -> None:
    """All arrays but kv_indices follow from the others, so there is no valid plan one number away."""
    plan, spec = case
    names = [name for name in ARRAYS if name != "kv_indices" and getattr(plan, name).numel()]
    name = data.draw(st.sampled_from(names), label="array")
    changed = getattr(plan, name).clone()
    changed[data.draw(st.integers(0, changed.numel() - 1), label="index")] += data.draw(
        st.integers(-30, 30).filter(bool), label="change"
    )
    with pytest.raises(InvalidBatch):
        replace(plan, **{name: changed}).validate(spec)


def edit(name: str, at: int, value: int) -> Callable[[BatchPlan], dict[str, Tensor]]:
    def change(plan: BatchPlan) -> dict[str, Tensor]:
        changed = getattr(plan, name).clone()
        changed[at] = value
        return {name: changed}

    return change


def put(**arrays: Any) -> Callable[[BatchPlan], dict[str, Any]]:
    return lambda _: arrays


CORRUPTIONS: list[tuple[str, Callable[[BatchPlan], dict[str, Any]], list[str]]] = [
    *(
        ("dtype", lambda plan, name=name: {name: getattr(plan, name).long()}, [name, "torch.int64"])  # type: ignore[misc]
        for name in ARRAYS
    ),
    ("device", lambda plan: {"kv_indices": plan.kv_indices.to("meta")}, ["kv_indices", "meta"]),
    ("contiguous", put(kv_indices=torch.zeros(14, dtype=torch.int32)[::2]), ["kv_indices", "(2,)"]),
    ("contiguous", put(seq_lens=ints(7, 9, 6, 0)[None]), ["seq_lens", "(1, 4)"]),
    ("lengths", put(seq_lens=ints(7, 9, 6)), ["3 seq_lens"]),
    ("lengths", put(kv_last_page_len=ints(3, 1, 2)), ["4 seq_lens", "and 3"]),
    ("lengths", put(kv_indptr=ints(0, 2, 5, 7)), ["5 kv_indptr", "4"]),
    ("lengths", put(slot_mapping=ints(6, 32, 16)), ["ends at 4", "3 slot_mapping"]),
    ("lengths", put(positions=ints(6, 8, 4, 5, 6)), ["ends at 4", "5 positions"]),
    (
        "lengths",
        put(
            num_decodes=0,
            qo_indptr=ints(0),
            kv_indptr=ints(0),
            **{name: ints() for name in ARRAYS if name not in ("qo_indptr", "kv_indptr")},
        ),
        ["0 rows"],
    ),
    ("indptr", edit("qo_indptr", 0, 1), ["qo_indptr", "starts at 1"]),
    ("indptr", edit("kv_indptr", 0, -1), ["kv_indptr", "starts at -1"]),
    ("indptr", edit("qo_indptr", 2, 0), ["qo_indptr", "row 1", "from 1 to 0"]),
    ("indptr", edit("kv_indptr", 3, 4), ["kv_indptr", "row 2", "from 5 to 4"]),
    ("indices-length", put(kv_indices=ints(5, 1, 5, 2, 8, 3)), ["7", "6"]),
    ("indices-length", put(kv_indices=ints(5, 1, 5, 2, 8, 3, 4, 6)), ["7", "8"]),
    ("block-range", edit("kv_indices", 3, 10), ["row 1", "block 10", "0 to 9"]),
    ("block-range", edit("kv_indices", 6, -1), ["row 2", "block -1"]),
    ("last-page-len", edit("kv_last_page_len", 1, 0), ["row 1", "kv_last_page_len 0", "1 to 4"]),
    ("last-page-len", edit("kv_last_page_len", 2, 5), ["row 2", "kv_last_page_len 5", "1 to 4"]),
    ("empty-row", edit("kv_last_page_len", 3, 1), ["row 3", "kv_last_page_len 1"]),
    ("empty-row", edit("seq_lens", 3, 4), ["row 3", "seq_len 4"]),
    (
        "empty-row",
        put(
            qo_indptr=ints(0, 1, 2, 4, 6),
            seq_lens=ints(7, 9, 6, 2),
            positions=ints(6, 8, 4, 5, 0, 1),
            slot_mapping=ints(6, 32, 16, 17, 0, 1),
        ),
        ["row 3 has no blocks", "seq_len 2"],
    ),
    ("empty-row", put(qo_indptr=ints(0, 1, 2, 2, 2), positions=ints(6, 8), slot_mapping=ints(6, 32)), ["row 2"]),
    ("seq-len", edit("seq_lens", 0, 8), ["row 0", "seq_len 8", "hold 7"]),
    ("seq-len", edit("kv_last_page_len", 2, 3), ["row 2", "seq_len 6", "hold 7"]),
    (
        "query-len",
        put(qo_indptr=ints(0, 1, 2, 9, 9), positions=torch.zeros(9).int(), slot_mapping=torch.zeros(9).int()),
        ["row 2", "query_len 7", "6"],
    ),
    ("decodes-first", put(num_decodes=1), ["num_decodes is 1", "2 rows"]),
    ("decodes-first", put(num_decodes=3), ["num_decodes is 3", "2 rows"]),
    ("decodes-first", put(qo_indptr=ints(0, 2, 3, 4, 4)), ["row 0", "query_len 2"]),
    ("positions", edit("positions", 1, 7), ["row 1", "token 1", "position 7", "8"]),
    ("positions", put(positions=ints(6, 8, 5, 4)), ["row 2", "token 2", "position 5"]),
    ("slot-mapping", edit("slot_mapping", 0, 5), ["row 0", "slot 5", "6"]),
    ("slot-mapping", edit("slot_mapping", 3, -1), ["row 2", "slot -1", "17"]),
    ("slot-mapping", edit("slot_mapping", 3, 16), ["row 2", "slot 16", "17"]),
    ("slot-mapping", edit("kv_indices", 4, 6), ["row 1", "slot 32", "24"]),
]


@pytest.mark.parametrize(
    ("rule", "change", "words"), CORRUPTIONS, ids=[f"{r}-{i}" for i, (r, *_) in enumerate(CORRUPTIONS)]
)
def test_a_broken_rule_is_refused_by_name(rule: str, change: Any, words: list[str]) -> None:
    plan = build(ROWS)
    broken = replace(plan, **change(plan))
    with pytest.raises(InvalidBatch) as refusal:
        broken.validate(cache())
    assert refusal.value.rule == rule
    assert [word for word in words if word not in str(refusal.value)] == []
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("rows", "rule", "words"),
    [
        ([([5, 5], 7, 1)], "block-repeated", ["row 0", "block 5"]),
        ([([2, 1], 7, 1), ([3, 4, 3], 11, 3)], "block-repeated", ["row 1", "block 3"]),
        # Both write block 5; one writes what the other reads; a shared prefix that a long chunk writes into.
        ([([5], 3, 1), ([5], 3, 1)], "block-shared", ["row 0", "row 1", "block 5"]),
        ([([1, 5], 7, 1), ([5, 2], 7, 1)], "block-shared", ["row 0 writes block 5", "row 1"]),
        ([([5, 2], 7, 1), ([1, 5], 7, 1)], "block-shared", ["row 1 writes block 5", "row 0"]),
        ([([5, 2], 7, 1), ([5, 1], 8, 5)], "block-shared", ["row 1 writes block 5", "row 0"]),
        ([([5, 2], 7, 1), ([5, 3], 7, 1), ([5], 4, 2)], "block-shared", ["row 2 writes block 5", "row"]),
    ],
)
def test_blocks_have_one_owner_while_they_are_written(rows: Any, rule: str, words: list[str]) -> None:
    with pytest.raises(InvalidBatch) as refusal:
        build(rows).validate(cache())
    assert refusal.value.rule == rule
    assert [word for word in words if word not in str(refusal.value)] == []


def test_a_batch_of_more_slots_than_32_bits_count_is_refused() -> None:
    """Three sequences that share all but their last block, of a cache with fewer than 2^31 slots."""
    size = 2**22
    rows = [([*range(400), 400 + row], 400 * size + 1, 1) for row in range(3)]
    spec = cache(size, 410)
    build(rows[:2], size).validate(spec)
    with pytest.raises(InvalidBatch, match=r"^indices-length: kv_indices names 5045747712 slots; .* below 4294967296$"):
        build(rows, size).validate(spec)


def test_every_array_is_checked() -> None:
    assert {field.name for field in fields(BatchPlan)} - {"num_decodes", "num_padding"} == set(ARRAYS)


DECODES = [([5, 1], 7, 1), ([5, 2, 8], 9, 1)]


def test_padding_rows_are_decodes_of_one_token_in_the_null_block() -> None:
    plan = build(DECODES).pad(4)
    expected = {
        "qo_indptr": [0, 1, 2, 3, 4],
        "kv_indptr": [0, 2, 5, 6, 7],
        "kv_indices": [5, 1, 5, 2, 8, 0, 0],
        "kv_last_page_len": [3, 1, 1, 1],
        "slot_mapping": [1 * 4 + 2, 8 * 4 + 0, 0, 0],
        "positions": [6, 8, 0, 0],
        "seq_lens": [7, 9, 1, 1],
    }
    assert {name: getattr(plan, name).tolist() for name in ARRAYS} == expected
    assert (plan.num_decodes, plan.num_rows, plan.num_tokens, plan.num_padding) == (4, 4, 4, 2)
    plan.validate(cache())
    build(DECODES).pad(2).validate(cache())


@pytest.mark.parametrize(
    ("plan", "num_rows", "words"),
    [
        (build(DECODES), 1, "2 rows, 2 of them decodes and 0 padding, can't be padded to 1"),
        (build(DECODES).pad(3), 4, "3 rows, 3 of them decodes and 1 padding"),
        (build(ROWS), 8, "4 rows, 2 of them decodes"),
        (build([*DECODES, ([], 0, 0)]), 4, "3 rows, 2 of them decodes"),
    ],
)
def test_only_a_batch_of_decodes_is_padded_and_once(plan: BatchPlan, num_rows: int, words: str) -> None:
    with pytest.raises(InvalidBatch, match=f"^padding: {words}"):
        plan.pad(num_rows)


@pytest.mark.parametrize(
    ("plan", "change", "rule", "words"),
    [
        (build([([0, 1], 7, 1)]).pad(2), put(), "padding", "row 0 is not padding and names block 0, which padding"),
        (build([([3], 1, 1), ([0], 1, 1)]).pad(3), put(), "padding", "row 1 is not padding and names block 0"),
        (build([([3], 1, 1), ([4], 1, 1)]), put(num_padding=1), "padding", "row 1 is padding and names block 4, not 0"),
        (build([([3], 1, 1), ([0], 3, 1)]), put(num_padding=1), "padding", "row 1 is padding and has seq_len 3; it"),
        (build(DECODES), put(num_padding=3), "padding", "num_padding is 3; there are 2 rows, 2 of them decodes"),
        (build(DECODES), put(num_padding=-1), "padding", "num_padding is -1"),
        (build(ROWS), put(num_padding=1), "padding", "num_padding is 1; there are 4 rows, 2 of them decodes"),
        # What counts as no padding is held to the rules of every row.
        (build(DECODES).pad(4), put(num_padding=0), "block-shared", "row 2 writes block 0, which row 3 names too"),
        (build(DECODES).pad(4), put(num_padding=1), "padding", "row 2 is not padding and names block 0"),
        (build([([3], 1, 1), ([3], 2, 1)]).pad(4), put(), "block-shared", "row 0 writes block 3, which row 1 names"),
        (build(DECODES).pad(4), edit("slot_mapping", 3, 1), "slot-mapping", "row 3, token 3 has slot 1"),
        (build(DECODES).pad(4), edit("kv_indices", 6, 7), "slot-mapping", "row 3"),
    ],
)
def test_padding_touches_the_null_block_alone_and_it_alone_does(
    plan: BatchPlan, change: Any, rule: str, words: str
) -> None:
    with pytest.raises(InvalidBatch, match=f"^{rule}: .*{words}"):
        replace(plan, **change(plan)).validate(cache())


@pytest.mark.parametrize(
    ("window", "rows", "rule"),
    [
        # Positions 0 to 8 - window are hidden from the decode at 8: blocks 0 and 1 of it, and of the chunk from 8 on.
        (1, [([0, 0, 3], 9, 1), ([0, 0, 4], 12, 4)], None),
        (1, [([0, 7, 3], 9, 1), ([5, 0, 4], 12, 4)], None),
        (2, [([0, 1, 3], 9, 1), ([0, 2, 4], 12, 4)], None),
        (2, [([0, 0, 3], 9, 1)], "block-repeated"),
        (2, [([0, 0, 0, 3], 13, 1)], "block-repeated"),
        (2, [([9, 0, 3], 9, 1), ([5, 0], 8, 4)], "block-shared"),
        (None, [([0, 0, 3], 9, 1)], "block-repeated"),
        (1, [([0, 6, 6, 3], 13, 1)], "block-repeated"),
    ],
)
def test_blocks_that_a_window_has_left_may_be_the_null_block(window: int | None, rows: Any, rule: str | None) -> None:
    spec = CacheSpec(**(cache().model_dump() | {"window": window}))
    if rule is None:
        build(rows).validate(spec)
    else:
        with pytest.raises(InvalidBatch, match=f"^{rule}: "):
            build(rows).validate(spec)
