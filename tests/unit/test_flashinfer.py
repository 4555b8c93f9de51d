"""The FlashInfer driver over the contract-checking double, held to dense attention that knows nothing of blocks.

Planted faults at the end show that the double and these batches notice what the real package lets pass.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvproof.allocator.errors import InvalidArgument
from kvproof.attention import BatchPlan, CacheSpec, InvalidSpec, NotPlanned, UnsupportedSpec
from kvproof.attention.flashinfer import NUM_LANES, FlashInferAttention, WorkspaceTooSmall
from kvproof.attention.flashinfer_lane import Lane
from kvproof.fuzz.flashinfer_double import FlashInferOverDouble, LazyOverDouble, StreamEvent
from kvproof.fuzz.flashinfer_kernel import ContractViolation

NUM_BLOCKS = 300
# The double rounds once, from float64, so what is left is half a unit in the last place of the result.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_spec(**changes: Any) -> CacheSpec:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "bfloat16",
        "num_blocks": NUM_BLOCKS,
        "block_size": 4,
    }
    return CacheSpec(**(fields | changes))


def random_spec(random: Random) -> CacheSpec:
    num_kv_heads = random.choice([1, 1, 2])
    return make_spec(
        num_heads=num_kv_heads * random.choice([1, 2, 3, 4, 5, 7, 9]),
        num_kv_heads=num_kv_heads,
        head_size=random.choice([64, 64, 128, 256]),
        dtype=random.choice(["bfloat16", "float16"]),
        block_size=random.choice([1, 2, 3, 5, 8, 16, 24, 32]),
        layout=random.choice(["NHD", "HND"]),
        scale=random.choice([None, None, 0.3]),
        window=random.choice([None, None, 1, 2, 5, 17]),
        soft_cap=random.choice([None, None, 2.0]),
    )


def dense(spec: CacheSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one whole sequence in float64, and the natural log-sum-exp of its scores."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(spec.group_size, dim=0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) * spec.softmax_scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
    ones = torch.ones(scores.shape[1:])
    hidden = ones.triu(1).bool()
    if spec.window is not None:
        hidden |= ones.tril(-spec.window).bool()
    scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).T


@dataclass
class Sequence:
    """A sequence's queries, keys and values in full, and how many of its tokens have been computed."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: array[int]
    shared: int = 0
    done: int = 0
    right: Tensor = field(init=False)

    def share_prefix(self, parent: Sequence, block_size: int) -> None:
        blocks = min(len(parent.q), len(self.q) - 1) // block_size
        self.shared = self.done = tokens = blocks * block_size
        self.k[:tokens], self.v[:tokens] = parent.k[:tokens], parent.v[:tokens]
        self.table[:blocks] = parent.table[:blocks]


