"""A lane on FlashInfer's BatchAttention: one persistent kernel a layer for all rows, decodes or not."""

from __future__ import annotations

import torch
from torch import Tensor

from kvproof.attention.flashinfer_lane import Lane
from kvproof.attention.flashinfer_package import Kernels
from kvproof.attention.plan import BatchPlan
from kvproof.attention.spec import CacheSpec


class PersistentLane(Lane):
    """It has no windows, buffers for CUDA graphs or scales of an 8-bit cache that are numbers, and brings 384 MiB of
    workspace of its own. Its `plan` waits for the device, so steps can't be planned ahead."""

    def __init__(self, spec: CacheSpec, kernels: Kernels, workspace: Tensor) -> None:
        super().__init__(spec, kernels, workspace)
        self._attention = kernels.persistent(kv_layout=spec.layout, device=spec.device)
        self._step = {name: self._common[name] for name in PLANNED}
        self._empty = True

    def _submit(self, batch: BatchPlan, shared: int) -> None:
        rows = batch.seq_lens > 0  # what it makes of empty rows is not documented
        self._empty = not rows.any()
        if not self._empty:
            first = torch.zeros(1, dtype=torch.int32, device="cpu")
            qo_indptr, kv_indptr, seq_lens, indices = self._stage(
                torch.cat((first, batch.qo_indptr[1:][rows])),
                torch.cat((first, batch.kv_indptr[1:][rows])),
                batch.seq_lens[rows],
                batch.kv_indices,
            )
            # It keeps the indices that it is given for its kernel, and copies the others itself.
            on_device = torch.empty(indices.shape, dtype=torch.int32, device=self._spec.device)
            self._kernels.copy(on_device, indices)
            self._attention.plan(
                qo_indptr=qo_indptr,
                kv_indptr=kv_indptr,
                kv_indices=on_device,
                kv_len_arr=seq_lens,
                head_dim_qk=self._spec.head_size,
                head_dim_vo=self._spec.head_size,
                causal=True,
                **self._step,
            )
        self._place_tokens(batch, torch.empty((3, batch.num_tokens), dtype=torch.int64, device=self._spec.device))

    def run(self, q: Tensor, cache: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        if not self._empty:
            # The cap is planned for and then given again: left out here, it is 0.
            self._attention.run(q=q, kv_cache=cache, out=out, lse=lse, logits_soft_cap=self._common["logits_soft_cap"])


PLANNED = (
    "num_qo_heads",
    "num_kv_heads",
    "page_size",
    "sm_scale",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
)
"""Those of the wrappers' common arguments that BatchAttention has."""
