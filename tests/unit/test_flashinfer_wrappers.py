"""The driver over the real package's Python, with the compiled kernels replaced: skipped where it isn't installed.

    pip install --no-deps flashinfer-python==0.6.6 apache-tvm-ffi nvidia-ml-py requests tqdm

What a wrapper hands to its kernel module is computed on as it is, so a wrong argument anywhere gives wrong numbers.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvproof.attention import BatchPlan
from kvproof.attention.flashinfer import FlashInferFA3, FlashInferPersistent
from kvproof.attention.flashinfer_package import Kernels
from kvproof.fuzz.dense import dense
from kvproof.fuzz.flashinfer_double import FlashInferOnCPU
from kvproof.fuzz.flashinfer_examples import make_spec, run_example
from kvproof.fuzz.flashinfer_kernel import Rows, attend
from kvproof.fuzz.flashinfer_stream import Stream, StreamEvent
from kvproof.fuzz.flashinfer_wrappers import merge

CAUSAL, NON_CAUSAL = 1, 0  # flashinfer.utils.MaskMode
NHD = 0  # flashinfer.utils.TensorLayout


def imported() -> ModuleType:
    try:
        import flashinfer
    except Exception as error:  # some releases fail with an AssertionError on a CPU build of torch
        pytest.skip(f"flashinfer-python can't be imported: {type(error).__name__}: {error}".splitlines()[0])
    return flashinfer


class FakeModule:
    """What `get_batch_prefill_module` returns: `plan` and `paged_run` by position, as the wrappers call the C++."""

    def __init__(
        self, backend: str, q: Any, kv: Any, o: Any, index: Any, head_dim: int, head_dim_vo: int, *variant: Any
    ) -> None:
        position, self.window, self.soft_cap, fp16_reduction = variant[:4]
        assert (index, head_dim_vo) == (torch.int32, head_dim)
        assert backend == "fa2" or (backend == "fa3" and q == kv)
        assert (position, fp16_reduction, any(variant[4:])) == (0, False, False)
        self.dtypes = (q, kv, o)
        self.sizes: dict[str, Any] = {}

    def plan(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        total_rows: int,
        batch: int,
        heads: int,
        kv_heads: int,
        page_size: int,
        graph: bool,
        head_dim: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int = -1,  # from here on not with FA3
        disable_split: bool = False,
        *rest: Any,
    ) -> Any:
        assert int_workspace.data_ptr() != pinned.data_ptr()
        assert all(array.dtype is torch.int32 and array.device.type == "cpu" for array in (qo_indptr, kv_indptr))
        assert (len(qo_indptr), len(kv_indptr), len(kv_lens), qo_indptr[-1]) == (
            batch + 1,
            batch + 1,
            batch,
            total_rows,
        )
        assert (fixed_split_size, disable_split) == (-1, False)
        assert (window_left >= 0) == self.window
        # The scheduler takes lengths from here and the kernel from last_page_len: they must not disagree.
        self.planned = {
            "kv_lens": kv_lens.clone(),
            "causal": causal,
            "window_left": window_left,
            "page_size": page_size,
            "graph": graph,
        }
        self.shape, self.page_shape = (total_rows, heads, head_dim), (page_size, kv_heads, head_dim)
        return [batch]

    def workspace_size(
        self,
        float_workspace: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        total_rows: int,
        *rest: Any,
    ) -> tuple[int, int]:
        assert (len(qo_indptr), qo_indptr[-1], rest[4]) == (total_rows + 1, total_rows, True)  # for a graph
        return 2**20 + 16 * total_rows, 0

    def paged_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan_info: Any,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        custom_mask: Any,
        mask_indptr: Any,
        alibi: Any,
        prefix_len: Any,
        token_pos: Any,
        max_item_len: Any,
        soft_cap: float,
        scale: float,
        *rest: Any,
    ) -> None:
        planned = self.planned
        assert (q.shape, q.dtype, keys.dtype, out.dtype) == (self.shape, *self.dtypes)
        assert (mask_mode == CAUSAL) == planned["causal"]
        assert window_left == planned["window_left"]
        assert (soft_cap > 0) == self.soft_cap
        assert (custom_mask, mask_indptr, prefix_len, token_pos, max_item_len) == (None,) * 5
        if layout != NHD:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        assert keys.shape[1:] == values.shape[1:] == self.page_shape
        assert q.is_contiguous()
        if planned["graph"]:  # the buffer, which may be longer
            kv_indices = kv_indices[: int(kv_indptr[-1])]
        rows = Rows(qo_indptr, kv_indptr, kv_indices, last_page_len)
        rows.check(planned["page_size"], causal=planned["causal"])
        lengths = (kv_indptr.diff() - 1).clamp(min=0) * planned["page_size"] + last_page_len
        assert torch.equal(planned["kv_lens"], lengths)
        attend(
            rows,
            q,
            keys,
            values,
            out,
            lse,
            causal=mask_mode == CAUSAL,
            window_left=window_left,
            soft_cap=soft_cap,
            scale=scale,
        )


class FakePersistentModule:
    """What `get_holistic_attention_module` returns."""

    def __init__(self, q: Any, kv: Any, o: Any, index: Any, head_dim: int, head_dim_vo: int, *variant: Any) -> None:
        position, self.soft_cap, profiler = variant
        assert (index, head_dim_vo, position, profiler) == (torch.int32, head_dim, 0, False)
        self.dtypes = (q, kv, o)

    def plan(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        batch: int,
        heads: int,
        kv_heads: int,
        head_dim_vo: int,
        causal: bool,
    ) -> Any:
        assert (len(qo_indptr), len(kv_indptr), len(kv_lens)) == (batch + 1, batch + 1, batch)
        self.planned = qo_indptr.clone(), kv_indptr.clone(), kv_lens.clone()
        return []

    def run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan_info: Any,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        kv_indices: Tensor,
        out: Tensor,
        lse: Tensor,
        mask_mode: int,
        layout: int,
        heads: int,
        kv_heads: int,
        page_size: int,
        v_scale: float,
        scale: float,
        soft_cap: float,
        *rest: Any,
    ) -> None:
        assert not any(rest)
        assert (q.dtype, keys.dtype, out.dtype) == self.dtypes
        assert (soft_cap > 0, v_scale) == (self.soft_cap, 1.0)
        if layout != NHD:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        assert (q.shape[1], *keys.shape[1:3]) == (heads, page_size, kv_heads)
        qo_indptr, kv_indptr, kv_lens = self.planned
        rows = Rows(qo_indptr, kv_indptr, kv_indices, kv_lens - (kv_indptr.diff() - 1) * page_size)
        rows.check(page_size, causal=True)
        causal = mask_mode == CAUSAL
        attend(rows, q, keys, values, out, lse, causal=causal, window_left=-1, soft_cap=soft_cap, scale=scale)


@pytest.fixture(scope="module")
def wrappers(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[ModuleType]:
    """The real package, its kernel modules faked and its pinned memory ordinary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path_factory.mktemp("flashinfer")))  # else the home folder
        package = imported()
        import flashinfer.decode
        import flashinfer.prefill

        persistent = sys.modules[package.BatchAttention.__module__]
        patch.setattr(persistent, "get_holistic_attention_module", FakePersistentModule)
        # A later release loads another one for keys and values of different strides.
        patch.setattr(persistent, "get_holistic_attention_independent_module", lambda *_: None, raising=False)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        empty = torch.empty
        for module in (flashinfer.decode, flashinfer.prefill):
            patch.setattr(module, "get_batch_prefill_module", FakeModule)
            patch.setattr(module, "device_support_pdl", lambda _: False)
        patch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
        yield package