def random_sequences(random: Random, spec: CacheSpec) -> list[Sequence]:
    blocks = iter(random.sample(range(NUM_BLOCKS), NUM_BLOCKS))
    made = []
    for _ in range(random.randint(1, 4)):
        length = random.randint(1, 3 * spec.block_size + 2)
        q = torch.randn(length, spec.num_heads, spec.head_size).to(spec.torch_dtype)
        k, v = torch.randn(2, length, spec.num_kv_heads, spec.head_size).to(spec.torch_dtype)
        made.append(Sequence(q, k, v, array("i", [next(blocks) for _ in range(-(-length // spec.block_size))])))
    for sequence in made[1:]:
        if random.random() < 0.5:
            sequence.share_prefix(made[0], spec.block_size)
    for sequence in made:
        sequence.right = dense(spec, sequence.q, sequence.k, sequence.v)[0]
    return made


def run_example(backend_class: type[FlashInferOverDouble], seed: int) -> None:
    """Sequences on scattered blocks of a cache full of NaN, some with a common prefix, computed in steps of decodes,
    chunks, prompts and empty rows. Every output must be right: at once, or on a lazy stream after the last step."""
    random = Random(seed)
    torch.manual_seed(seed)
    spec = random_spec(random)
    backend = backend_class(spec)
    backend.cache.fill_(math.nan)
    sequences = random_sequences(random, spec)
    results: list[tuple[Tensor, Tensor]] = []
    while any(s.done < len(s.q) for s in sequences):
        ready = [s for s in sequences if s.done < len(s.q) and sequences[0].done >= s.shared]
        step = [(s, random.choice([1, min(3, len(s.q) - s.done), len(s.q) - s.done])) for s in ready]
        step.sort(key=lambda row: row[1] != 1)
        rows = [(s.table, s.done + n, n) for s, n in step]
        for _ in range(random.randint(0, 2)):
            rows.insert(random.randint(sum(n == 1 for _, n in step), len(rows)), (array("i"), 0, 0))
        backend.plan(BatchPlan.build(*zip(*rows, strict=True), spec.block_size))
        q, k, v = (torch.cat([getattr(s, name)[s.done : s.done + n] for s, n in step]) for name in "qkv")
        if random.random() < 0.5:  # as a slice of a fused projection
            q = torch.stack([q, q], dim=-1)[..., 0]
        right = torch.cat([s.right[s.done : s.done + n] for s, n in step])
        results += [(backend.run(0, q, k, v), right), (backend.run(1, q, k, -v), -right)]
        for s, n in step:
            s.done += n
        if not backend.lazy:
            assert_right(spec, results)
            results.clear()
    backend.stream.wait()
    assert_right(spec, results)


def assert_right(spec: CacheSpec, results: list[tuple[Tensor, Tensor]]) -> None:
    for got, right in results:
        torch.testing.assert_close(got.double(), right, rtol=TOLERANCE[spec.dtype], atol=1e-6)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_sequences_computed_in_steps_match_dense_attention(seed: int) -> None:
    run_example(FlashInferOverDouble, seed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_steps_may_be_planned_before_earlier_ones_have_run(seed: int) -> None:
    """No kernel and no copy runs before somebody waits for it, which only the lanes' own events do until the end."""
    run_example(LazyOverDouble, seed)


def planned(
    *rows: tuple[list[int], int, int], backend: type[FlashInferOverDouble] = FlashInferOverDouble, **changes: Any
) -> FlashInferOverDouble:
    it = backend(make_spec(**changes))
    it.plan(batch(*rows))
    return it


def batch(*rows: tuple[list[int], int, int]) -> BatchPlan:
    tables, seq_lens, query_lens = zip(*rows, strict=True)
    return BatchPlan.build([array("i", table) for table in tables], seq_lens, query_lens, 4)


def inputs(spec: CacheSpec, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(tokens, spec.num_heads, spec.head_size).to(spec.torch_dtype)
    k, v = torch.randn(2, tokens, spec.num_kv_heads, spec.head_size).to(spec.torch_dtype)
    return q, k, v


@pytest.mark.parametrize("changes", [{}, {"layout": "HND", "window": 3}, {"soft_cap": 1.5, "num_heads": 14}])
def test_the_log_sum_exp_is_natural_and_merges_parts_of_a_sequence(changes: dict[str, Any]) -> None:
    backend = planned(([7, 2], 5, 5), ([4, 9], 6, 6), **changes)
    spec = backend.spec
    q, k, v = inputs(spec, 11)
    out = backend.run(0, q, k, v)
    again, lse = backend.attend_lse(0, q)
    parts = [dense(spec, q[rows], k[rows], v[rows]) for rows in (slice(5), slice(5, None))]
    assert torch.equal(again, out)
    assert lse.dtype is torch.float32
    torch.testing.assert_close(lse.double(), torch.cat([part[1] for part in parts]), rtol=1e-6, atol=1e-6)


def test_decodes_and_other_rows_have_their_own_log_sum_exp() -> None:
    backend = planned(([7], 1, 1), ([4, 9], 6, 6))
    q, k, v = inputs(backend.spec, 7)
    backend.run(0, q, k, v)
    right = [dense(backend.spec, q[rows], k[rows], v[rows])[1] for rows in (slice(1), slice(1, None))]
    torch.testing.assert_close(backend.attend_lse(0, q)[1].double(), torch.cat(right), rtol=1e-6, atol=1e-6)
    with pytest.raises(InvalidArgument, match=r"^q has shape \[6, 4, 64\]; this step needs \[7, 4, 64\]$"):
        backend.attend_lse(0, q[1:])
    with pytest.raises(NotPlanned):
        FlashInferOverDouble(make_spec()).attend_lse(0, q)


def test_a_step_without_tokens_launches_nothing() -> None:
    backend = planned(([], 0, 0), ([], 0, 0))
    assert backend.run(0, *inputs(backend.spec, 0)).shape == (0, 4, 64)
    assert backend.stream.submitted == 0


def test_all_layers_share_one_plan() -> None:
    backend = planned(([7], 1, 1), ([4, 9], 6, 6))
    assert backend.stream.submitted == 2
    for layer in (0, 1, 0, 1):
        backend.run(layer, *inputs(backend.spec, 7))
    assert backend.stream.submitted == 2 + 2 * 4


def test_a_refused_plan_leaves_the_old_one() -> None:
    class Cramped(FlashInferOverDouble):
        workspace_bytes = 4 * 4 * 65 * 8

    backend = planned(([7], 1, 1), ([4, 9], 6, 6), backend=Cramped)
    q, k, v = inputs(backend.spec, 7)
    before = backend.run(0, q, k, v)
    message = (
        r"FlashInfer's workspace of 8320 bytes is too small for this step \(Buffer overflow when allocating memory for "
        r"batch_prefill_tmp_v with size 9360 .*\); set FlashInferAttention.workspace_bytes higher"
    )
    for _ in range(2 * NUM_LANES):
        with pytest.raises(WorkspaceTooSmall, match=f"^{message}$"):
            backend.plan(batch(([3], 1, 1), ([1, 2, 5], 9, 9)))
        assert torch.equal(backend.run(0, q, k, v), before)
    backend.plan(batch(([3], 1, 1)))
    assert backend.run(0, *inputs(backend.spec, 1)).isfinite().all()


def test_other_errors_of_a_plan_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("no kernel image")

    backend = planned(([7], 1, 1))
    monkeypatch.setattr(backend._lanes[0]._decode, "plan", fail)
    with pytest.raises(RuntimeError, match="no kernel image"):
        backend.plan(batch(([3], 1, 1)))


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"device": "cpu"}, "device cpu; it supports cuda"),
        ({"device": "cuda", "dtype": "float32"}, "dtype float32; it supports bfloat16, float16"),
        ({"device": "cuda", "head_size": 96}, "head_size 96; it supports 64, 128, 256"),
    ],
)
def test_what_the_kernels_lack_is_refused(changes: dict[str, Any], feature: str) -> None:
    with pytest.raises(UnsupportedSpec, match=f"^the flashinfer backend does not support {feature}$"):
        FlashInferAttention.capabilities().check(make_spec(**changes), "flashinfer")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 0}, ["window=0", "1"]),
        ({"window": 2**31}, ["window=2147483648"]),
        ({"soft_cap": 0.0}, ["soft_cap=0.0", "greater than 0"]),
        ({"soft_cap": math.inf}, ["soft_cap=inf", "finite"]),
        ({"sinks": True}, ["sinks=True"]),
    ],
)
def test_a_window_and_a_cap_have_bounds_and_there_are_no_sinks(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        make_spec(**changes)
    assert [word for word in words if word not in str(refusal.value)] == []


# Planted faults. A driver with one of them must fail a random example within this many.
EXAMPLES = 200
Plant = Callable[[pytest.MonkeyPatch], None]


def staged(*indices: int, change: Callable[[Tensor, int], Tensor]) -> Plant:
    """Change arrays on their way to the wrappers, given the page size.

    0 to 3 are the prefills' qo_indptr, kv_indptr, kv_indices and kv_last_page_len, 4 to 6 the decodes' last three.
    """

    def plant(patch: pytest.MonkeyPatch) -> None:
        stage = Lane._stage

        def faulty(self: Lane, arrays: tuple[Tensor, ...]) -> list[Tensor]:
            made = list(stage(self, arrays))
            for index in indices:
                made[index] = change(made[index], self._spec.block_size)
            return made

        patch.setattr(Lane, "_stage", faulty)

    return plant


def argument(**changes: Callable[[Any, CacheSpec], Any]) -> Plant:
    """Change or drop (None) what the driver passes to every plan."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        init = Lane.__init__

        def faulty(self: Lane, spec: CacheSpec, *args: Any) -> None:
            init(self, spec, *args)
            for name, change in changes.items():
                self._common[name] = change(self._common[name], spec)
                if self._common[name] is None:
                    del self._common[name]

        patch.setattr(Lane, "__init__", faulty)

    return plant


def wrapper_argument(name: str, change: Callable[[Any], Any]) -> Plant:
    """Change what the driver makes or plans its wrappers with."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plan_wrapper, kernels = Lane._plan_wrapper, FlashInferOverDouble._kernels

        def faulty_plan(self: Lane, wrapper: Any, **step: Any) -> None:
            plan_wrapper(self, wrapper, **{key: change(value) if key == name else value for key, value in step.items()})

        def faulty_kernels(self: FlashInferOverDouble) -> Any:
            made = kernels(self)

            def make(wrapper: Any, **options: Any) -> Any:
                return wrapper(**{key: change(value) if key == name else value for key, value in options.items()})

            return replace(
                made,
                decode=lambda **options: make(made.decode, **options),
                prefill=lambda **options: make(made.prefill, **options),
            )

        patch.setattr(Lane, "_plan_wrapper", faulty_plan)
        patch.setattr(FlashInferOverDouble, "_kernels", faulty_kernels)

    return plant


def split_one_late(patch: pytest.MonkeyPatch) -> None:
    plan = Lane.plan

    def faulty(self: Lane, batch: BatchPlan) -> None:
        plan(self, batch)
        self._num_decodes += 1

    patch.setattr(Lane, "plan", faulty)


def nothing_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamEvent, "synchronize", lambda self: None)


