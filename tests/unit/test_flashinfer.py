"""The FlashInfer driver over the contract-checking double, held to dense attention that knows nothing of blocks."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor

from kvproof.allocator.errors import InvalidArgument
from kvproof.attention import BatchPlan, CacheSpec, InvalidSpec, NotPlanned, UnsupportedSpec
from kvproof.attention.flashinfer import (
    NUM_LANES,
    FlashInferAttention,
    FlashInferFA3,
    FlashInferPersistent,
    WorkspaceTooSmall,
)
from kvproof.attention.flashinfer_cascade import common_prefix, without_prefix
from kvproof.attention.reference import ReferenceAttention
from kvproof.fuzz.conformance import Effort, attention_checks
from kvproof.fuzz.dense import dense
from kvproof.fuzz.flashinfer_double import (
    CascadeOverDouble,
    FA3OverDouble,
    FlashInferOverDouble,
    GraphsOverDouble,
    LazyCascadeOverDouble,
    LazyGraphsOverDouble,
    LazyOverDouble,
    PersistentOverDouble,
    make_spec,
)
from kvproof.fuzz.flashinfer_plants import steps_follow_each_other
from kvproof.fuzz.flashinfer_wrappers import DecodeDouble

pytestmark = pytest.mark.usefixtures("one_thread")


test_flashinfer_conforms = attention_checks(FlashInferOverDouble, examples=10)
test_graphs_conform = attention_checks(GraphsOverDouble, examples=4)
test_cascade_conforms = attention_checks(CascadeOverDouble, examples=4)
test_fa3_conforms = attention_checks(FA3OverDouble, examples=4)
test_persistent_conforms = attention_checks(PersistentOverDouble, examples=4)


@pytest.mark.parametrize("backend", [GraphsOverDouble, CascadeOverDouble, PersistentOverDouble])
def test_steps_follow_each_other(backend: type[FlashInferOverDouble]) -> None:
    steps_follow_each_other(backend)(Effort(40))


@pytest.mark.parametrize("backend", [LazyOverDouble, LazyGraphsOverDouble, LazyCascadeOverDouble])
def test_steps_may_be_planned_before_those_before_them_have_run(backend: type[FlashInferOverDouble]) -> None:
    """No kernel and no copy runs before somebody waits for it, which only the lanes' own events do until the end."""
    steps_follow_each_other(backend)(Effort(40))


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
    assert backend.stream.submitted == 1  # the write of no keys


def test_all_layers_share_one_plan() -> None:
    backend = planned(([7], 1, 1), ([4, 9], 6, 6))
    assert backend.stream.submitted == 3  # the copies of two plans and of the tokens
    for layer in (0, 1, 0, 1):
        backend.run(layer, *inputs(backend.spec, 7))
    assert backend.stream.submitted == 3 + 3 * 4  # two kernels, and a write of keys and values


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


def test_what_a_kernel_lacks_is_refused_by_its_variant() -> None:
    for variant, changes in (
        (FlashInferFA3, {"cache_dtype": "float8_e4m3fn"}),
        (FlashInferPersistent, {"cache_dtype": "float8_e4m3fn"}),
        (FlashInferPersistent, {"window": 3}),
    ):
        with pytest.raises(
            UnsupportedSpec, match=f"^the {variant.name} backend does not support {next(iter(changes))} "
        ):
            variant.capabilities().check(make_spec(device="cuda", **changes), variant.name)
    FlashInferAttention.capabilities().check(make_spec(device="cuda", window=3, cache_dtype="float8_e4m3fn"))
    FlashInferFA3.capabilities().check(make_spec(device="cuda", window=3, soft_cap=1.0))


def decodes(*tables: list[int]) -> BatchPlan:
    """Decodes that have written all but the last slot of their blocks of 4."""
    return batch(*((table, 4 * len(table), 1) for table in tables))


@pytest.mark.parametrize(
    ("it", "rows"),
    [
        (decodes([1]), 1),
        (decodes([1], [2], [3, 4]), 4),
        (decodes(*([row] for row in range(1, 9))), 8),
        (decodes(*([row] for row in range(1, 10))), None),  # more than the largest
        (batch(([1], 3, 1), ([2], 2, 2)), None),
        (batch(([1], 3, 1), ([], 0, 0)), None),
    ],
)
def test_decodes_are_padded_to_the_next_size(it: BatchPlan, rows: int | None) -> None:
    assert GraphsOverDouble(make_spec()).graph_rows(it) == rows
    assert FlashInferOverDouble(make_spec()).graph_rows(it) is None