class OverRealWrappers(FlashInferOnCPU):
    workspace_bytes = 2**20
    wrappers: Any

    def _kernels(self) -> Kernels:
        stream = Stream()
        return Kernels(
            prefill=self.wrappers.BatchPrefillWithPagedKVCacheWrapper,
            decode=self.wrappers.BatchDecodeWithPagedKVCacheWrapper,
            event=lambda: StreamEvent(stream),
            persistent=self.wrappers.BatchAttention,
            merge=partial(merge, stream),
            copy=stream.copy,
            pin_memory=False,
        )


class GraphsOverRealWrappers(OverRealWrappers):
    graph_sizes = (1, 2, 4, 8)


class CascadeOverRealWrappers(OverRealWrappers):
    cascade_rows = 2
    cascade_tokens = 1


class FA3OverRealWrappers(OverRealWrappers, FlashInferFA3):
    """FA3 kernels for prefills."""


class PersistentOverRealWrappers(OverRealWrappers, FlashInferPersistent):
    """BatchAttention for everything."""


def test_graphs_get_the_workspace_that_the_real_package_asks_for(wrappers: ModuleType) -> None:
    OverRealWrappers.wrappers = wrappers
    can_say = hasattr(wrappers.BatchDecodeWithPagedKVCacheWrapper, "workspace_size")
    workspace = GraphsOverRealWrappers(make_spec())._lane._workspace
    assert workspace.numel() == 2**20 + (16 * 8 if can_say else 0)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        (OverRealWrappers, {}),
        (GraphsOverRealWrappers, {}),
        (CascadeOverRealWrappers, {"dtype": "float16", "atol": 2**-8, "window": None}),
        (FA3OverRealWrappers, {"cache_dtype": None}),
        (PersistentOverRealWrappers, {"cache_dtype": None, "window": None}),
    ],
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_the_real_wrappers_hand_on_what_the_driver_means(
    wrappers: ModuleType, backend: type[OverRealWrappers], options: dict[str, Any], seed: int
) -> None:
    OverRealWrappers.wrappers = wrappers
    run_example(backend, seed, **options)


def test_the_real_wrappers_return_the_log_sum_exp(wrappers: ModuleType) -> None:
    OverRealWrappers.wrappers = wrappers
    spec = make_spec()
    backend = OverRealWrappers(spec)
    backend.plan(BatchPlan.build([array("i", [7]), array("i", [4, 9])], [1, 6], [1, 6], 4))
    q = torch.randn(7, 4, 64).bfloat16()
    k, v = torch.randn(2, 7, 2, 64).bfloat16()
    backend.run(1, q, k, v)
    right = torch.cat([dense(spec, q[rows], k[rows], v[rows])[1] for rows in (slice(1), slice(1, None))])
    torch.testing.assert_close(backend.attend_lse(1, q)[1].double(), right, rtol=1e-6, atol=1e-6)