def recorded_before_the_copies(patch: pytest.MonkeyPatch) -> None:
    record = StreamEvent.record

    def faulty(self: StreamEvent) -> None:
        if self._stream.submitted:
            record(self)
            self._at -= 1

    patch.setattr(StreamEvent, "record", faulty)


def lanes_never_change(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlashInferAttention, "_plan", lambda self, batch: self._lanes[0].plan(batch))


def staged_in_one_place(patch: pytest.MonkeyPatch) -> None:
    """Both lanes stage in the same memory: the second plan overwrites what the first is still to copy."""
    memory = torch.empty(10_000, dtype=torch.int32)
    init = Lane.__init__

    def faulty(self: Lane, *args: Any) -> None:
        init(self, *args)
        self._host = memory

    patch.setattr(Lane, "__init__", faulty)


def strided_queries(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: FlashInferAttention, layer: int, q: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        self._lanes[-1].run(q, self.cache[layer], out)
        return out

    patch.setattr(FlashInferAttention, "_attend", faulty)


FAULTS: list[tuple[str, Plant, str]] = [  # and by what each is noticed: a rule of the double, or wrong numbers
    ("full last page is 0", staged(3, 6, change=lambda last, size: last.where(last < size, 0)), "last-page-len"),
    ("last_page_len too long", staged(3, 6, change=lambda last, _: last + (last > 0).int()), ""),
    ("last_page_len too short", staged(3, 6, change=lambda last, _: last - (last > 1).int()), ""),
    ("prefill kv_indptr not rebased", staged(1, change=lambda indptr, _: indptr + 1), "indptr-start"),
    ("decode kv_indptr off by one", staged(4, change=lambda indptr, _: indptr + 1), "indptr-start"),
    ("qo_indptr not rebased", staged(0, change=lambda indptr, _: indptr + 1), "indptr-start"),
    ("int64 indices", staged(2, 5, change=lambda indices, _: indices.long()), "index-dtype"),
    ("pages in reverse order", staged(2, 5, change=lambda indices, _: indices.flip(0)), ""),
    ("page numbers off by one", staged(2, 5, change=lambda indices, _: indices + 1), ""),
    ("decode indices one short", staged(5, change=lambda indices, _: indices[:-1]), "indices-length"),
    ("a decode too many is run", split_one_late, "q-shape"),
    ("window off by one", argument(window_left=lambda left, spec: -1 if spec.window is None else spec.window), ""),
    ("window forgotten", argument(window_left=lambda *_: -1), ""),
    ("soft cap forgotten", argument(logits_soft_cap=lambda *_: 0.0), ""),
    ("custom scale forgotten", argument(sm_scale=lambda _, spec: spec.head_size**-0.5), ""),
    ("query dtype missing", argument(q_data_type=lambda *_: None), "missing 1 required keyword-only argument"),
    ("output dtype wrong", argument(o_data_type=lambda *_: torch.float32), "dtype"),
    ("heads not grouped", argument(num_kv_heads=lambda _, spec: spec.num_heads), "cache-shape"),
    ("page size wrong", argument(page_size=lambda size, _: size + 1), "cache-shape"),
    ("not causal", wrapper_argument("causal", lambda _: False), ""),
    ("layout ignored", wrapper_argument("kv_layout", lambda _: "NHD"), "cache-shape"),
    ("CUDA-core decode", wrapper_argument("use_tensor_cores", lambda _: False), "group-size"),
    ("backend left open", wrapper_argument("backend", lambda _: "auto"), "backend"),
    ("an old lane runs", lanes_never_change, "not-planned"),
    ("nothing waits for copies", nothing_waits, "replanned-too-soon"),
    ("event recorded a copy early", recorded_before_the_copies, "replanned-too-soon"),
    ("lanes share their memory", staged_in_one_place, "overwritten"),
    ("strided queries", strided_queries, "q-contiguous"),
]


def first_failure() -> Exception | None:
    for seed in range(EXAMPLES):
        for backend in (FlashInferOverDouble, LazyOverDouble):
            try:
                run_example(backend, seed)
            except (AssertionError, TypeError) as error:
                return error
    return None


@pytest.mark.parametrize(("plant", "rule"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_planted_fault_is_noticed(plant: Plant, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    failure = first_failure()
    assert failure is not None
    assert isinstance(failure, ContractViolation) == bool(rule and "missing" not in rule), failure
    assert rule in str(failure)
