"""FlashInfer's wrappers as the double has them: see `kvproof.fuzz.flashinfer_double`."""

from __future__ import annotations

from functools import partial
from math import log2
from typing import Any

import torch
from torch import Tensor

from kvproof.attention.flashinfer_package import Kernels
from kvproof.fuzz.flashinfer_kernel import Rows, require
from kvproof.fuzz.flashinfer_stream import Stream, StreamEvent
from kvproof.fuzz.flashinfer_wrapper import Wrapper


class DecodeDouble(Wrapper):
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper`."""

    def __init__(
        self,
        stream: Stream,
        *,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__(stream, **options)
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph:
            indptr, indices, last = (buffer for buffer in buffers if buffer is not None)
            for buffer in (indptr, indices, last):
                require(buffer.dtype is torch.int32 and buffer.is_contiguous(), "graph-buffers", buffer.dtype)
            require(len(indptr) == len(last) + 1, "graph-buffers", f"{len(indptr)} of indptr, {len(last)} rows")
            self._fixed = Rows(torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last)
        else:
            require(not any(buffer is not None for buffer in buffers), "graph-buffers", "they would be ignored")

    def plan(self, *, indptr: Tensor, indices: Tensor, last_page_len: Tensor, head_dim: int, **common: Any) -> None:
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        if self._fixed is not None:
            rows, room = len(self._fixed.kv_last_page_len), len(self._fixed.kv_indices)
            require(len(last_page_len) == rows, "graph-rows", f"{len(last_page_len)}, made for {rows}")
            require(len(indices) <= room, "graph-indices", f"{len(indices)}, there is room for {room}")
            in_place = indices.data_ptr() == self._fixed.kv_indices.data_ptr()
            require(in_place, "blocking-plan", "indices on the host are copied blocking into a graph's buffer")
        self._keep(Rows(one_each, indptr, indices, last_page_len), head_dim=head_dim, causal=False, **common)


class PrefillDouble(Wrapper):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        head_dim_qk: int,
        causal: bool,
        **common: Any,
    ) -> None:
        rows = Rows(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._keep(rows, head_dim=head_dim_qk, causal=causal, **common)


class PersistentDouble:
    """`flashinfer.BatchAttention`. Brings its own workspace, and waits for the device in `plan`."""

    def __init__(self, stream: Stream, *, kv_layout: str, device: str) -> None:
        self._stream = stream
        workspace = torch.zeros(16, dtype=torch.uint8, device=device)
        self._inner = PrefillDouble(stream, float_workspace_buffer=workspace, kv_layout=kv_layout, backend="fa2")
        self._inner._workspace_bytes = 384 * 2**20

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        **common: Any,
    ) -> None:
        self._stream.wait()
        require(head_dim_vo == head_dim_qk, "head-size", f"{head_dim_qk}, {head_dim_vo}")
        require(bool((kv_len_arr > 0).all()), "empty-row", "what it makes of one is not documented")
        self._soft_cap = logits_soft_cap
        last_page_len = kv_len_arr - (kv_indptr.diff() - 1) * page_size
        self._inner.plan(
            qo_indptr=qo_indptr,
            paged_kv_indptr=kv_indptr,
            paged_kv_indices=kv_indices,
            paged_kv_last_page_len=last_page_len.int(),
            head_dim_qk=head_dim_qk,
            page_size=page_size,
            window_left=-1,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            o_data_type=q_data_type,
            non_blocking=True,
            **common,
        )

    def run(self, *, q: Tensor, kv_cache: Tensor, out: Tensor, lse: Tensor | None, logits_soft_cap: float) -> None:
        require(logits_soft_cap == self._soft_cap, "soft-cap", f"{logits_soft_cap}, planned {self._soft_cap}")
        self._inner.run(q=q, paged_kv_cache=kv_cache, out=out, lse=lse, return_lse=lse is not None)


def merge(stream: Stream, *, v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
    """`flashinfer.merge_state_in_place`: v [T, heads, head_dim] and s [T, heads], float32 and base 2."""
    for name, tensor, like in (("v_other", v_other, v), ("s_other", s_other, s)):
        require(tensor.shape == like.shape and tensor.dtype is like.dtype, "merge", f"{name} {tuple(tensor.shape)}")
    for tensor in (v, s, v_other, s_other):
        require(tensor.is_contiguous(), "merge", "not contiguous")
    require(s.dtype is torch.float32 and s.shape == v.shape[:2], "merge", f"s is {s.dtype} {tuple(s.shape)}")

    def kernel() -> None:
        both = torch.stack((s, s_other)).double() * (1 / log2(torch.e))
        weights = both.softmax(0).unsqueeze(-1)
        v.copy_(weights[0] * v.double() + weights[1] * v_other.double())
        s.copy_(both.logsumexp(0) * log2(torch.e))

    stream.submit(kernel)
    stream.flush()


def doubles(stream: Stream) -> Kernels:
    """All that the driver takes, on `stream`."""
    return Kernels(
        prefill=partial(PrefillDouble, stream),
        decode=partial(DecodeDouble, stream),
        persistent=partial(PersistentDouble, stream),
        merge=partial(merge, stream),
        copy=stream.copy,
        event=partial(StreamEvent, stream),
        pin_memory=False,
    )
