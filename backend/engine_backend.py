"""What model runners plug into: one allocator and one attention backend on one KV cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvproof.allocator import BlockManager, EvictionPolicy, InvalidArgument, Sequence
from kvproof.attention import AttentionBackend, BatchPlan, CacheSpec
from kvproof.attention.base import to_device
from kvproof.backend.graphs import FixedStep
from kvproof.backend.runner import Step
from kvproof.backend.selection import AUTO, over_cache, select


class Chunk(NamedTuple):
    """A step's work on one sequence: compute its next `n` tokens. A decode is a chunk of one."""

    seq: Sequence
    n: int


class EngineBackend:
    """Turns chunks of sequences into steps for a `ModelRunner`, and computed steps into a findable prefix cache.

    An engine of any kind runs on it like this, with `manager` doing the admission and release around it:

        step = backend.begin(chunks)       # slots must be reserved
        logits = runner.forward(step)
        backend.end(chunks)                # the KV is written: publish what is full
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        attention: str | AttentionBackend = AUTO,
        layer_windows: Seq[int | None] = (),
        policy: EvictionPolicy | None = None,
        prefix_caching: bool = True,
    ) -> None:
        """`attention` is the name of a backend, or one that was made for `spec`: any other raises `InvalidArgument`.

        `layer_windows` are those of the layers where they aren't all `spec.window`, the widest. `policy` is new, and
        this manager's alone; LRU by default.
        """
        self.spec = spec
        self.attention = select(attention, spec)(spec) if isinstance(attention, str) else attention
        if self.attention.spec != spec:
            raise InvalidArgument(f"the attention backend was made for {self.attention.spec}, not for {spec}")
        # A backend has one window. Those of the other windows work on the same cache.
        self._by_window = {spec.window: self.attention}
        for window in layer_windows:
            if window not in self._by_window:
                narrow = spec.model_copy(update={"window": window})
                self._by_window[window] = over_cache(type(self.attention), narrow, self.attention.cache)
        self._layer_windows = layer_windows
        sizes = () if layer_windows else self.attention.graph_sizes
        self.manager = BlockManager(
            spec.num_blocks,
            spec.block_size,
            policy=policy,
            prefix_caching=prefix_caching,
            window=spec.window,
            reserve_null_block=bool(sizes),
        )
        self._fixed_token_ids = torch.zeros(max(sizes, default=0), dtype=torch.int64, device=spec.device)

    def begin(self, chunks: Seq[Chunk]) -> Step:
        """Plan attention for the next tokens of each chunk's sequence; decodes must come first.

        The step's `logits_rows` are the last tokens of the chunks that reach the end of what is known, in order.
        Where the attention backend has CUDA graphs, decodes are padded to one of its sizes, in a `FixedStep`.
        """
        plan = BatchPlan.build(
            [chunk.seq.block_table for chunk in chunks],
            [chunk.seq.num_computed + chunk.n for chunk in chunks],
            [chunk.n for chunk in chunks],
            self.spec.block_size,
        )
        padded_to = None if self._layer_windows else self.attention.graph_rows(plan)
        if padded_to is not None:
            plan = plan.pad(padded_to)
        for backend in self._by_window.values():
            backend.plan(plan)
        self.attention.copy_blocks(self.manager.take_copies())  # before anything of this step is written
        tokens = np.concatenate(
            [np.asarray(seq.tokens(seq.num_computed, seq.num_computed + n), dtype=np.int64) for seq, n in chunks]
        )
        rows = [int(end) - 1 for end, chunk in zip(plan.qo_indptr[1:], chunks, strict=False) if reaches_end(chunk)]
        step = Step(
            token_ids=to_device(torch.from_numpy(tokens), self.spec.device),
            positions=self.attention.positions,
            logits_rows=to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), self.spec.device),
            attention=self._run if self._layer_windows else self.attention.step_attention(),
        )
        return step if padded_to is None else self._fixed(step, padded_to)

    def _run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._by_window[self._layer_windows[layer]].run(layer, q, k, v)

    def _fixed(self, step: Step, size: int) -> FixedStep:
        """The step with its tokens where they were in the last one of `size`. Those of the padding may be any."""
        token_ids = self._fixed_token_ids[:size]
        token_ids[: step.token_ids.numel()].copy_(step.token_ids)
        return FixedStep(token_ids, step.positions, step.logits_rows, step.attention, owner=self)

    def end(self, chunks: Seq[Chunk]) -> None:
        """Commit what `begin` planned, once the runner has returned."""
        for seq, n in chunks:
            self.manager.commit(seq, n)


def reaches_end(chunk: Chunk) -> bool:
    """Whether the chunk computes its sequence's last known token, so that the next one can be sampled."""
    return chunk.seq.num_computed + chunk.n == len(chunk.seq)
