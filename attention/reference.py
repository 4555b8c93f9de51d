"""The oracle: dense attention in float64 that follows block tables in plain Python."""

from __future__ import annotations

import torch
from torch import Tensor

from kvproof.attention.base import AttentionBackend, Capabilities
from kvproof.attention.spec import INT32_LIMIT


class ReferenceAttention(AttentionBackend):
    """Slow, and meant to be right at a glance. Every dtype, layout, block, head and group size.

    It shares neither its writing nor its reading with other backends, so that a fault in theirs shows.
    """

    name = "reference"
    priority = -1

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=frozenset({"cpu", "cuda"}),
            features=frozenset({"custom_scale", "window", "soft_cap", "fp8_cache", "lse"}),
        )

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        for token, slot in enumerate(self.batch.slot_mapping.tolist()):
            block, offset = divmod(slot, self.spec.block_size)
            where = (offset, slice(None)) if self.spec.layout == "NHD" else (slice(None), offset)
            self.cache[layer, block, 0][where] = self._stored(k[token], self.spec.k_scale)
            self.cache[layer, block, 1][where] = self._stored(v[token], self.spec.v_scale)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        return self._attend_lse(layer, q)[0]

    def _attend_lse(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        spec, batch = self.spec, self.batch
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        tokens, blocks = batch.qo_indptr.tolist(), batch.kv_indptr.tolist()
        for row, seq_len in enumerate(batch.seq_lens.tolist()):
            mine = slice(tokens[row], tokens[row + 1])
            table = batch.kv_indices[blocks[row] : blocks[row + 1]].tolist()
            # What no query sees is not read: blocks that a window has left may be anybody's.
            window = spec.window or INT32_LIMIT
            start = max(0, seq_len - (mine.stop - mine.start) + 1 - window)
            keys, values = self._read(layer, table, start, seq_len)
            behind = batch.positions[mine].to(q.device)[:, None] - torch.arange(start, seq_len, device=q.device)
            seen = (behind >= 0) & (behind < window)
            for head in range(spec.num_heads):
                group = head // spec.group_size
                scores = q[mine, head].double() @ keys[:, group].T * spec.softmax_scale
                if spec.soft_cap is not None:
                    scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
                scores = scores.masked_fill(~seen, float("-inf"))
                out[mine, head] = (scores.softmax(dim=-1) @ values[:, group]).to(q.dtype)
                lse[mine, head] = scores.logsumexp(dim=-1).float()
        return out, lse

    def _read(self, layer: int, table: list[int], start: int, stop: int) -> Tensor:
        """Keys and values of tokens `start` to `stop`, float64 [2, stop - start, num_kv_heads, head_size]."""
        shape = (2, 0, self.spec.num_kv_heads, self.spec.head_size)
        kv = [torch.empty(shape, dtype=torch.float64, device=self.cache.device)]
        before, offset = divmod(start, self.spec.block_size)
        for block in table[before:]:
            content = self.cache[layer, block].double()
            kv.append(content if self.spec.layout == "NHD" else content.transpose(1, 2))
        scales = torch.tensor((self.spec.k_scale, self.spec.v_scale), dtype=torch.float64, device=self.cache.device)
        return torch.cat(kv, dim=1)[:, offset : offset + stop - start] * scales[:, None, None, None]
