"""Attention on the matrix unit: right, the same bits in any step, and blind to what is not a row's."""

from __future__ import annotations

import ctypes
import mmap
import os
from array import array
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvproof.attention import BatchPlan, CacheSpec, Capabilities, tiled_kernel
from kvproof.attention.reference import ReferenceAttention
from kvproof.attention.tiled_kernel import TiledKernel
from kvproof.attention.torch_paged import TorchAttention
from kvproof.fuzz.conformance import attention_checks
from kvproof.fuzz.dense import dense

NAN = float("nan")


@pytest.fixture(scope="module", autouse=True)
def kernel(one_thread: None) -> None:
    if tiled_kernel.load() is None:
        pytest.skip("no matrix unit (Intel AMX) for bfloat16, or no compiler")


class Tiles(TorchAttention):
    """The torch backend, where it is the matrix unit's."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        assert isinstance(self._kernel, TiledKernel)
        self.kernel = self._kernel


class OnlyTiles(Tiles):
    """With nothing declared that is not the matrix unit's."""

    @classmethod
    def capabilities(cls) -> Capabilities:
        narrow = {"devices": {"cpu"}, "dtypes": {"bfloat16"}, "head_sizes": {32, 96}}
        return replace(super().capabilities(), **{name: frozenset(only) for name, only in narrow.items()})


test_it_conforms = attention_checks(OnlyTiles, examples=25)


def make_spec(**changes: Any) -> CacheSpec:
    fields: dict[str, Any] = {
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": "bfloat16",
        "num_blocks": 16,
        "block_size": 16,
    }
    return CacheSpec(**(fields | changes))


def make_kernel(spec: CacheSpec, cache: Tensor) -> TiledKernel:
    made = TiledKernel.create(spec, cache)
    assert made is not None
    return made


@pytest.mark.parametrize("changes", [{"head_size": 256}, {"head_size": 96}, {"num_heads": 192}, {"layout": "HND"}])
def test_what_it_is_for(changes: dict[str, Any]) -> None:
    assert isinstance(TorchAttention(make_spec(**changes))._kernel, TiledKernel)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "float32"}, {"dtype": "float16"}, {"head_size": 48}, {"head_size": 288}, {"num_heads": 194}],
)
def test_what_it_is_not_for(changes: dict[str, Any]) -> None:
    assert not isinstance(TorchAttention(make_spec(**changes))._kernel, TiledKernel)


# ---- any step


@dataclass(frozen=True)
class Row:
    """A sequence of which a step computes the last tokens.

    table  its blocks; those that a window has left may be block 0, which is nobody's
    q      [query_len, num_heads, head_size]
    k, v   [seq_len, num_kv_heads, head_size]
    """

    table: array[int]
    q: Tensor
    k: Tensor
    v: Tensor

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """How Hypothesis shows a row of a failing case: without its tensors."""
        printer.text(f"Row(seq_len={len(self.k)}, query_len={len(self.q)}, table={self.table.tolist()})")


