"""One lane of the FlashInfer driver: a pair of wrappers and the host memory that their plans are copied from.

A wrapper's `plan` does not finish its work. It submits copies of the metadata, and of a schedule that it keeps in
pinned memory of its own, and returns; the device reads both later. Writing either before that corrupts a step that
was planned earlier (vllm#23737, vllm#40756, mini-sglang#103). So a lane is planned again only when its copies are
done, and a driver with two lanes can plan a step while the one before it has yet to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvproof.allocator.errors import KvproofError
from kvproof.attention.flashinfer_package import Kernels
from kvproof.attention.plan import BatchPlan
from kvproof.attention.spec import CacheSpec


class WorkspaceTooSmall(KvproofError, RuntimeError):
    """FlashInfer's scratch memory can't hold a step's partial results; the message has both figures."""


class Lane:
    """Attention of one planned step: its decodes in one kernel launch a layer, the other rows in another.

    Both wrappers run FA2 kernels, the decodes with tensor cores: they take every group size, page size, window and cap
    that a `CacheSpec` can ask for. The decode kernel without tensor cores refuses group sizes such as 5, 7 and 9. What
    "auto" takes depends on the GPU and on a wrapper's first plan; FA3, which it prefers for prompts on Hopper, may be
    faster there, which is for a GPU to show.
    """

    def __init__(self, spec: CacheSpec, kernels: Kernels, workspace: Tensor) -> None:
        """`workspace` is uint8 on the cache's device. Lanes may share it: their kernels run in one stream's order."""
        self._spec = spec
        self._pin_memory = kernels.pin_memory
        self._event = kernels.event()
        self._workspace_bytes = workspace.numel()
        self._host = torch.empty(0, dtype=torch.int32)
        self._num_decodes = 0
        self._decode = kernels.decode(
            float_workspace_buffer=workspace, kv_layout=spec.layout, use_tensor_cores=True, backend="fa2"
        )
        self._prefill = kernels.prefill(float_workspace_buffer=workspace, kv_layout=spec.layout, backend="fa2")
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
            "kv_data_type": spec.torch_dtype,
            "o_data_type": spec.torch_dtype,
            "non_blocking": True,
        }

    def plan(self, batch: BatchPlan) -> None:
        """Plan a validated batch. Waits for the copies of the lane's last plan. Raises `WorkspaceTooSmall`."""
        self._event.synchronize()
        decodes, blocks = batch.num_decodes, int(batch.kv_indptr[batch.num_decodes])
        qo_indptr, indptr, indices, last, *decode = self._stage(
            (
                batch.qo_indptr[decodes:] - decodes,
                batch.kv_indptr[decodes:] - blocks,
                batch.kv_indices[blocks:],
                batch.kv_last_page_len[decodes:],
                batch.kv_indptr[: decodes + 1],
                batch.kv_indices[:blocks],
                batch.kv_last_page_len[:decodes],
            )
        )
        try:
            if decodes:
                self._plan_wrapper(
                    self._decode,
                    indptr=decode[0],
                    indices=decode[1],
                    last_page_len=decode[2],
                    head_dim=self._spec.head_size,
                )
            if batch.num_tokens > decodes:
                self._plan_wrapper(
                    self._prefill,
                    qo_indptr=qo_indptr,
                    paged_kv_indptr=indptr,
                    paged_kv_indices=indices,
                    paged_kv_last_page_len=last,
                    head_dim_qk=self._spec.head_size,
                    causal=True,
                )
        finally:
            self._event.record()
        self._num_decodes = decodes

    def run(self, q: Tensor, cache: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend with the planned step's queries q [T, num_heads, head_size] over one layer of the cache.

        Fills out, of q's shape, and lse [T, num_heads] float32: base-2 logarithms of the sums of exponentials.
        """
        decodes = self._num_decodes
        for wrapper, rows in ((self._decode, slice(decodes)), (self._prefill, slice(decodes, None))):
            if len(q[rows]):
                wrapper.run(
                    q=q[rows],
                    paged_kv_cache=cache,
                    out=out[rows],
                    lse=None if lse is None else lse[rows],
                    return_lse=lse is not None,
                )

    def _plan_wrapper(self, wrapper: Any, **step: Any) -> None:
        try:
            wrapper.plan(**step, **self._common)
        except RuntimeError as error:
            if "Buffer overflow" not in str(error):
                raise
            raise WorkspaceTooSmall(
                f"FlashInfer's workspace of {self._workspace_bytes} bytes is too small for this step "
                f"({str(error).splitlines()[0]}); set FlashInferAttention.workspace_bytes higher"
            ) from error

    def _stage(self, arrays: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Copies of int32 arrays in the lane's own memory: pinned, so that the device can fetch them by itself."""
        sizes = [array.numel() for array in arrays]
        if sum(sizes) > self._host.numel():
            # Twice what is needed, because a batch that grows by a block a step would pin memory at every one.
            self._host = torch.empty(2 * sum(sizes), dtype=torch.int32, pin_memory=self._pin_memory)
        return torch.split(torch.cat(arrays, out=self._host[: sum(sizes)]), sizes)
