"""A layer's operations beside PyTorch's, compiled and not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvproof.backend.models import layers
from kvproof.backend.models.layers import add_rms_norm, rotate, silu_mul

# A last bit of the type, once before and once after a product.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.fixture(params=["compiled", "operators"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "operators":
        monkeypatch.setattr(layers, "_load", lambda: None)
    elif layers._load() is None:
        pytest.skip("the library can't be built here")
    torch.manual_seed(0)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-6)
    if actual.dtype != torch.float32:  # and hardly any is rounded the other way
        assert (actual != expected).sum() <= 0.01 * actual.numel()


sizes = pytest.mark.parametrize("size", [2, 30, 64, 576, 1000])
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE))


@sizes
@dtypes
@pytest.mark.parametrize("rows", [0, 1, 33, 300])
def test_add_rms_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    x, delta, weight = (torch.randn(shape, dtype=dtype) * 3 for shape in [(rows, size), (rows, size), (size,)])
    for added in (None, delta):
        stream = x.clone()
        out = add_rms_norm(stream, added, weight, 1e-5)
        expected = x if added is None else x + added
        assert torch.equal(stream, expected)
        assert_close(out, F.rms_norm(expected, (size,), weight, 1e-5))


@dtypes
@pytest.mark.parametrize("size", [2, 20, 64, 128])
def test_rotate(size: int, dtype: torch.dtype) -> None:
    heads, cos, sin = (torch.randn(shape, dtype=dtype) for shape in [(40, 5, size), (40, size), (40, size)])
    turned = heads.clone()
    rotate(turned, 3, cos, sin)
    swapped = torch.cat(heads.chunk(2, dim=-1)[::-1], dim=-1)
    expected = torch.addcmul(heads * cos[:, None], swapped, sin[:, None])
    assert_close(turned[:, :3], expected[:, :3])
    assert torch.equal(turned[:, 3:], heads[:, 3:])


@sizes
@dtypes
def test_silu_mul(size: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(50, 2 * size, dtype=dtype) * 4
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = 80.0, -80.0, -60000.0
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(silu_mul(gate_up), F.silu(gate) * up)


def test_what_is_not_a_number_stays_so() -> None:
    x = torch.full((1, 64), float("nan"), dtype=torch.bfloat16)
    assert silu_mul(x).isnan().all()
    assert add_rms_norm(x, None, x[0], 1e-5).isnan().all()


def test_a_slice_is_computed_by_operators() -> None:
    """Its rows do not lie one behind the other, as the library must have them."""
    x = torch.randn(10, 128)[:, ::2]
    expected = F.rms_norm(x, (64,), torch.ones(64), 1e-5)
    assert_close(add_rms_norm(x, None, torch.ones(64), 1e-5), expected)


def test_threads_change_no_bit() -> None:
    x, weight = torch.randn(300, 576).bfloat16(), torch.randn(576).bfloat16()
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(add_rms_norm(x.clone(), x, weight, 1e-5))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)
