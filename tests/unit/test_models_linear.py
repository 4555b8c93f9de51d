"""Packed projections against `F.linear`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvproof.backend.models import linear as linear_module
from kvproof.backend.models.linear import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 8, 8), (1, 576, 960), (33, 576, 100), (600, 7, 5)])
def test_packed(rows: int, inputs: int, outputs: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs, dtype=dtype), torch.randn(outputs, dtype=dtype) if biased else None
    strided = torch.randn(rows, 2 * inputs, dtype=dtype)[:, ::2]
    for x in (strided, strided.contiguous()):
        y = Linear.packed(weight, bias)(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y, F.linear(x, weight, bias))


def test_only_bfloat16_is_packed() -> None:
    weight = torch.randn(64, 64)
    assert Linear.packed(weight).weight is weight
    assert Linear.packed(weight.bfloat16()).weight.is_mkldnn == linear_module._can_pack()


def test_operators_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch may drop or change its private operators; projections then are plain ones."""
    monkeypatch.setattr(linear_module, "_can_pack", linear_module._can_pack.__wrapped__)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *args: torch.zeros(2, 64, dtype=torch.bfloat16))
    weight = torch.randn(64, 64, dtype=torch.bfloat16)
    assert Linear.packed(weight).weight is weight
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert Linear.packed(weight).weight is weight
