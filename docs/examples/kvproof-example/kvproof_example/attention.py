"""An attention backend: one row after the other through PyTorch's `scaled_dot_product_attention`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvproof.attention import AttentionBackend, BatchPlan, Capabilities


class Row(NamedTuple):
    """What all layers of a step need to know of one sequence."""

    tokens: slice  # its query tokens among those of the step
    blocks: Tensor  # its block table, int64
    seq_len: int
    mask: Tensor  # bool [query tokens, seq_len], who sees whom


class RowAttention(AttentionBackend):
    name = "rows"
    priority = -1  # used when it is named; with 0 or more, "auto" would consider it

    @classmethod
    def capabilities(cls) -> Capabilities:
        """Whatever is not declared is refused before it gets here: windows, soft caps, an 8-bit cache."""
        return Capabilities(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({"float32", "bfloat16"}),
            features=frozenset({"custom_scale"}),
        )

    def _plan(self, batch: BatchPlan) -> None:
        """Once a step, before any layer runs. The batch has been validated."""
        self._rows = []
        tokens, blocks = batch.qo_indptr.tolist(), batch.kv_indptr.tolist()
        for row, seq_len in enumerate(batch.seq_lens.tolist()):
            mine = slice(tokens[row], tokens[row + 1])
            table = batch.kv_indices[blocks[row] : blocks[row + 1]].long()
            mask = torch.arange(seq_len) <= batch.positions[mine, None]
            self._rows.append(Row(mine, table, seq_len, mask))

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        """Once a layer, when the step's keys and values have been written."""
        out = torch.empty_like(q)
        for row in self._rows:
            keys, values = (x[row.blocks].flatten(0, 1)[: row.seq_len] for x in self.kv(layer))
            q_, k, v = (x.transpose(0, 1)[None] for x in (q[row.tokens], keys, values))  # [1, heads, tokens, head_size]
            attended = scaled_dot_product_attention(
                q_, k, v, attn_mask=row.mask, scale=self.spec.softmax_scale, enable_gqa=True
            )
            out[row.tokens] = attended[0].transpose(0, 1)
        return out
