"""The backends against each other, and against dense attention that knows nothing of blocks."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvproof.allocator.errors import InvalidArgument
from kvproof.attention import (
    AttentionBackend,
    BackendUnavailable,
    BatchPlan,
    CacheSpec,
    Capabilities,
    InvalidBatch,
    NotPlanned,
    UnsupportedSpec,
    cpu_kernel,
    tiled_kernel,
)
from kvproof.attention.base import to_device
from kvproof.attention.cpu_kernel import DecodeKernel
from kvproof.attention.reference import ReferenceAttention
from kvproof.attention.tiled_kernel import TiledKernel
from kvproof.attention.torch_paged import KEYS_MULTIPLE, PADDING, TorchAttention, _similar_rows
from kvproof.fuzz.conformance import attention_checks
from kvproof.fuzz.dense import dense

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 5e-3, "bfloat16": 2e-2}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["tiles", "kernel", "gather"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The ways in which the torch backend attends on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPROOF_NO_KERNEL", "1" if request.param == "gather" else "0")
        if (request.param == "tiles" and tiled_kernel.load() is None) or (
            request.param == "kernel" and cpu_kernel.load() is None
        ):
            pytest.skip(f"no {request.param} on this machine")
        if request.param != "tiles":
            patch.setattr(TiledKernel, "create", lambda *_: None)
        yield request.param


SHAPES: dict[str, dict[str, Any]] = {"tiles": {"head_size": 32, "dtype": "bfloat16"}, "kernel": {}, "gather": {}}
"""What a spec needs to be attended for in each."""

without_tiles = pytest.mark.parametrize("path", ["kernel", "gather"], indirect=True, scope="module")


def make_spec(**changes: Any) -> CacheSpec:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "dtype": "float32",
        "num_blocks": 12,
        "block_size": 4,
    }
    return CacheSpec(**(fields | changes))


def random_tokens(spec: CacheSpec, count: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(count, spec.num_heads, spec.head_size, dtype=torch.float64)
    k, v = torch.randn(2, count, spec.num_kv_heads, spec.head_size, dtype=torch.float64)
    return q.to(spec.torch_dtype), k.to(spec.torch_dtype), v.to(spec.torch_dtype)


def assert_close(spec: CacheSpec, got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=TOLERANCE[spec.dtype])


class Gathering(TorchAttention):
    """Decodes as where there is no decode kernel."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self._kernel = None


test_torch_conforms = attention_checks("torch", examples=30)
test_torch_without_its_kernel_conforms = attention_checks(Gathering, examples=30)
test_reference_conforms = attention_checks("reference", examples=20)


