"""Paged attention by FlashInfer, on NVIDIA GPUs.

Not run on a GPU yet: docs/flashinfer.md says what has been verified instead, and how.
"""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

import torch
from torch import Tensor

from kvproof.attention.base import AttentionBackend, Capabilities
from kvproof.attention.flashinfer_lane import Lane, WorkspaceTooSmall
from kvproof.attention.flashinfer_package import NAME, Kernels, load
from kvproof.attention.plan import BatchPlan
from kvproof.attention.spec import CacheSpec

__all__ = ["FlashInferAttention", "WorkspaceTooSmall"]

NUM_LANES = 2
"""With two, a step is planned while the one before it runs. A third would only let the host run further ahead."""


class FlashInferAttention(AttentionBackend):
    """Plans each step once for all layers, decodes and other rows apart; see `Lane` for the choice of kernels.

    New keys and values go through the slot mapping, as in every backend, and not through FlashInfer's
    `append_paged_kv_cache`. That one takes keys of another dtype than the cache's and stores their bytes
    unconverted, fails on a step without tokens, and needs two more arrays a step; the slot mapping has been
    validated against the block tables.

    Not supported: CUDA graphs, cascade, attention sinks (the wrappers used here accept them and ignore them),
    8-bit caches.
    """

    name = NAME
    priority = -1  # only when named, until it has run on a GPU

    workspace_bytes: ClassVar[int] = 128 * 2**20
    """Scratch memory for partial results of rows that are split among multiprocessors, shared by all kernels.

    What FlashInfer recommends. Outside CUDA graphs a split makes no more tiles than the GPU runs at once, two a
    multiprocessor, of at most 128 queries: 35 MB on 132 multiprocessors at head size 256.
    """

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({"bfloat16", "float16"}),
            head_sizes=frozenset({64, 128, 256}),
            features=frozenset({"custom_scale", "window", "soft_cap"}),
        )

    @classmethod
    def probe(cls) -> None:
        """Imports flashinfer where there are a GPU and a supported release: some can't be imported."""
        load("cuda")

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        kernels = self._kernels()
        workspace = torch.zeros(self.workspace_bytes, dtype=torch.uint8, device=spec.device)  # zeroed for its first use
        self._lanes = deque(Lane(spec, kernels, workspace) for _ in range(NUM_LANES))

    def _kernels(self) -> Kernels:
        return load(self.spec.device)

    def attend_lse(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """`run` without the write, and beside its result the log-sum-exp of each query's scores.

        The latter is float32 [T, num_heads], a natural logarithm: what merges attention over parts of a sequence.
        Raises `InvalidArgument` on a q that does not fit, and `NotPlanned`.
        """
        self._check("q", q, (self.batch.num_tokens, self.spec.num_heads, self.spec.head_size))
        out, lse = self._empty(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        self._lanes[-1].run(q.contiguous(), self.cache[layer], out, lse)
        return out, lse.mul_(math.log(2))  # FlashInfer's is base 2

    def _plan(self, batch: BatchPlan) -> None:
        # The lane of the step before last. Should it refuse, the last one's plan stands.
        self._lanes[0].plan(batch)
        self._lanes.rotate(-1)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        out = self._empty(q)
        # The kernel takes a head's elements for contiguous, and does not check.
        self._lanes[-1].run(q.contiguous(), self.cache[layer], out)
        return out

    @staticmethod
    def _empty(q: Tensor) -> Tensor:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
