"""Paged attention in plain PyTorch: the default on the CPU, and it runs wherever PyTorch does.

On the CPU, compiled kernels read the cache in place: in bfloat16, with heads of whole tiles, on a processor with a
matrix unit one for all tokens (`tiled_kernel`), elsewhere one for decodes (`cpu_kernel`). PyTorch has none that does,
so all else (prefills; decodes too where there is no kernel) gathers the keys and values it needs into contiguous memory
and hands them to `scaled_dot_product_attention`. What makes that quick and safe is the gather's index, made once per
step for all layers: for every row and position it names the memory of that token, and past the end of a sequence that
of the sequence's last token. Unused slots, and tokens that a window has left, are therefore never read, whatever they
hold, and padding costs no cache misses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvproof.attention.base import AttentionBackend, Capabilities, to_device
from kvproof.attention.cpu_kernel import DecodeKernel
from kvproof.attention.plan import BatchPlan
from kvproof.attention.spec import INT32_LIMIT, CacheSpec
from kvproof.attention.tiled_kernel import TiledKernel

Ints = NDArray[np.int64]

KEYS_MULTIPLE = 32
"""Keys per row are padded to a multiple of this, so that the kernel's vectors split a row's sums alike whatever the
padding. A decode then gives the same bits alone and beside other rows: measured on a CPU with AMX, in bfloat16 at every
length tried and in other types up to some 350 tokens. It costs nothing, but no kernel promises it."""

PADDING = 128
"""Most query-key pairs beyond that padding which one call computes in vain: about what another call costs on a CPU."""

GATHER_BYTES = 2**22
"""Most that a call of several rows gathers: few calls, and what one gathers is still in the processor's shared cache
when attention reads it. With a quarter of this, a decode of 32 rows of 64 tokens took 0.42 ms a layer instead of 0.34,
and of 1,000 tokens 5.4 instead of 4.1."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Attention of n rows with m query tokens each over keys padded to L tokens: one kernel call per layer.

    `gathered`, `keys` and `values` are views of the backend's buffer.
    """

    vectors: Tensor  # int64 [n * 2 * heads * L], what to gather: for each row its keys, then its values
    bias: Tensor | None  # [n, 1, m, L], 0 or -inf; None where there is nothing to mask or is_causal masks it
    is_causal: bool
    gathered: Tensor  # the keys and values, as vectors
    keys: Tensor  # [n, num_kv_heads, L, head_size]
    values: Tensor  # [n, num_kv_heads, L, head_size]


class TorchAttention(AttentionBackend):
    """Batches rows of equal query length and similar sequence length, so that padding is bounded.

    Memory beyond the cache: on the matrix unit half a megabyte a thread, and parts of long decodes. Elsewhere one
    call's gather (`GATHER_BYTES`, or one sequence if that is longer), and for prefill with context before it a mask of
    query_len x seq_len elements; with a soft cap, scores of as many in each head.
    """

    name = "torch"
    priority = 10

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=frozenset({"cpu", "cuda"}),
            dtypes=frozenset({"float32", "bfloat16", "float16"}),
            features=frozenset({"custom_scale", "window", "soft_cap", "lse"}),
        )

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        # The cache as vectors, each the longest run of memory that belongs to one token: all of its heads
        # in NHD, one of them in HND.
        self._heads = 1 if spec.layout == "NHD" else spec.num_kv_heads
        self._vectors = self.cache.view(spec.num_layers, -1, spec.num_kv_heads // self._heads * spec.head_size).unbind()
        self._gathered = self.cache.new_empty(0)
        self._kernel = TiledKernel.create(spec, self.cache) or DecodeKernel.create(spec, self.cache)

    def _plan(self, batch: BatchPlan) -> None:
        self._plan_gather(batch, first=self._kernel.num_attended(batch) if self._kernel else 0)
        if self._kernel:
            self._kernel.plan(batch)

    def _plan_gather(self, batch: BatchPlan, first: int) -> None:
        """Plan the calls for tokens from `first` on: 0, or those after the decodes, or none."""
        if batch.num_tokens == first:
            self._order, self._calls, self._num_tokens = None, [], []
            return
        spec = self.spec
        start, seq_lens, kv_indptr = (
            array.numpy()[first:].astype(np.int64) for array in (batch.qo_indptr, batch.seq_lens, batch.kv_indptr)
        )
        start, kv_indices = start - first, batch.kv_indices.numpy()[kv_indptr[0] :]
        # Tokens that a row's queries see are its last ones, and all there is to it here: a window has left the others.
        first_seen = np.maximum(seq_lens - np.diff(start) + 1 - (spec.window or INT32_LIMIT), 0)
        seen = seq_lens - first_seen
        query_lens: list[int] = np.diff(start).tolist()
        padded: list[int] = (-(-seen // KEYS_MULTIPLE) * KEYS_MULTIPLE).tolist()
        token_elements = 2 * spec.num_kv_heads * spec.head_size
        most_keys = GATHER_BYTES // (token_elements * self.cache.element_size())
        groups = list(_similar_rows(query_lens, padded, most_keys))
        largest = token_elements * max((len(rows) * max(padded[row] for row in rows) for rows in groups), default=0)
        if largest > self._gathered.numel():
            self._gathered = self.cache.new_empty(largest)

        # First vector of every slot of every row's blocks; within a block they go [key or value, head, slot].
        blocks = kv_indices.astype(np.int64)[:, None]
        slots = (blocks * (2 * self._heads * spec.block_size) + np.arange(spec.block_size)).reshape(-1)
        first_slot = (kv_indptr[:-1] - kv_indptr[0]) * spec.block_size + first_seen
        order, calls = [np.empty(0, dtype=np.int64)], []
        for rows in groups:
            lens, m = seen[rows, None], query_lens[rows[0]]
            longest = max(padded[row] for row in rows)
            calls.append(self._call(slots[first_slot[rows, None] + np.minimum(np.arange(longest), lens - 1)], lens, m))
            order.append((start[rows, None] + np.arange(m)).reshape(-1))
        tokens = np.concatenate(order)
        in_order = bool((tokens == np.arange(len(tokens))).all())
        self._order = None if in_order else (self._index(tokens), self._index(np.argsort(tokens)))
        self._calls, self._num_tokens = calls, [len(part) for part in order[1:]]

    def _call(self, slots: Ints, lens: Ints, m: int) -> _Call:
        spec, (n, longest) = self.spec, slots.shape
        planes = np.arange(2 * self._heads).reshape(2, self._heads, 1) * spec.block_size
        vectors = self._index(slots[:, None, None] + planes)
        gathered = self._gathered[: 2 * n * longest * spec.num_kv_heads * spec.head_size]
        kv = gathered.view(n, 2, self._heads, longest, -1, spec.head_size)
        keys, values = kv.transpose(3, 4).flatten(2, 3).unbind(1)
        # Without context the mask is the kernel's own causal one, which also hides the padding.
        is_causal = 1 < m <= (spec.window or m) and bool((lens == m).all())
        return _Call(
            vectors=vectors,
            bias=None if is_causal else self._bias(lens, m, longest),
            is_causal=is_causal,
            gathered=gathered.view(len(vectors), -1),
            keys=keys,
            values=values,
        )

    def _bias(self, lens: Ints, m: int, longest: int) -> Tensor | None:
        behind = (lens - m + np.arange(m))[:, None, :, None] - np.arange(longest)
        visible = (behind >= 0) & (behind < (self.spec.window or INT32_LIMIT))
        if visible.all():
            return None
        bias = torch.zeros(visible.shape, dtype=self.cache.dtype)
        return to_device(bias.masked_fill_(torch.from_numpy(~visible), float("-inf")), self.cache.device)

    def _index(self, index: Ints) -> Tensor:
        return to_device(torch.from_numpy(index.reshape(-1)), self.cache.device)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self._kernel:
            self._kernel.write(layer, k, v)
        else:
            super()._write(layer, k, v)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        return self._and_gathered(layer, q, self._kernel.attend(layer, q) if self._kernel else q[:0])

    def step_attention(self) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        # What somebody has put in the place of `run` or a part of it, here or in a subclass, must be called.
        untouched = _replaceable(type(self)) == ORIGINAL and not vars(self).keys() & {"run", "_write", "_attend"}
        if untouched and isinstance(self._kernel, TiledKernel):
            return self._kernel.compiled(self.run)
        return self.run

    def _and_gathered(self, layer: int, q: Tensor, first: Tensor) -> Tensor:
        """The result for q, which is there for its first tokens."""
        if not self._calls:
            return first
        rest = self._attend_gathered(layer, q[len(first) :])
        return torch.cat((first, rest)) if len(first) else rest

    def _attend_lse(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        first = self._kernel.attend(layer, q, lse) if self._kernel else q[:0]
        if not self._calls:
            return first, lse
        rest = self._attend_gathered(layer, q[len(first) :], lse[len(first) :])
        return torch.cat((first, rest)), lse

    def _attend_gathered(self, layer: int, q: Tensor, lse: Tensor | None = None) -> Tensor:
        """Attention of the tokens of `_calls`; fills `lse`, if there is one."""
        if self._order is not None:
            q = q.index_select(0, self._order[0])
        parts, lses = [], []
        for call, queries in zip(self._calls, torch.split(q, self._num_tokens), strict=True):
            torch.index_select(self._vectors[layer], 0, call.vectors, out=call.gathered)
            if lse is None and self.spec.soft_cap is None:
                parts.append(self._fused(call, queries))
            else:
                part, part_lse = self._in_steps(call, queries)
                parts.append(part)
                lses.append(part_lse)
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        if lse is not None:
            lse.copy_(torch.cat(lses) if self._order is None else torch.cat(lses).index_select(0, self._order[1]))
        return attended if self._order is None else attended.index_select(0, self._order[1])

    def _fused(self, call: _Call, q: Tensor) -> Tensor:
        """Attention of one call's queries [n * m, num_heads, head_size]; the result is of the same shape."""
        n, kv_heads = call.keys.shape[:2]
        # In a decode (m = 1), query heads that share a key head see the same keys, so they stand in for the query
        # axis: one matrix product for each key head, where enable_gqa does one for each query head.
        decode = len(q) == n
        attended = scaled_dot_product_attention(
            q.view(n, kv_heads, -1, q.shape[-1]) if decode else q.view(n, -1, *q.shape[1:]).transpose(1, 2),
            call.keys,
            call.values,
            attn_mask=call.bias,
            is_causal=call.is_causal,
            scale=self.spec.softmax_scale,
            enable_gqa=not decode,
        )
        return (attended if decode else attended.transpose(1, 2)).reshape(q.shape)

    def _in_steps(self, call: _Call, q: Tensor) -> tuple[Tensor, Tensor]:
        """The same and the log-sum-exps [n * m, num_heads]: PyTorch's fused attention has neither those nor caps.

        In float32, and holding all of a call's scores at once.
        """
        n, kv_heads = call.keys.shape[:2]
        heads = q.view(n, -1, kv_heads, self.spec.group_size, q.shape[-1]).permute(0, 2, 3, 1, 4).float()
        scores = heads @ call.keys.float().mT.unsqueeze(2) * self.spec.softmax_scale  # [n, kv heads, group, m, longest]
        if self.spec.soft_cap is not None:
            scores = self.spec.soft_cap * torch.tanh(scores / self.spec.soft_cap)
        if call.is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        elif call.bias is not None:
            scores = scores + call.bias.unsqueeze(2)
        attended = scores.softmax(-1) @ call.values.float().unsqueeze(2)
        lse = scores.logsumexp(-1).permute(0, 3, 1, 2)
        return attended.permute(0, 3, 1, 2, 4).reshape(q.shape).to(q.dtype), lse.reshape(q.shape[:2])


def _replaceable(kind: type[TorchAttention]) -> tuple[object, ...]:
    """What a subclass or a test may put something else in the place of."""
    return kind.run, kind._write, kind._attend


ORIGINAL = _replaceable(TorchAttention)


def _similar_rows(query_lens: list[int], keys: list[int], most_keys: int) -> Iterator[list[int]]:
    """Groups of non-empty rows of equal query length, in the batch's order within a group.

    A group of several rows computes at most `PADDING` query-key pairs in vain and has at most `most_keys` keys.
    """
    order = sorted(range(len(keys)), key=lambda row: (query_lens[row], -keys[row]))
    group: list[int] = []
    padding = 0
    for row in order[query_lens.count(0) :]:
        if group:
            first = group[0]
            padding += (keys[first] - keys[row]) * query_lens[row]
            too_many = (len(group) + 1) * keys[first] > most_keys
            if query_lens[row] != query_lens[first] or padding > PADDING or too_many:
                yield sorted(group)
                group, padding = [], 0
        group.append(row)
    if group:
        yield sorted(group)
