"""How a step is cut into items for the matrix unit: any machine can look at that."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.attention import BatchPlan, CacheSpec
from kvproof.attention.tiled_plan import SPAN, Ints, Items, cut


class Step(NamedTuple):
    """What `cut` is given."""

    batch: BatchPlan
    starts: Ints
    ends: Ints
    block_size: int
    most: int
    least: int = 1
    threads: int = 1

    def cut(self) -> Items:
        indptr, batch = self.kv_indptr, self.batch
        return cut(
            *(batch.qo_indptr.numpy(), indptr, batch.kv_indices.numpy(), self.starts, self.ends),
            decodes=batch.num_decodes,
            block_size=self.block_size,
            threads=self.threads,
            least=self.least,
            most=self.most,
        )

    @property
    def kv_indptr(self) -> Ints:
        return self.batch.kv_indptr.numpy()

    @property
    def rows(self) -> list[int]:
        """Each token's row."""
        return np.repeat(np.arange(self.batch.num_rows), self.batch.qo_indptr.diff().numpy()).tolist()

    def spans(self, token: int) -> range:
        return range(self.starts[token] // SPAN, -(-self.ends[token] // SPAN))

    def blocks(self, row: int, start: int, end: int) -> list[int]:
        """Those of a row's positions."""
        size, first = self.block_size, int(self.kv_indptr[row])
        return self.batch.kv_indices[first + start // size : first + -(-end // size)].tolist()


def make_step(
    tables: list[array[int]], seq_lens: list[int], query_lens: list[int], block_size: int, most: int, window: int | None
) -> Step:
    batch = BatchPlan.build(tables, seq_lens, query_lens, block_size)
    shape = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_size": 1, "dtype": "bfloat16"}
    batch.validate(CacheSpec(**shape, num_blocks=2**20, block_size=block_size, window=window))
    ends = batch.positions.numpy() + np.int32(1)
    return Step(batch, np.maximum(ends - np.int32(window or 2**30), 0), ends, block_size, most)


LENGTHS = st.integers(1, 1100) | st.sampled_from([255, 256, 257, 511, 512, 513, 768, 1024])


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Decodes of which some begin as one before them does, prefills, and rows with nothing to do."""
    size = draw(st.sampled_from([1, 5, 16, 24, 64, 256, 300, 1024]))
    fresh = iter(range(2**20))
    tables: list[array[int]] = []
    seq_lens, query_lens = [], []
    for _ in range(draw(st.integers(0, 7))):
        length = draw(LENGTHS)
        begin = array("i")
        if tables and draw(st.booleans()):
            begin = draw(st.sampled_from(tables))[:-1][: draw(LENGTHS) // size]
        begin = begin[: (length - 1) // size]  # a row's last block is written, and nobody else's
        tables.append(begin + array("i", [next(fresh) for _ in range(-(-length // size) - len(begin))]))
        seq_lens.append(length)
        query_lens.append(1)
    for _ in range(draw(st.integers(0 if tables else 1, 2))):
        length = draw(st.just(0) | st.integers(2, 800))
        tables.append(array("i", [next(fresh) for _ in range(-(-length // size))]))
        seq_lens.append(length)
        query_lens.append(length and draw(st.integers(2, length)))
    window = draw(st.none() | st.sampled_from([1, 17, 256, 300, 600]))
    most = draw(st.sampled_from([1, 2, 3, 6, 96]))
    step = make_step(tables, seq_lens, query_lens, size, most, window)
    return step._replace(least=draw(st.integers(1, most)), threads=draw(st.integers(1, 8)))


@settings(max_examples=150)
@given(steps())
def test_every_span_that_a_token_sees_is_in_one_item(step: Step) -> None:
    items, members, _, num_parts = step.cut()
    seen: Counter[tuple[int, int]] = Counter()
    for first, count, first_span, end_span, part in items.tolist():
        assert 1 <= count <= step.most
        tokens = members[first : first + count].tolist()
        assert len(tokens) == count == len(set(tokens))
        assert part <= 0 or end_span == first_span + 1
        for token in tokens:
            mine = step.spans(token)
            within = [span for span in range(first_span, end_span) if span in mine]
            assert (part < 0) == (num_parts[token] == 0)
            assert within == list(mine) if part < 0 else within == list(range(first_span, end_span))
            seen.update((token, span) for span in within)
    assert seen == Counter((token, span) for token in range(len(step.ends)) for span in step.spans(token))


@settings(max_examples=150)
@given(steps())
def test_members_of_an_item_see_the_same_blocks(step: Step) -> None:
    """From the first position that one of them sees there to the last: the first one's are read for all."""
    items, members, _, _ = step.cut()
    for first, count, first_span, end_span, _ in items.tolist():
        tokens = members[first : first + count]
        reader = step.rows[tokens[0]]
        for token in tokens.tolist():
            start = max(int(step.starts[tokens].min()), first_span * SPAN)
            end = min(int(step.ends[token]), end_span * SPAN)
            assert step.blocks(step.rows[token], start, end) == step.blocks(reader, start, end)
            if step.rows[token] != reader:  # nor is there a position of one that another has not
                assert step.starts[token] <= start
                assert step.ends[token] >= end_span * SPAN


@settings(max_examples=150)
@given(steps())
def test_parts_are_counted_and_in_the_order_of_spans(step: Step) -> None:
    items, members, first_parts, num_parts = step.cut()
    kept: dict[int, list[int]] = {}
    for first, count, span, _, part in items.tolist():
        if part >= 0:
            for token in members[first : first + count].tolist():
                kept.setdefault(int(first_parts[token]) + part, []).append(span)
    assert sorted(kept) == list(range(int(num_parts.sum())))
    assert first_parts.tolist() == [int(num_parts[:token].sum()) for token in range(len(num_parts))]
    for token, count in enumerate(num_parts.tolist()):
        spans = [kept[part] for part in range(first_parts[token], first_parts[token] + count)]
        assert all(len(span) == 1 for span in spans)
        assert spans == sorted(spans)


@settings(max_examples=50)
@given(steps())
def test_arrays_are_as_c_reads_them(step: Step) -> None:
    for made in step.cut():
        assert made.dtype == np.int32
        assert made.flags.c_contiguous
    assert step.cut().items.shape[1:] == (5,)


def shared_items(step: Step) -> dict[tuple[int, int], list[list[int]]]:
    """The members of the items of several decodes, by the spans."""
    items, members, _, _ = step.cut()
    found: dict[tuple[int, int], list[list[int]]] = {}
    for first, count, *spans, part in items.tolist():
        if count > 1 and part >= 0:
            found.setdefault(tuple(spans), []).append(members[first : first + count].tolist())
    return found


def decodes(beginnings: list[list[int]], size: int = 16, most: int = 96, window: int | None = None) -> Step:
    """Rows that begin with these blocks, each with 200 tokens of its own behind them."""
    own = iter(range(1000, 2**20))
    tables = [array("i", begin + [next(own) for _ in range(-(-200 // size))]) for begin in beginnings]
    seq_lens = [len(begin) * size + 200 for begin in beginnings]
    return make_step(tables, seq_lens, [1] * len(tables), size, most, window)


def test_a_common_beginning_is_gone_through_once() -> None:
    """600 tokens of it are two spans, and the rest is each row's own."""
    step = decodes([list(range(600 // 8))] * 7 + [list(range(500, 575))], size=8)
    assert shared_items(step) == {(0, 2): [[*range(7)]]}
    assert len(step.cut().items) == 1 + 7 * 2 + 1


def test_threads_share_the_rows_of_a_common_beginning() -> None:
    step = decodes([list(range(16))] * 8, most=3)
    assert shared_items(step) == {(0, 1): [[0, 1, 2], [3, 4, 5], [6, 7]]}
    step = decodes([list(range(16))] * 8)._replace(threads=3)
    assert shared_items(step) == {(0, 1): [[0, 1, 2], [3, 4, 5], [6, 7]]}
    assert shared_items(step._replace(least=5)) == {(0, 1): [[0, 1, 2, 3, 4], [5, 6, 7]]}


def test_beginnings_may_part() -> None:
    """Three spans: all in the first, two and two in the second, two in the third."""
    root, left, right = list(range(16)), list(range(16, 32)), list(range(32, 48))
    step = decodes([root + left + list(range(48, 64)), root + right, root + left + list(range(48, 64)), root + right])
    assert shared_items(step) == {(0, 3): [[0, 2]], (0, 2): [[1, 3]]}


def test_many_short_rows_are_whole_and_few_long_ones_in_parts() -> None:
    """A thread with nothing left to do helps with a long row. Parts cost memory: where all are busy there are none."""
    many = decodes([list(range(16 * row, 16 * row + 16)) for row in range(32)])._replace(threads=8)
    assert (many.cut().num_parts == 0).all()
    assert len(many.cut().items) == 32
    one = decodes([list(range(512))])._replace(threads=2)
    assert one.cut().num_parts.tolist() == [33]


@pytest.mark.parametrize("other", [0, 7, 15])
def test_one_other_block_and_a_span_is_not_shared(other: int) -> None:
    second = [block if place != other else 99 for place, block in enumerate(range(16))]
    assert shared_items(decodes([list(range(16)), second])) == {}


def test_a_span_is_shared_when_all_of_it_is_seen() -> None:
    """Blocks lie across its ends, a window begins within it, or a row ends there."""
    blocks = list(range(11))  # of 24 tokens: the eleventh holds the span's last
    assert shared_items(decodes([blocks] * 2, size=24)) == {(0, 1): [[0, 1]]}
    assert shared_items(decodes([blocks[:10]] * 2, size=24)) == {}
    step = decodes([list(range(32))] * 2, window=200 + 256)
    assert shared_items(step) == {(1, 2): [[0, 1]]}
    assert shared_items(decodes([list(range(32))] * 2, window=200 + 255)) == {}
