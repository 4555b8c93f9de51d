"""One lane of the FlashInfer driver: its wrappers, and the host memory that their plans are copied from.

A wrapper's `plan` does not finish its work. It submits copies of the metadata, and of a schedule that it keeps in
pinned memory of its own, and returns; the device reads both later. Writing either before that corrupts a step that
was planned earlier (vllm#23737, vllm#40756, mini-sglang#103). So a lane is planned again only when its copies are
done, and a driver with two lanes can plan a step while the one before it has yet to run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from kvproof.allocator.errors import KvproofError
from kvproof.attention.base import token_index
from kvproof.attention.flashinfer_cascade import without_prefix
from kvproof.attention.flashinfer_package import Kernels
from kvproof.attention.plan import BatchPlan
from kvproof.attention.spec import CacheSpec


class WorkspaceTooSmall(KvproofError, RuntimeError):
    """FlashInfer's scratch memory can't hold a step's partial results; the message has both figures."""


class Lane(ABC):
    """Plans a step for all layers, and attends in it."""

    def __init__(self, spec: CacheSpec, kernels: Kernels, workspace: Tensor) -> None:
        """`workspace` is uint8 on the cache's device. Lanes may share it: their kernels run in one stream's order."""
        self._spec = spec
        self._kernels = kernels
        self._event = kernels.event()
        self._workspace = workspace
        self._host: dict[torch.dtype, Tensor] = {}
        self.tokens = torch.empty((3, 0), dtype=torch.int64, device="cpu")
        """`token_index` of the planned step, on the cache's device."""
        # Everything by keyword, because the positions have moved between releases; and every dtype, because the
        # wrappers take one that is left out for float16. What a step does not change is kept here.
        self._common = {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "page_size": spec.block_size,
            # A window of 1 is the token itself; window_left counts the tokens before it.
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.soft_cap or 0.0,
            "sm_scale": spec.softmax_scale,
            "q_data_type": spec.torch_dtype,
            "kv_data_type": spec.torch_cache_dtype,
            "o_data_type": spec.torch_dtype,
        }
        self._scales = {} if spec.cache_dtype is None else {"k_scale": spec.k_scale, "v_scale": spec.v_scale}

    def plan(self, batch: BatchPlan, shared: int = 0) -> None:
        """Plan a validated batch. Waits for the copies of the lane's last plan. Raises `WorkspaceTooSmall`.

        All decodes begin with the same `shared` blocks, which they may read together.
        """
        self._event.synchronize()
        try:
            self._submit(batch, shared)
        finally:
            self._event.record()

    @abstractmethod
    def _submit(self, batch: BatchPlan, shared: int) -> None:
        """Submit all copies of the step, and set `tokens`."""

    @abstractmethod
    def run(self, q: Tensor, cache: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend with the planned step's queries q [T, num_heads, head_size] over one layer of the cache.

        Fills out, of q's shape, and lse [T, num_heads] float32: base-2 logarithms of the sums of exponentials.
        """

    def _run_wrapper(self, wrapper: Any, q: Tensor, cache: Tensor, out: Tensor, lse: Tensor | None) -> None:
        wrapper.run(q=q, paged_kv_cache=cache, out=out, lse=lse, return_lse=lse is not None, **self._scales)

    def _plan_wrapper(self, wrapper: Any, **step: Any) -> None:
        try:
            wrapper.plan(**step, **self._common, non_blocking=True)
        except RuntimeError as error:
            if "Buffer overflow" not in str(error):
                raise
            size = self._workspace_needed(wrapper, **step)
            needed = f"it needs {size}" if size else str(error).splitlines()[0]
            raise WorkspaceTooSmall(
                f"FlashInfer's workspace of {self._workspace.numel()} bytes is too small for this step ({needed}); "
                "set FlashInferAttention.workspace_bytes higher"
            ) from error

    def _workspace_needed(self, wrapper: Any, **step: Any) -> int:
        """What FlashInfer says that a plan of `step` needs; 0 where it can't say, as before release 0.6.18."""
        size = getattr(wrapper, "workspace_size", None)
        try:
            return int(size(**step, **self._common)[0]) if size else 0
        except NotImplementedError:  # not in every compiled kernel
            return 0

    def _place_tokens(self, batch: BatchPlan, tokens: Tensor) -> None:
        """Copy `token_index` to the device without waiting."""
        index = token_index(batch, self._spec.block_size)
        self._kernels.copy(tokens, self._stage(index.flatten())[0].view_as(index))
        self.tokens = tokens

    def _stage(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        """Copies of arrays of one dtype in the lane's own memory: pinned, so that the device fetches them by itself.

        One call per step and dtype: the next one writes the same memory.
        """
        sizes, dtype = [array.numel() for array in arrays], arrays[0].dtype
        memory = self._host.get(dtype)
        if memory is None or sum(sizes) > memory.numel():
            # Twice what is needed, because a batch that grows by a block a step would pin memory at every one.
            memory = torch.empty(2 * sum(sizes), dtype=dtype, pin_memory=self._kernels.pin_memory, device="cpu")
            self._host[dtype] = memory
        return torch.split(torch.cat(arrays, out=memory[: sum(sizes)]), sizes)


class StepLane(Lane):
    """Attention of any step: its decodes in one kernel launch a layer, the other rows in another.

    Decodes run FA2 kernels with tensor cores: they take every group size, page size, window and cap that a `CacheSpec`
    can ask for. The decode kernel without tensor cores refuses group sizes such as 5, 7 and 9. What "auto" takes
    depends on the GPU and on a wrapper's first plan. Other rows run FA2, or FA3 where the driver was told so.

    Decodes with a common prefix attend to it together, as the queries of one row of a prefill, and each to what
    follows in its own blocks; the two results are merged by their log-sum-exps. That reads the prefix once instead
    of once a row. FlashInfer's MultiLevelCascadeAttentionWrapper does the same with kernels that it chooses itself.
    """

    def __init__(self, spec: CacheSpec, kernels: Kernels, workspace: Tensor, prefill: Literal["fa2", "fa3"]) -> None:
        super().__init__(spec, kernels, workspace)
        self._num_decodes = 0
        self._cascades = False
        self._decode = kernels.decode(
            float_workspace_buffer=workspace, kv_layout=spec.layout, use_tensor_cores=True, backend="fa2"
        )
        self._prefill = kernels.prefill(float_workspace_buffer=workspace, kv_layout=spec.layout, backend=prefill)

    @cached_property
    def _shared(self) -> Any:
        """For common prefixes. Made when one first comes: every wrapper takes 16 MiB of its own."""
        return self._kernels.prefill(float_workspace_buffer=self._workspace, kv_layout=self._spec.layout, backend="fa2")

    def _submit(self, batch: BatchPlan, shared: int) -> None:
        decodes, blocks = batch.num_decodes, int(batch.kv_indptr[batch.num_decodes])
        qo_indptr, indptr, indices, last, *decode = self._stage(
            batch.qo_indptr[decodes:] - decodes,
            batch.kv_indptr[decodes:] - blocks,
            batch.kv_indices[blocks:],
            batch.kv_last_page_len[decodes:],
            *without_prefix(batch.kv_indptr[: decodes + 1], batch.kv_indices[:blocks], shared),
            batch.kv_last_page_len[:decodes],
            # The common prefix: the decodes are its queries.
            torch.tensor([0, decodes, 0, shared, self._spec.block_size], dtype=torch.int32, device="cpu"),
            batch.kv_indices[:shared],
        )
        head_size = self._spec.head_size
        if decodes:
            self._plan_wrapper(
                self._decode, indptr=decode[0], indices=decode[1], last_page_len=decode[2], head_dim=head_size
            )
        if shared:
            self._plan_wrapper(
                self._shared,
                qo_indptr=decode[3][:2],
                paged_kv_indptr=decode[3][2:4],
                paged_kv_indices=decode[4],
                paged_kv_last_page_len=decode[3][4:],
                head_dim_qk=head_size,
                causal=False,
            )
        if batch.num_tokens > decodes:
            self._plan_wrapper(
                self._prefill,
                qo_indptr=qo_indptr,
                paged_kv_indptr=indptr,
                paged_kv_indices=indices,
                paged_kv_last_page_len=last,
                head_dim_qk=head_size,
                causal=True,
            )
        self._place_tokens(batch, torch.empty((3, batch.num_tokens), dtype=torch.int64, device=self._spec.device))
        self._num_decodes, self._cascades = decodes, shared > 0

    def run(self, q: Tensor, cache: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        decodes = slice(self._num_decodes)
        if self._cascades:
            if lse is None:
                lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            self._run_cascade(q[decodes], cache, out[decodes], lse[decodes])
            wrappers = [(self._prefill, slice(self._num_decodes, None))]
        else:
            wrappers = [(self._decode, decodes), (self._prefill, slice(self._num_decodes, None))]
        for wrapper, rows in wrappers:
            if len(q[rows]):
                self._run_wrapper(wrapper, q[rows], cache, out[rows], None if lse is None else lse[rows])

    def _run_cascade(self, q: Tensor, cache: Tensor, out: Tensor, lse: Tensor) -> None:
        shared, shared_lse = torch.empty_like(out), torch.empty_like(lse)
        self._run_wrapper(self._decode, q, cache, out, lse)
        self._run_wrapper(self._shared, q, cache, shared, shared_lse)
        self._kernels.merge(v=out, s=lse, v_other=shared, s_other=shared_lse)
