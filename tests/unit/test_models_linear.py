"""Projections on the matrix unit, packed by oneDNN, and plain, beside the definition."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvproof.allocator import InvalidArgument
from kvproof.attention.large_pages import LargePages
from kvproof.backend.models import linear as linear_module
from kvproof.backend.models.linear import TiledLinear, gated_linear, linear

MEMORY = LargePages()
ROWS = [0, 1, 16, 17, 32, 33, 150]
needs_tiles = pytest.mark.skipif(linear_module.tiles() is None, reason="no matrix unit, or no compiler")


@pytest.fixture(params=["tiles", "packed", "operators"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How bfloat16 projections are computed."""
    name: str = request.param
    if name == "tiles" and linear_module.tiles() is None:
        pytest.skip("no matrix unit, or no compiler")
    if name == "packed" and not linear_module._can_pack():
        pytest.skip("oneDNN does not pack here")
    if name != "tiles":
        monkeypatch.setattr(linear_module, "tiles", lambda: None)
    if name == "operators":
        monkeypatch.setattr(linear_module, "_can_pack", lambda: False)
    return name


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected.to(dtype), rtol=1.6e-2, atol=1e-2)
    if dtype == torch.bfloat16 and actual.numel():  # hardly any is rounded the other way
        assert (actual != expected.to(dtype)).float().mean() < 0.02


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (32, 32), (576, 960), (96, 100), (7, 64)])
def test_linear(inputs: int, outputs: int, biased: bool) -> None:
    torch.manual_seed(0)
    weight, bias = drawn(outputs, inputs), drawn(outputs) if biased else None
    projection = linear(weight, bias, MEMORY)
    for rows in ROWS:
        strided = drawn(rows, 2 * inputs)
        for x in (strided[:, ::2], strided[:, :inputs], strided[:, :inputs].contiguous()):
            assert_close(projection(x), product(x, weight, bias), torch.bfloat16)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("inputs", "inner"), [(64, 32), (576, 768), (32, 48), (40, 24)])
def test_gated_linear(inputs: int, inner: int) -> None:
    torch.manual_seed(0)
    gate, up = drawn(inner, inputs), drawn(inner, inputs)
    projection = gated_linear(gate, up, MEMORY)
    for rows in ROWS:
        x = drawn(rows, inputs)
        a, b = (product(x, weight).bfloat16().double() for weight in (gate, up))
        y = projection(x)
        assert y.shape == (rows, inner)
        torch.testing.assert_close(y.double(), a * a.sigmoid() * b, rtol=3e-2, atol=3e-2)


def test_the_way_is_what_it_says(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(64, 64)
    called: list[str] = []
    for name, operator in (("packed", "_linear_pointwise"), ("operators", "linear")):
        owner = torch.ops.mkldnn if name == "packed" else torch.nn.functional
        monkeypatch.setattr(owner, operator, lambda *args, name=name: called.append(name))
    projection = linear(weight, None, MEMORY)
    projection(drawn(2, 64))
    assert called == ([] if way == "tiles" else [way])
    assert isinstance(projection, TiledLinear) == (way == "tiles")


@needs_tiles
@pytest.mark.parametrize("make", [linear, gated_linear])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(
    make: Callable[..., Callable[[Tensor], Tensor]],
) -> None:
    torch.manual_seed(0)
    projection, x = make(drawn(960, 576), None if make is linear else drawn(960, 576), MEMORY), drawn(100, 576)
    together = projection(x)
    assert torch.equal(together, torch.cat([projection(row) for row in x.split(1)]))
    assert torch.equal(together[20:70], projection(x[20:70]))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(together, projection(x))
    finally:
        torch.set_num_threads(threads)


@needs_tiles
def test_a_row_of_nan_stays_alone() -> None:
    projection, x = linear(drawn(64, 64), None, MEMORY), drawn(40, 64)
    expected, x[7] = projection(x), float("nan")
    y = projection(x)
    assert y[7].isnan().all()
    assert torch.equal(y[:7], expected[:7])
    assert torch.equal(y[8:], expected[8:])


@needs_tiles
@pytest.mark.parametrize("rows", [1, 15, 17, 31, 33])
def test_nothing_is_read_behind_the_last_row(rows: int) -> None:
    """The page after x can't be read."""
    size = 1 << 16
    pages = mmap.mmap(-1, 2 * size)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    behind = ctypes.c_void_p(memory.data_ptr() + size)
    assert libc.mprotect(behind, ctypes.c_size_t(size), 0) == 0
    try:
        x = memory[size - rows * 576 * 2 : size].view(torch.bfloat16).view(rows, 576)
        x.copy_(drawn(rows, 576))
        weight = drawn(64, 576)
        assert_close(linear(weight, None, MEMORY)(x), product(x, weight), torch.bfloat16)
    finally:
        libc.mprotect(behind, ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE)


@needs_tiles
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 33])
def test_nothing_is_written_behind_the_last_result(rows: int, gated: bool) -> None:
    library = linear_module.tiles()
    assert library is not None
    projection, x = TiledLinear(library, drawn(96, 64), None, MEMORY, gated=gated), drawn(rows, 64)
    y = torch.full((rows * (48 if gated else 96) + 1000,), 7.0, dtype=torch.bfloat16)
    projection._call(projection.weight, 1, rows, x.data_ptr(), x.stride(0) * 2, y.data_ptr())
    assert torch.equal(y[:-1000].view(rows, -1), projection(x))
    assert (y[-1000:] == 7).all()


@needs_tiles
@pytest.mark.parametrize("x", [drawn(2, 32), drawn(2, 64, dtype=torch.float32), drawn(64), drawn(1, 2, 64)])
def test_what_does_not_fit_is_refused(x: Tensor) -> None:
    with pytest.raises(InvalidArgument, match=r"it must be torch.bfloat16 \[T, 64\] on the CPU"):
        linear(drawn(64, 64), None, MEMORY)(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    """Only bfloat16 is laid out anew."""
    weight, bias, x = drawn(64, 32, dtype=dtype), drawn(64, dtype=dtype), drawn(5, 32, dtype=dtype)
    assert_close(linear(weight, bias, MEMORY)(x), product(x, weight, bias), dtype)
    a, b = product(x, weight), product(x, -weight)
    assert_close(gated_linear(weight, -weight, MEMORY)(x), a * a.sigmoid() * b, dtype)


def test_without_the_kernels_there_are_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROOF_NO_KERNEL", "1")
    assert linear_module.tiles.__wrapped__() is None


def test_operators_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch may drop or change its private operators; projections then are plain ones."""
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *args: torch.zeros(2, 64, dtype=torch.bfloat16))
    assert not linear_module._can_pack.__wrapped__()
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not linear_module._can_pack.__wrapped__()
