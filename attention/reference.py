"""The oracle: dense attention in float64 that follows block tables in plain Python."""

from __future__ import annotations

import torch
from torch import Tensor

from kvproof.attention.base import AttentionBackend, Capabilities


class ReferenceAttention(AttentionBackend):
    """Slow, and meant to be right at a glance. Every dtype, layout, block, head and group size.

    It shares neither its writing nor its reading with other backends, so that a fault in theirs shows.
    """

    name = "reference"
    priority = -1

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(devices=frozenset({"cpu", "cuda"}), features=frozenset({"custom_scale", "fp8_cache"}))

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        for token, slot in enumerate(self.batch.slot_mapping.tolist()):
            block, offset = divmod(slot, self.spec.block_size)
            where = (offset, slice(None)) if self.spec.layout == "NHD" else (slice(None), offset)
            self.cache[layer, block, 0][where] = self._stored(k[token], self.spec.k_scale)
            self.cache[layer, block, 1][where] = self._stored(v[token], self.spec.v_scale)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        batch, out = self.batch, torch.empty_like(q)
        tokens, blocks = batch.qo_indptr.tolist(), batch.kv_indptr.tolist()
        for row, seq_len in enumerate(batch.seq_lens.tolist()):
            mine = slice(tokens[row], tokens[row + 1])
            table = batch.kv_indices[blocks[row] : blocks[row + 1]].tolist()
            keys, values = self._read(layer, table, seq_len)
            seen = batch.positions[mine].to(q.device)[:, None] >= torch.arange(seq_len, device=q.device)
            for head in range(self.spec.num_heads):
                group = head // self.spec.group_size
                scores = q[mine, head].double() @ keys[:, group].T * self.spec.softmax_scale
                weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
                out[mine, head] = (weights @ values[:, group]).to(q.dtype)
        return out

    def _read(self, layer: int, table: list[int], seq_len: int) -> Tensor:
        """Keys and values of one sequence, float64 [2, seq_len, num_kv_heads, head_size]."""
        shape = (2, 0, self.spec.num_kv_heads, self.spec.head_size)
        kv = [torch.empty(shape, dtype=torch.float64, device=self.cache.device)]
        for block in table:
            content = self.cache[layer, block].double()
            kv.append(content if self.spec.layout == "NHD" else content.transpose(1, 2))
        scales = torch.tensor((self.spec.k_scale, self.spec.v_scale), dtype=torch.float64, device=self.cache.device)
        return torch.cat(kv, dim=1)[:, :seq_len] * scales[:, None, None, None]
