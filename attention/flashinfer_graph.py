"""Decodes whose metadata lies at fixed addresses, so that a CUDA graph captured over one step computes later ones.

A graph holds the addresses that its kernels read, and the number of their blocks. So for every size that is captured
there is a wrapper made for that number of rows; all metadata is copied into the same device memory each step; and a
batch of fewer rows is padded (`BatchPlan.pad`). FlashInfer's schedule of a captured step takes the same scratch memory
whatever the lengths of its rows are, so a size that was planned once can always be planned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvproof.attention.flashinfer_lane import Lane
from kvproof.attention.flashinfer_package import Kernels
from kvproof.attention.plan import BatchPlan
from kvproof.attention.spec import CacheSpec


class GraphBuffers:
    """Device memory for the metadata of one step of up to `rows` decodes, shared by the lanes of all sizes.

    They name `capacity` blocks at most: each block of the cache once, and the null block in every row. More, which
    only rows with common prefixes do, are not for a graph.
    """

    def __init__(self, spec: CacheSpec, rows: int) -> None:
        def memory(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=spec.device)

        self.capacity = spec.num_blocks + rows
        self.indptr, self.indices, self.last_page_len = memory(rows + 1), memory(self.capacity), memory(rows)
        self.tokens = memory(3 * rows, torch.int64)


class GraphLane(Lane):
    """Steps of exactly `size` decodes, padding included."""

    def __init__(self, spec: CacheSpec, kernels: Kernels, workspace: Tensor, size: int, buffers: GraphBuffers) -> None:
        super().__init__(spec, kernels, workspace)
        self._indices = buffers.indices
        self._tokens = buffers.tokens[: 3 * size].view(3, size)
        self._decode = kernels.decode(
            float_workspace_buffer=workspace,
            kv_layout=spec.layout,
            use_tensor_cores=True,
            backend="fa2",
            use_cuda_graph=True,
            paged_kv_indptr_buffer=buffers.indptr[: size + 1],
            paged_kv_indices_buffer=buffers.indices,
            paged_kv_last_page_len_buffer=buffers.last_page_len[:size],
        )

    def prepare(self) -> None:
        """Plan a step of padding, so that a workspace that is too small shows. Raises `WorkspaceTooSmall`."""
        self._plan_decodes(*self._padding())
        self._event.record()

    def workspace_bytes(self) -> int:
        """What FlashInfer says that a step needs of workspace; 0 where it can't say."""
        indptr, indices, last_page_len = self._padding()
        return self._workspace_needed(
            self._decode,
            indptr=indptr,
            indices=indices,
            last_page_len=last_page_len,
            head_dim=self._spec.head_size,
        )

    def _padding(self) -> tuple[Tensor, Tensor, Tensor]:
        each = torch.arange(self._tokens.shape[1] + 1, dtype=torch.int32, device="cpu")
        return each, torch.zeros_like(each[1:]), torch.ones_like(each[1:])

    def _submit(self, batch: BatchPlan, shared: int) -> None:
        self._plan_decodes(*self._stage(batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len))
        self._place_tokens(batch, self._tokens)

    def _plan_decodes(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
        # Into the wrapper's own buffer, where it leaves them: what it finds on the host, it copies blocking.
        on_device = self._indices[: indices.numel()]
        self._kernels.copy(on_device, indices)
        self._plan_wrapper(
            self._decode,
            indptr=indptr,
            indices=on_device,
            last_page_len=last_page_len,
            head_dim=self._spec.head_size,
        )

    def run(self, q: Tensor, cache: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        self._run_wrapper(self._decode, q, cache, out, lse)
