"""The compiled decoder does what the operations one by one do, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvproof.allocator import InvalidArgument
from kvproof.attention.large_pages import LargePages
from kvproof.backend.models.decoder import CompiledDecoder, Decoder, Layer, Shape
from kvproof.backend.models.linear import gated_linear, linear

SHAPE = Shape(num_heads=4, num_kv_heads=2, head_size=32, eps=1e-5)
HIDDEN, INNER = 96, 160


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)


def layers(count: int = 3, *, biased: bool = False, dtype: torch.dtype = torch.bfloat16) -> list[Layer]:
    memory, q, kv = LargePages(), SHAPE.num_heads * SHAPE.head_size, SHAPE.num_kv_heads * SHAPE.head_size
    return [
        Layer(
            attention_norm=1 + drawn(HIDDEN, dtype=dtype),
            qkv=linear(drawn(q + 2 * kv, HIDDEN, dtype=dtype), drawn(q + 2 * kv) if biased else None, memory),
            qk_norm=None,
            output=linear(drawn(HIDDEN, q, dtype=dtype), None, memory),
            mlp_norm=1 + drawn(HIDDEN, dtype=dtype),
            gate_up=gated_linear(drawn(INNER, HIDDEN, dtype=dtype), drawn(INNER, HIDDEN, dtype=dtype), memory),
            down=linear(drawn(HIDDEN, INNER, dtype=dtype), None, memory),
        )
        for _ in range(count)
    ]


def attention(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Anything that depends on the layer and on each of them."""
    return q * (index + 1) + k.repeat_interleave(2, dim=1) - v.repeat_interleave(2, dim=1).flip(1)


def compiled(some: list[Layer]) -> CompiledDecoder:
    if not CompiledDecoder.can_run(some, SHAPE):
        pytest.skip("no matrix unit, or no compiler")
    return CompiledDecoder(some, SHAPE)


@pytest.mark.parametrize("rows", [0, 1, 17, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_the_same_bits(rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    some = layers(biased=biased)
    x, cos, sin = drawn(rows, HIDDEN), drawn(rows, SHAPE.head_size), drawn(rows, SHAPE.head_size)
    one_by_one, at_once = x.clone(), x.clone()
    expected = Decoder(some, SHAPE)(one_by_one, cos, sin, attention)
    delta = compiled(some)(at_once, cos, sin, attention)
    assert delta is not None
    assert expected is not None
    assert torch.equal(delta, expected)
    assert torch.equal(at_once, one_by_one)
    assert rows == 0 or not torch.equal(at_once, x)


def test_what_attention_returns_may_lie_anywhere() -> None:
    torch.manual_seed(0)
    some = layers()
    x, cos, sin = drawn(5, HIDDEN), drawn(5, SHAPE.head_size), drawn(5, SHAPE.head_size)

    def apart(*given: Tensor) -> Tensor:
        return attention(*given).repeat_interleave(2, dim=2)[..., ::2]  # type: ignore[arg-type]

    decoder = compiled(some)
    delta, expected = decoder(x.clone(), cos, sin, apart), decoder(x.clone(), cos, sin, attention)
    assert delta is not None
    assert expected is not None
    assert torch.equal(delta, expected)


@pytest.mark.parametrize("wrong", [Tensor.float, lambda out: out[:-1], lambda out: out[:, :-1]])
def test_what_does_not_fit_is_refused(wrong: object) -> None:
    x, cos, sin = drawn(5, HIDDEN), drawn(5, SHAPE.head_size), drawn(5, SHAPE.head_size)
    with pytest.raises(
        InvalidArgument, match=r"^attention returned .*; it must be torch.bfloat16 \[5, 4, 32\] on cpu$"
    ):
        compiled(layers())(x, cos, sin, lambda *given: wrong(attention(*given)))  # type: ignore[operator]


def test_what_it_can_not_run() -> None:
    some = layers()
    normed = Layer(*(getattr(some[0], name) if name != "qk_norm" else drawn(6, 32) for name in Layer.__slots__))
    for others in ([], [*some, normed], layers(dtype=torch.float32)):
        assert not CompiledDecoder.can_run(others, SHAPE)


def test_sizes_that_do_not_fit_are_not_run() -> None:
    """The compiled code would write over the end of what is there."""
    some = layers()
    if not CompiledDecoder.can_run(some, SHAPE):
        pytest.skip("no matrix unit, or no compiler")
    for field, wrong in (
        ("qkv", linear(drawn(512, HIDDEN), None, LargePages())),
        ("output", linear(drawn(HIDDEN, 64), None, LargePages())),
        ("gate_up", linear(drawn(2 * INNER, HIDDEN), None, LargePages())),  # not gated
        ("down", linear(drawn(HIDDEN, 64), None, LargePages())),
        ("mlp_norm", drawn(HIDDEN, dtype=torch.float32)),
    ):
        assert not CompiledDecoder.can_run([*some, replace(some[0], **{field: wrong})], SHAPE)
    assert not CompiledDecoder.can_run(some, replace(SHAPE, num_kv_heads=1))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_rows_that_do_not_fit_are_refused(which: int) -> None:
    good = [drawn(5, HIDDEN), drawn(5, SHAPE.head_size), drawn(5, SHAPE.head_size)]
    decoder = compiled(layers())
    for wrong in (good[which].float(), good[which][:, :-1], good[which].T.contiguous().T):
        with pytest.raises(InvalidArgument, match=r"^x, cos and sin are "):
            decoder(*[wrong if i == which else it for i, it in enumerate(good)], attention)


def test_no_layers() -> None:
    assert Decoder([], SHAPE)(drawn(2, HIDDEN), drawn(2, 32), drawn(2, 32), attention) is None