@dataclass(frozen=True)
class Step:
    spec: CacheSpec
    rows: list[Row]
    seed: int

    def plan(self) -> BatchPlan:
        lengths = [len(row.k) for row in self.rows], [len(row.q) for row in self.rows]
        return BatchPlan.build([row.table for row in self.rows], *lengths, self.spec.block_size)

    def new(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the step's tokens."""
        q = torch.cat([row.q for row in self.rows])
        k, v = (torch.cat([x[-len(row.q) :] for row in self.rows for x in [getattr(row, name)]]) for name in "kv")
        return q, k, v

    def backend(self) -> Tiles:
        """Planned. What the step sees and does not write is in its cache, and NaN is everywhere else."""
        it = Tiles(self.spec)
        it.cache.fill_(NAN)
        size, window = self.spec.block_size, self.spec.window or 2**30
        for row in self.rows:
            context = len(row.k) - len(row.q)
            seen = torch.arange(max(0, context + 1 - window), context)
            where = torch.tensor(row.table)[seen // size], seen % size
            for cached, own in zip(it.kv(0), (row.k, row.v), strict=True):
                cached[where] = own[seen]
        it.plan(self.plan())
        return it


LENGTHS = st.integers(1, 40) | st.integers(200, 600) | st.sampled_from([256, 257, 512, 513, 770])


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Decodes, of which some have a beginning in common, and prefills."""
    kv_heads, group = draw(
        st.sampled_from([(1, 1), (2, 2), (3, 3), (1, 4), (2, 5), (1, 8), (9, 1), (5, 4), (1, 16), (1, 48), (1, 96)])
    )
    spec = make_spec(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_size=draw(st.sampled_from([32, 64, 96, 128, 256])),
        block_size=draw(st.sampled_from([1, 5, 15, 16, 24, 64, 300])),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        window=draw(st.none() | st.sampled_from([1, 17, 100, 256, 300])),
        soft_cap=draw(st.none() | st.just(2.0)),
        scale=draw(st.none() | st.just(0.3)),
    )
    size, seed = spec.block_size, draw(st.integers(0, 2**32 - 1))
    common = draw(st.sampled_from([0, 256, 530])) // size  # blocks
    decodes = draw(st.lists(st.tuples(LENGTHS, st.booleans()), max_size=5))
    prefills = draw(st.lists(st.tuples(st.just(0) | LENGTHS, st.integers(2, 40)), max_size=2, min_size=not decodes))
    seq_lens = [length + common * size * shares for length, shares in decodes]
    seq_lens += [context + query for context, query in prefills]
    query_lens = [1] * len(decodes) + [query for _, query in prefills]
    counts = [-(-length // size) for length in seq_lens]
    spec = spec.model_copy(update={"num_blocks": 1 + common + sum(counts)})

    generator = torch.Generator().manual_seed(seed)

    def values(count: int, heads: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(count, heads, spec.head_size, generator=generator) * factor).bfloat16()

    blocks = Random(seed).sample(range(1, spec.num_blocks), spec.num_blocks - 1)
    shared = array("i", [blocks.pop() for _ in range(common)])
    begin = [values(common * size, kv_heads) for _ in "kv"]
    sharpness = draw(st.sampled_from([0.1, 1.0, 4.0]))
    rows = []
    for row, (length, query, count) in enumerate(zip(seq_lens, query_lens, counts, strict=True)):
        shares = row < len(decodes) and decodes[row][1]
        table = shared[: common * shares]
        table += array("i", [blocks.pop() for _ in range(count - len(table))])
        k, v = (torch.cat((x, values(length - len(x), kv_heads))) for x in (x[: len(x) * shares] for x in begin))
        gone = max(0, length - query + 1 - (spec.window or length)) // size
        if draw(st.booleans()):
            table[:gone] = array("i", [0] * gone)
        rows.append(Row(table, values(query, spec.num_heads, sharpness), k, v))
    return Step(spec, rows, seed)


@settings(max_examples=80)
@given(steps())
def test_a_step_is_right(step: Step) -> None:
    """To what rounding may lose. There is NaN wherever the step has no business."""
    it, (q, k, v) = step.backend(), step.new()
    out = it.run(0, q, k, v)
    again, lse = it.attend_lse(0, q)
    assert torch.equal(again, out)
    at = 0
    for row in step.rows:
        mine, at = slice(at, at + len(row.q)), at + len(row.q)
        right = dense(step.spec, row.q, row.k, row.v)
        assert ((out[mine].double() - right.out).abs() <= right.out_error).all()
        assert ((lse[mine].double() - right.lse).abs() <= right.lse_error).all()


def with_rubbish(kernel: TiledKernel) -> None:
    """In the memory that it computes in: nothing that is left there may matter."""
    kernel._work.fill_(0xFF)  # NaN, in any type
    kernel._parts.fill_(NAN)


@settings(max_examples=100)
@given(steps())
def test_a_token_has_the_same_bits_in_any_step(step: Step) -> None:
    """Together, a row alone, in chunks, tokens as decodes, in any order, and with any number of threads."""
    it, (q, k, v), random = step.backend(), step.new(), Random(step.seed)
    kept = [it.run(0, q, k, v)]  # all of them, so that none of them is given another's memory
    lse = it.attend_lse(0, q)[1]
    for threads in (3, 1):
        torch.set_num_threads(threads)
        other = step.backend()  # in which keys and values are yet to be written
        kept.append(other.run(0, q, k, v))
        with_rubbish(other.kernel)
        kept.append(other.kernel.attend(0, q))
    assert all(torch.equal(other, kept[0]) for other in kept)

    def check(tables: list[array[int]], seq_lens: list[int], query_lens: list[int], tokens: list[int]) -> None:
        it.plan(BatchPlan.build(tables, seq_lens, query_lens, step.spec.block_size))
        with_rubbish(it.kernel)
        out, some_lse = it.attend_lse(0, q[tokens])
        assert torch.equal(out, kept[0][tokens])
        assert torch.equal(some_lse, lse[tokens])

    at = 0
    everything = []
    for row in step.rows:
        context, count = len(row.k) - len(row.q), len(row.q)
        first, at = at, at + count
        check([row.table], [len(row.k)], [count], [*range(first, at)])
        cuts = [0, *sorted(random.sample(range(count + 1), min(2, count))), count]
        for start, stop in pairwise(cuts):
            if stop > start:
                check([row.table], [context + stop], [stop - start], [*range(first + start, first + stop)])
        for i in random.sample(range(count), min(2, count)):
            check([row.table], [context + i + 1], [1], [first + i])
        if count == 1:
            everything.append((row.table, len(row.k), 1, [first]))
    if everything:
        random.shuffle(everything)
        tables, seq_lens, query_lens, tokens = zip(*everything, strict=True)
        check(list(tables), list(seq_lens), list(query_lens), [token for some in tokens for token in some])


def test_a_common_beginning_changes_no_bit() -> None:
    """The same rows in blocks of their own: 20 of them, of several items and 96 queries to one."""
    spec = make_spec(num_heads=10, num_blocks=700)
    blocks = iter(Random(0).sample(range(700), 700))
    common = array("i", [next(blocks) for _ in range(33)])
    seq_lens = [528 + extra for extra in (1, 16, 17, 200, *range(1, 17))]
    own = [array("i", [next(blocks) for _ in range(-(-length // 16) - 33)]) for length in seq_lens]
    it = Tiles(spec)
    it.cache.normal_(generator=torch.Generator().manual_seed(0))
    q = torch.randn(20, 10, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    it.plan(BatchPlan.build([common + table for table in own], seq_lens, [1] * 20, 16))
    together = it.attend_lse(0, q)
    for row, (table, length) in enumerate(zip(own, seq_lens, strict=True)):
        copies = array("i", [next(blocks) for _ in range(33)]) if row < 4 else common
        it.copy_blocks(list(zip(common, copies, strict=True)))
        it.plan(BatchPlan.build([copies + table], [length], [1], 16))
        for alone, one in zip(it.attend_lse(0, q[row : row + 1]), together, strict=True):
            assert torch.equal(alone[0], one[row])


# ---- memory


class Guarded:
    """Tensors that end where memory ends: what reads or writes behind them, kills the process."""

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []

    def copy(self, x: Tensor) -> Tensor:
        size = x.nbytes + -x.nbytes % mmap.PAGESIZE
        memory = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
        self._kept.append(memory)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for page in (0, size + mmap.PAGESIZE):
            assert protect(whole.data_ptr() + page, mmap.PAGESIZE, 0) == 0
        end = size + mmap.PAGESIZE
        return whole[end - x.nbytes : end].view(x.dtype).view(x.shape).copy_(x)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 79), (5, 60), (15, 21), (16, 20), (300, 2)])
def test_nothing_behind_the_end_is_touched(layout: str, block_size: int, num_blocks: int) -> None:
    """In a child, which would die of it. A decode and a prefill end in the cache's last slot."""
    spec = make_spec(layout=layout, block_size=block_size, num_blocks=num_blocks, head_size=96)
    table = array("i", range(num_blocks))
    length = num_blocks * block_size
    child = os.fork()
    if child == 0:
        code = 1
        try:
            guarded = Guarded()
            kernel = make_kernel(spec, guarded.copy(torch.ones(spec.cache_shape).bfloat16()))
            for query_len in (1, 3, 40):
                q, k, v = (guarded.copy(torch.ones(query_len, heads, 96).bfloat16()) for heads in (4, 2, 2))
                kernel.plan(BatchPlan.build([table], [length], [query_len], block_size))
                kernel.write(0, k, v)
                assert torch.equal(kernel.attend(0, q), torch.ones(query_len, 4, 96).bfloat16())
            code = 0
        finally:
            os._exit(code)  # or the child would go on with the other tests
    assert os.waitpid(child, 0)[1] == 0


def test_a_value_that_is_no_number_is_not_lost() -> None:
    """In a row's own key or value, in any of its spans, it shows as in the reference; and in no other row."""
    spec = make_spec(num_blocks=80)
    it, reference = Tiles(spec), ReferenceAttention(spec)
    tables = [array("i", range(first, first + 40)) for first in (0, 40)]
    q, k, v = (torch.ones(2, heads, 32).bfloat16() for heads in (4, 2, 2))
    for place in (3, 300, 620):
        for which in (0, 1):
            for number in (NAN, float("inf"), float("-inf")):
                for backend in (it, reference):
                    backend.cache.zero_()
                    backend.kv(0)[which][place // 16, place % 16, 1, 7] = number
                    backend.plan(BatchPlan.build(tables, [640, 640], [1, 1], 16))
                got, right = it.run(0, q, k, v), reference.run(0, q, k, v)
                torch.testing.assert_close(got, right, rtol=2**-7, atol=0, equal_nan=True)
                assert right[1].isfinite().all()


def test_a_plan_of_more_spans_gets_more_room() -> None:
    """And one of fewer, after it, its own."""
    spec = make_spec(num_blocks=200)
    it = Tiles(spec)
    it.cache.normal_(generator=torch.Generator().manual_seed(0))
    q = torch.randn(4, 4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    tables = [array("i", range(50 * row, 50 * row + 50)) for row in range(4)]
    steps = [(1, 100), (1, 800), (4, 800), (1, 300), (4, 700)]
    expected = []
    for rows, length in steps:
        fresh = Tiles(spec)
        fresh.cache.copy_(it.cache)
        for each in (it, fresh):
            each.plan(BatchPlan.build(tables[:rows], [length] * rows, [1] * rows, 16))
        expected.append(fresh.attend_lse(0, q[:rows])[0])
        assert torch.equal(it.attend_lse(0, q[:rows])[0], expected[-1])
        assert torch.equal(it.attend_lse(0, q[:rows])[0], expected[-1])
