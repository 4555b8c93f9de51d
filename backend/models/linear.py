"""A linear projection, with its weight laid out as the processor likes it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_ROWS = 512
"""Batch size that oneDNN is told to lay weights out for. Smaller and larger ones run as fast with this layout."""


@dataclass(frozen=True, slots=True)
class Linear:
    """x [T, in] -> [T, out]: x @ weight.T + bias."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def packed(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Prepared once for many calls: `F.linear` has oneDNN reorder a bfloat16 weight again on every call, which
        is a quarter of its time at the batch sizes of decoding."""
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _can_pack():
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        return cls(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.is_mkldnn:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y
        return F.linear(x, self.weight, self.bias)


@cache
def _can_pack() -> bool:
    """PyTorch keeps these two operators for its compiler; without them, or with others, `F.linear` does as well."""
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    weight = torch.eye(64, dtype=torch.bfloat16)
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        return torch.equal(Linear(packed)(x), F.linear(x, weight))
    except (AttributeError, RuntimeError):
        return False
