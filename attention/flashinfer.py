"""Paged attention by FlashInfer, on NVIDIA GPUs.

Not run on a GPU yet: docs/flashinfer.md says what has been verified instead, and how.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvproof.attention.base import AttentionBackend, Capabilities, Feature
from kvproof.attention.errors import BackendUnavailable
from kvproof.attention.flashinfer_cascade import common_prefix
from kvproof.attention.flashinfer_graph import GraphBuffers, GraphLane
from kvproof.attention.flashinfer_lane import Lane, StepLane, WorkspaceTooSmall
from kvproof.attention.flashinfer_package import NAME, Kernels, load
from kvproof.attention.flashinfer_persistent import PersistentLane
from kvproof.attention.plan import BatchPlan
from kvproof.attention.spec import CacheSpec

__all__ = ["FlashInferAttention", "FlashInferFA3", "FlashInferPersistent", "WorkspaceTooSmall"]

NUM_LANES = 2
"""With two, a step is planned while the one before it runs. A third would only let the host run further ahead."""


class FlashInferAttention(AttentionBackend):
    """Plans each step once for all layers, decodes and other rows apart; see `StepLane` for the choice of kernels.

    New keys and values go through the slot mapping, as in every backend, and not through FlashInfer's
    `append_paged_kv_cache`. That one takes keys of another dtype than the cache's and stores their bytes
    unconverted, fails on a step without tokens, and needs two more arrays a step; the slot mapping has been
    validated against the block tables.

    Not supported: attention sinks (the wrappers used here accept them and ignore them). A subclass sets other values:

        class WithGraphs(FlashInferAttention):
            graph_sizes = (1, 2, 4, 8, 16, 32)
    """

    name = NAME
    priority = -1  # only when named, until it has run on a GPU

    prefill_kernel: ClassVar[Literal["fa2", "fa3"]] = "fa2"

    workspace_bytes: ClassVar[int] = 128 * 2**20
    """Scratch memory for partial results of rows that are split among multiprocessors, shared by all kernels.

    What FlashInfer recommends. Outside CUDA graphs a split makes no more tiles than the GPU runs at once, two a
    multiprocessor, of at most 128 queries: 35 MB on 132 multiprocessors at head size 256. For graphs of 512 decodes
    with 64 query heads of size 128 its planner asked for 48 MiB. Where the package says that graphs need more, they get
    it; where it can't say, such a backend is not made.
    """

    cascade_rows: ClassVar[int] = 8
    cascade_tokens: ClassVar[int] = 256
    """Decodes read a common prefix together when there are this many and it is this long: the bounds of vLLM, which
    calls them arbitrary, for a GPU to correct. Not with a window, which would end elsewhere in each of the two parts.
    """

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({"bfloat16", "float16"}),
            head_sizes=frozenset({64, 128, 256}),
            features=frozenset({"custom_scale", "window", "soft_cap", "fp8_cache", "lse"}),
        )

    @classmethod
    def probe(cls) -> None:
        """Imports flashinfer where there are a GPU and a supported release: some can't be imported."""
        load("cuda")

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        kernels = self._kernels()
        size = self.workspace_bytes
        if self.graph_sizes:
            largest = max(self.graph_sizes)
            self._buffers = GraphBuffers(spec, largest)
            asked = GraphLane(spec, kernels, _workspace(spec, 16), largest, self._buffers)
            size = max(size, asked.workspace_bytes())
        workspace = _workspace(spec, size)
        self._lanes = deque(self._step_lane(kernels, workspace) for _ in range(NUM_LANES))
        self._lane = self._lanes[0]
        self._graph_lanes = {
            rows: GraphLane(spec, kernels, workspace, rows, self._buffers) for rows in self.graph_sizes
        }
        for lane in self._graph_lanes.values():
            lane.prepare()

    def _kernels(self) -> Kernels:
        return load(self.spec.device)

    def _step_lane(self, kernels: Kernels, workspace: Tensor) -> Lane:
        return StepLane(self.spec, kernels, workspace, self.prefill_kernel)

    def graph_rows(self, batch: BatchPlan) -> int | None:
        """The next size up for a step of decodes, unless they are too many or read a common prefix together.

        None with a window: the entries of blocks that left it name the null block, which is the padding's then.
        """
        rows = self._graph_size(batch)
        return None if rows is None or self._shared_blocks(batch) else rows

    def _plan(self, batch: BatchPlan) -> None:
        shared_blocks = self._shared_blocks(batch)
        if not shared_blocks and self._graph_size(batch) == batch.num_rows:
            lane: Lane = self._graph_lanes[batch.num_rows]
            lane.plan(batch)
        else:
            # The lane of the step before last. Should it refuse, the last one's plan stands.
            lane = self._lanes[0]
            lane.plan(batch, shared_blocks)
            self._lanes.rotate(-1)
        self._lane = lane

    def _place_tokens(self, batch: BatchPlan) -> Tensor:
        return self._lane.tokens

    def _graph_size(self, batch: BatchPlan) -> int | None:
        """`graph_rows` of a step whose decodes do not read a common prefix together."""
        at = bisect_left(self.graph_sizes, batch.num_rows)
        too_many = at == len(self.graph_sizes) or batch.num_decodes < batch.num_rows
        if self.spec.window is not None or too_many:
            return None
        rows = self.graph_sizes[at]
        blocks = batch.kv_indices.numel() + rows - batch.num_rows
        return rows if blocks <= self._buffers.capacity else None

    def _shared_blocks(self, batch: BatchPlan) -> int:
        """Blocks of the common prefix that the decodes are to read together."""
        if batch.num_decodes < self.cascade_rows or self.spec.window is not None:
            return 0
        return common_prefix(batch, at_least=-(-self.cascade_tokens // self.spec.block_size))

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        out = self._empty(q)
        # The kernel takes a head's elements for contiguous, and does not check.
        self._lane.run(q.contiguous(), self.cache[layer], out)
        return out

    def _attend_lse(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self._empty(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        self._lane.run(q.contiguous(), self.cache[layer], out, lse)
        return out, lse.mul_(math.log(2))  # FlashInfer's is base 2

    @staticmethod
    def _empty(q: Tensor) -> Tensor:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)


class FlashInferFA3(FlashInferAttention):
    """FA3 kernels for rows of several query tokens, which need a Hopper GPU and a cache of the model's dtype.

    Decodes stay with FA2: on rows of one token FA3 is slow (flashinfer#2400).
    """

    name = "flashinfer-fa3"
    prefill_kernel = "fa3"

    @classmethod
    def capabilities(cls) -> Capabilities:
        return _without(super().capabilities(), "fp8_cache")

    @classmethod
    def probe(cls) -> None:
        super().probe()
        major, minor = torch.cuda.get_device_capability()
        if major != 9:
            reason = f"FA3 needs a GPU of compute capability 9, this one has {major}.{minor}"
            raise BackendUnavailable(cls.name, reason, f"use the {NAME} backend")


class FlashInferPersistent(FlashInferAttention):
    """FlashInfer's BatchAttention for all rows: see `PersistentLane` for what it lacks."""

    name = "flashinfer-persistent"
    workspace_bytes = 0

    @classmethod
    def capabilities(cls) -> Capabilities:
        return _without(super().capabilities(), "window", "fp8_cache")

    def _step_lane(self, kernels: Kernels, workspace: Tensor) -> Lane:
        return PersistentLane(self.spec, kernels, workspace)

    def _shared_blocks(self, batch: BatchPlan) -> int:
        return 0


def _workspace(spec: CacheSpec, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=spec.device)  # zeroed for its first use


def _without(capabilities: Capabilities, *features: Feature) -> Capabilities:
    return replace(capabilities, features=capabilities.features - set(features))