def test_more_blocks_than_the_buffers_hold_are_not_for_a_graph() -> None:
    """Six rows of a common prefix: 10 blocks and the null block in every row are what there is room for."""
    backend = GraphsOverDouble(make_spec(num_blocks=10))  # for up to 8 rows: 18 blocks
    it = decodes(*([1, 2, row] for row in range(3, 9)))
    assert (it.kv_indices.numel(), backend.graph_rows(it)) == (18, None)
    fits = decodes(*([1, row] for row in range(3, 9)), [2, 9])
    assert (fits.kv_indices.numel(), backend.graph_rows(fits)) == (14, 8)
    backend.plan(fits.pad(8))
    backend.plan(it)
    assert backend.run(0, *inputs(backend.spec, 6)).isfinite().all()


class Cramped(GraphsOverDouble):
    workspace_bytes = 4 * 4 * 65 * 4  # for 4 rows, where graphs are of up to 8


def test_graphs_that_need_more_workspace_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkspaceTooSmall, match=r"^FlashInfer's workspace of 4160 bytes .* with size 8320 "):
        Cramped(make_spec())

    def cannot_say(self: DecodeDouble, **_: Any) -> tuple[int, int]:
        raise NotImplementedError

    monkeypatch.setattr(DecodeDouble, "workspace_size", cannot_say, raising=False)
    with pytest.raises(WorkspaceTooSmall, match=r"^FlashInfer's workspace of 4160 bytes .* with size 8320 "):
        Cramped(make_spec())


def test_graphs_get_the_workspace_that_the_package_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def workspace_size(self: DecodeDouble, *, last_page_len: Tensor, **step: Any) -> tuple[int, int]:
        assert "non_blocking" not in step
        return self._needed(len(last_page_len), step["num_qo_heads"], step["head_dim"]), 0

    monkeypatch.setattr(DecodeDouble, "workspace_size", workspace_size, raising=False)
    backend = Cramped(make_spec())
    assert backend._lane._workspace.numel() == 8320
    backend.plan(decodes([1], [2]))
    assert backend.run(0, *inputs(backend.spec, 2)).isfinite().all()


PREFIX = list(range(1, 65))


@pytest.mark.parametrize(
    ("rows", "prefix", "others", "changes", "shared"),
    [
        (8, 64, [], {}, 64),
        (9, 64, [], {}, 64),
        (8, 63, [], {}, 0),  # 252 tokens
        (7, 64, [], {}, 0),
        (8, 64, [[200] * 70], {}, 0),  # one row has nothing of it
        (8, 64, [[*PREFIX[:63], 200, 201]], {}, 0),
        (8, 64, [[*PREFIX[:64], 200]], {}, 64),
        (8, 64, [], {"window": 300}, 0),
    ],
)
def test_a_common_prefix_is_read_together_from_8_rows_and_256_tokens_on(
    rows: int, prefix: int, others: list[list[int]], changes: dict[str, Any], shared: int
) -> None:
    backend = FlashInferOverDouble(make_spec(**changes))
    own = iter(range(100, 140))
    tables = [[*PREFIX[:prefix], *(next(own) for _ in range(1 + row % 3))] for row in range(rows)]
    assert backend._shared_blocks(decodes(*tables, *others)) == shared


def test_a_prefix_is_cut_off_every_row() -> None:
    it = decodes([1, 2, 3], [1, 2, 4, 5], [1, 2, 6])
    assert [common_prefix(it, at_least=n) for n in (1, 2, 3)] == [2, 2, 0]
    indptr, indices = without_prefix(it.kv_indptr, it.kv_indices, 2)
    assert (indptr.tolist(), indices.tolist()) == ([0, 1, 3, 4], [3, 4, 5, 6])
    assert (indptr.dtype, indices.dtype) == (torch.int32, torch.int32)


def test_what_is_too_large_for_8_bits_is_stored_as_the_largest_number() -> None:
    for backend in (FlashInferOverDouble, ReferenceAttention):
        it = backend(make_spec(cache_dtype="float8_e4m3fn", k_scale=0.5, v_scale=2.0))
        it.plan(decodes([3]))
        k = torch.tensor([1000.0, -1e5, 224.0, 1.0] * 16).expand(1, 2, 64).bfloat16()
        it.run(0, torch.zeros(1, 4, 64).bfloat16(), k, k)
        keys, values = (x[3, 3, 0, :4].float().tolist() for x in it.kv(0))
        assert keys == [448, -448, 448, 2]
        assert values == [448, -448, 112, 0.5]
        it.copy_blocks([(3, 5)])
        assert it.kv(0)[0][5, 3, 0, :4].float().tolist() == keys


def test_positions_are_those_of_the_plan() -> None:
    for backend in (FlashInferOverDouble, GraphsOverDouble, PersistentOverDouble, ReferenceAttention):
        it = backend(make_spec())
        it.plan(batch(([7], 1, 1), ([4, 9], 6, 3)))
        assert it.positions.tolist() == [0, 3, 4, 5]
        it.plan(decodes([1], [2, 3]))
        assert it.positions.tolist() == [3, 7]
        assert it.positions.dtype is torch.int64


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
