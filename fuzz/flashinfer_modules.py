"""What the real package's wrappers take for their compiled kernel modules: computes on what it is handed.

Each is made, planned and run by position, as the package's own Python does; what reaches it must fit together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvproof.fuzz.flashinfer_kernel import Rows, attend

CAUSAL = 1  # flashinfer.utils.MaskMode
NHD = 0  # flashinfer.utils.TensorLayout


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
        self.planned: dict[str, Any] = {}

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
        assert (len(qo_indptr), len(kv_indptr), len(kv_lens), int(qo_indptr[-1])) == (
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
        assert (len(qo_indptr), int(qo_indptr[-1]), rest[4]) == (total_rows + 1, total_rows, True)  # for a graph
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