def test_a_processor_has_what_its_compiler_makes(path: str) -> None:
    expected = {"tiles": TiledKernel, "kernel": DecodeKernel, "gather": type(None)}[path]
    for changes in ({}, {"window": 3}, {"soft_cap": 2.0}, {"dtype": "bfloat16"}, {"dtype": "float16", "layout": "HND"}):
        assert type(TorchAttention(make_spec(**changes | SHAPES[path]))._kernel) is expected


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("backend_class", [ReferenceAttention, TorchAttention])
def test_memory_outside_the_sequences_is_never_read(
    backend_class: type[AttentionBackend], window: int | None, poison: float, path: str
) -> None:
    """Rows of different lengths; their last blocks' free slots, and tokens that no query sees, are poisoned."""
    spec = make_spec(num_blocks=40, window=window, **SHAPES[path])
    backend = backend_class(spec)
    seq_lens = [1, 5, 16, 30, 7]
    blocks = iter(torch.randperm(40).tolist())
    tables = [array("i", [next(blocks) for _ in range(-(-length // 4))]) for length in seq_lens]
    whole = [random_tokens(spec, length) for length in seq_lens]
    keys, values = backend.kv(0)
    for kv in (keys, values):
        kv.fill_(poison)
    for (_, k, v), table in zip(whole, tables, strict=True):
        for position in range(len(k) - window if window and window < len(k) else 0, len(k) - 1):
            keys[table[position // 4], position % 4] = k[position]
            values[table[position // 4], position % 4] = v[position]
    backend.plan(BatchPlan.build(tables, seq_lens, [1] * 5, 4))
    got = backend.run(0, *(torch.stack([x[-1] for x in tensors]) for tensors in zip(*whole, strict=True)))
    assert_close(spec, got, torch.stack([dense(spec, *sequence)[0][-1] for sequence in whole]))


@pytest.mark.parametrize("query_len", [2, 3, 16])
def test_prompts_and_chunks_of_one_query_length_share_a_call(query_len: int) -> None:
    """Some rows have context before their queries and some have none: one mask must serve both."""
    spec = make_spec(num_blocks=60)
    seq_lens = [query_len, query_len + 2, query_len, query_len + 5]
    blocks = iter(torch.randperm(60).tolist())
    tables = [array("i", [next(blocks) for _ in range(-(-length // 4))]) for length in seq_lens]
    reference, paged = ReferenceAttention(spec), TorchAttention(spec)
    reference.cache.normal_()
    paged.cache.copy_(reference.cache)
    q, k, v = random_tokens(spec, 4 * query_len)
    for backend in (reference, paged):
        backend.plan(BatchPlan.build(tables, seq_lens, [query_len] * 4, 4))
    assert len(paged._calls) == 1
    assert_close(spec, paged.run(0, q, k, v), reference.run(0, q, k, v))


def test_one_long_sequence_does_not_pad_the_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROOF_NO_KERNEL", "1")
    spec = make_spec(num_blocks=1000, block_size=16)
    backend = TorchAttention(spec)
    seq_lens = [20] * 16 + [8000] + [40] * 15
    blocks = iter(range(1000))
    tables = [array("i", [next(blocks) for _ in range(-(-length // 16))]) for length in seq_lens]
    backend.plan(BatchPlan.build(tables, seq_lens, [1] * 32, 16))
    token_elements = 2 * spec.num_kv_heads * spec.head_size
    gathered = [call.gathered.numel() // token_elements for call in backend._calls]
    rounded = [-(-length // KEYS_MULTIPLE) * KEYS_MULTIPLE for length in seq_lens]
    assert sum(gathered) <= sum(rounded) + PADDING * len(gathered)
    assert backend._gathered.numel() == 8000 * token_elements


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300)), max_size=40), st.integers(1, 1000))
def test_similar_rows_are_grouped_within_bounds(rows: list[tuple[int, int]], most_keys: int) -> None:
    query_lens = [query for query, _ in rows]
    seq_lens = [query + context if query else 0 for query, context in rows]
    groups = list(_similar_rows(query_lens, seq_lens, most_keys))
    assert sorted(row for group in groups for row in group) == [row for row, query in enumerate(query_lens) if query]
    for group in groups:
        longest = max(seq_lens[row] for row in group)
        assert group == sorted(group)
        assert len({query_lens[row] for row in group}) == 1
        assert sum(longest - seq_lens[row] for row in group) * query_lens[group[0]] <= PADDING
        assert len(group) == 1 or len(group) * longest <= most_keys


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_decode_gives_the_same_bits_alone_and_in_any_batch(
    dtype: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside other decodes and prefills, in other blocks: what a row computes depends on the row alone."""
    monkeypatch.setenv("KVPROOF_NO_KERNEL", "0")
    if cpu_kernel.load() is None:
        pytest.skip("no kernel on this machine: the gathering path promises less")
    generator = random.Random(dtype + layout)
    seq_lens = [1, 2, 15, 16, 17, 511, 512, 513, 1023, 1024, 1025, 2000]
    seq_lens += [generator.randint(1, 2000) for _ in range(20)]
    counts = [-(-length // 16) for length in seq_lens]
    num_blocks = 2 * sum(counts) + 4
    spec = make_spec(num_heads=6, head_size=24, dtype=dtype, layout=layout, num_blocks=num_blocks, block_size=16)
    backend = TorchAttention(spec)
    blocks = iter(generator.sample(range(spec.num_blocks), spec.num_blocks))
    tables, others = ([array("i", [next(blocks) for _ in range(count)]) for count in counts] for _ in range(2))
    prefill = array("i", blocks)
    backend.cache.normal_()
    for table, other in zip(tables, others, strict=True):
        backend.copy_blocks(list(zip(table, other, strict=True)))
    q, k, v = random_tokens(spec, len(seq_lens) + 40)
    rows = len(seq_lens)

    backend.plan(BatchPlan.build([*tables, prefill], [*seq_lens, 40], [*[1] * rows, 40], 16))
    together = backend.run(0, q, k, v)
    for row, length in enumerate(seq_lens):
        for table in (tables[row], others[row]):
            backend.plan(BatchPlan.build([table], [length], [1], 16))
            assert torch.equal(backend.run(0, q[row : row + 1], k[row : row + 1], v[row : row + 1])[0], together[row])
    order = generator.sample(range(rows), rows)
    backend.plan(BatchPlan.build([others[row] for row in order], [seq_lens[row] for row in order], [1] * rows, 16))
    assert torch.equal(backend.run(0, q[order], k[order], v[order]), together[order])


@pytest.mark.parametrize(
    ("path", "dtype"),
    [("kernel", "bfloat16"), ("kernel", "float16"), ("tiles", "bfloat16")],
    indirect=["path"],
    scope="module",
)
def test_every_value_there_is_is_converted(path: str, dtype: str) -> None:
    """The mean of each 16-bit number and the next one: nearly always a tie, and infinities and NaN are among them.

    To the matrix unit subnormal numbers are zero, those that it is given as those that it would give.
    """
    rows, heads, size = 32, 32, 64
    spec = make_spec(num_heads=heads, num_kv_heads=heads, head_size=size, dtype=dtype, num_blocks=rows, block_size=2)
    backend = TorchAttention(spec)
    bits = torch.arange(2**16, dtype=torch.int32)
    values, others = (
        x.to(torch.int16).view(spec.torch_dtype).view(rows, heads, size) for x in (bits, (bits + 1) % 2**16)
    )
    _, cached = backend.kv(0)
    cached[:, 0] = values
    backend.plan(BatchPlan.build([array("i", [row]) for row in range(rows)], [2] * rows, [1] * rows, 2))
    zeros = torch.zeros_like(others)

    def normal(x: Tensor) -> Tensor:
        return x.masked_fill(x.abs() < torch.finfo(x.dtype).smallest_normal, 0) if path == "tiles" else x

    right = normal(((normal(values).float() + normal(others).float()) * 0.5).to(spec.torch_dtype))
    torch.testing.assert_close(backend.run(0, zeros, zeros, others), right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (700, None), (None, 3.0)])
def test_long_decodes_are_right(path: str, dtype: str, window: int | None, soft_cap: float | None) -> None:
    """Sequences of several of the kernel's spans, with scores so far apart that the maximum keeps moving."""
    if path == "tiles" and dtype != "bfloat16":
        pytest.skip("the matrix unit is for bfloat16")
    shape = {"num_heads": 6, "head_size": 64, "num_blocks": 400, "block_size": 5}
    spec = make_spec(dtype=dtype, window=window, soft_cap=soft_cap, **shape)
    seq_lens = [1024, 513, 400]
    blocks = iter(torch.randperm(400).tolist())
    tables = [array("i", [next(blocks) for _ in range(-(-length // 5))]) for length in seq_lens]
    paged, reference = TorchAttention(spec), ReferenceAttention(make_spec(**spec.model_dump() | {"dtype": "float64"}))
    paged.cache.normal_()
    reference.cache.copy_(paged.cache)
    q, k, v = random_tokens(spec, 3)
    q *= torch.tensor([1, 5, 20]).view(3, 1, 1)
    for backend in (paged, reference):
        backend.plan(BatchPlan.build(tables, seq_lens, [1] * 3, 5))
    right = reference.run(0, q.double(), k.double(), v.double())
    assert_close(spec, paged.run(0, q, k, v), right)


class Plain(AttentionBackend):
    """The least that a backend outside this package has to write."""

    name = "plain"
    available: ClassVar[bool] = True

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(devices=frozenset({"cpu"}), block_sizes=frozenset({4}))

    @classmethod
    def probe(cls) -> None:
        if not cls.available:
            raise BackendUnavailable(cls.name, "it is switched off", "switch it on")

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        keys, values = self.kv(layer)
        table = self.batch.kv_indices.long()
        length = int(self.batch.seq_lens[0])
        k, v = (x[table].flatten(0, 1)[:length] for x in (keys, values))
        whole = dense(self.spec, torch.cat([torch.zeros(length - len(q), *q.shape[1:]), q]), k, v)[0]
        return whole[-len(q) :].to(q.dtype)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_backend_of_ones_own_needs_only_attend(layout: str) -> None:
    spec = make_spec(layout=layout)
    plain, reference = Plain(spec), ReferenceAttention(spec)
    for seq_len, query_len in ((6, 6), (7, 1), (11, 4)):
        q, k, v = random_tokens(spec, query_len)
        for backend in (plain, reference):
            backend.plan(BatchPlan.build([array("i", [7, 2, 9])], [seq_len], [query_len], 4))
        assert_close(spec, plain.run(1, q, k, v), reference.run(1, q, k, v))
    assert torch.equal(plain.cache, reference.cache)
    with pytest.raises(
        UnsupportedSpec, match=r"^the plain backend does not support feature lse; it supports no features$"
    ):
        plain.attend_lse(1, q)


def test_a_backend_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedSpec, match=r"^the plain backend does not support block_size 8; it supports 4$"):
        Plain(make_spec(block_size=8))
    monkeypatch.setattr(Plain, "available", False)
    with pytest.raises(
        BackendUnavailable, match=r"^the plain backend is not available: it is switched off; switch it on$"
    ):
        Plain(make_spec())


def test_torch_takes_no_float64() -> None:
    with pytest.raises(
        UnsupportedSpec, match=r"^the torch backend does not support dtype float64; it supports bfloat16"
    ):
        TorchAttention(make_spec(dtype="float64"))


PLANNED = [(array("i", [1, 2]), 6, 1), (array("i", [3]), 3, 3)]


def planned(cls: type[AttentionBackend], **changes: Any) -> AttentionBackend:
    backend = cls(make_spec(**changes))
    tables, seq_lens, query_lens = zip(*PLANNED, strict=True)
    backend.plan(BatchPlan.build(tables, seq_lens, query_lens, 4))
    return backend


@without_tiles
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("cls", [ReferenceAttention, TorchAttention])
@pytest.mark.parametrize(
    ("layer", "change", "message"),
    [
        (2, {}, "layer is 2; it must be 0 to 1"),
        (-1, {}, "layer is -1; it must be 0 to 1"),
        (0, {"q": torch.ones(3, 4, 8)}, r"q has shape \[3, 4, 8\]; this step needs \[4, 4, 8\]"),
        (0, {"k": torch.ones(4, 4, 8)}, r"k has shape \[4, 4, 8\]; this step needs \[4, 2, 8\]"),
        (0, {"v": torch.ones(4, 2, 4)}, r"v has shape \[4, 2, 4\]; this step needs \[4, 2, 8\]"),
        (0, {"q": torch.ones(4, 4, 8).bfloat16()}, r"q is torch.bfloat16; the cache is torch.float32"),
        (0, {"v": torch.ones(4, 2, 8).half()}, r"v is torch.float16; the cache is torch.float32"),
        (0, {"k": torch.ones(4, 2, 8, device="meta")}, r"k is on meta; the cache is on cpu"),
    ],
)
def test_run_refuses_what_the_step_does_not_fit(
    cls: type[AttentionBackend], layer: int, change: dict[str, Tensor], message: str
) -> None:
    backend = planned(cls)
    tensors = {"q": torch.ones(4, 4, 8), "k": torch.ones(4, 2, 8), "v": torch.ones(4, 2, 8)} | change
    with pytest.raises(InvalidArgument, match=f"^{message}$"):
        backend.run(layer, **tensors)
    assert not backend.cache.any()


@pytest.mark.parametrize("cls", [ReferenceAttention, TorchAttention])
def test_a_refused_plan_leaves_the_old_one(
    cls: type[AttentionBackend], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: BatchPlan) -> None:
        raise MemoryError

    backend = planned(cls, **SHAPES[path])
    q, k, v = random_tokens(backend.spec, 4)
    before = backend.run(0, q, k, v)
    with pytest.raises(InvalidBatch, match=r"^block-range: row 0 names block 12"):
        backend.plan(BatchPlan.build([array("i", [12])], [2], [2], 4))
    monkeypatch.setattr(backend, "_plan", fail)
    with pytest.raises(MemoryError):
        backend.plan(BatchPlan.build([array("i", [1])], [2], [2], 4))
    assert torch.equal(backend.run(0, q, k, v), before)


@pytest.mark.parametrize("cls", [ReferenceAttention, TorchAttention])
def test_run_needs_a_plan(cls: type[AttentionBackend]) -> None:
    backend = cls(make_spec())
    with pytest.raises(NotPlanned, match="call plan"):
        backend.run(0, *random_tokens(backend.spec, 1))


@pytest.mark.parametrize("cls", [ReferenceAttention, TorchAttention])
def test_a_batch_of_empty_rows_computes_nothing(cls: type[AttentionBackend], path: str) -> None:
    backend = cls(make_spec(**SHAPES[path]))
    backend.plan(BatchPlan.build([array("i")] * 2, [0, 0], [0, 0], 4))
    assert backend.run(0, *random_tokens(backend.spec, 0)).shape == (0, 4, backend.spec.head_size)
    assert not backend.cache.any()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_copy_blocks_copies_all_layers_and_reads_before_it_writes(layout: str) -> None:
    backend = TorchAttention(make_spec(layout=layout))
    backend.cache.normal_()
    before = backend.cache.clone()
    backend.copy_blocks([])
    assert torch.equal(backend.cache, before)
    backend.copy_blocks([(1, 2), (2, 5), (7, 7)])
    after = before.clone()
    after[:, 2], after[:, 5] = before[:, 1], before[:, 2]
    assert torch.equal(backend.cache, after)


def test_what_goes_to_a_gpu_goes_from_pinned_memory_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(3)
    assert to_device(x, "cpu") is x
    calls: list[object] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: calls.append("pinned") or self)
    monkeypatch.setattr(Tensor, "to", lambda self, *to, **how: calls.append((to, how)) or self)
    to_device(x, "cuda:1")
    assert calls == ["pinned", (("cuda:1",), {"non_blocking": True})]


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ([(0, 1), (2, 12)], "copy order names block 12; the cache has blocks 0 to 11"),
        ([(0, 1), (-1, 3)], "copy order names block -1; the cache has blocks 0 to 11"),
        ([(0, 1), (2, 1)], r"copy orders write a block twice: destinations \[1, 1\]"),
    ],
)
def test_copy_blocks_refuses_before_it_copies(orders: list[tuple[int, int]], message: str) -> None:
    backend = TorchAttention(make_spec())
    backend.cache.normal_()
    before = backend.cache.clone()
    with pytest.raises(InvalidArgument, match=f"^{message}$"):
        backend.copy_blocks(orders)
    assert torch.equal(backend.cache, before)
