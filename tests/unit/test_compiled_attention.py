"""All layers in one call, attention too: the same bits as layer by layer, and what stands in its place is called."""

from __future__ import annotations

import gc
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor

from kvproof.allocator import InvalidArgument
from kvproof.attention import BatchPlan, CacheSpec, NotPlanned, tiled_kernel
from kvproof.attention.compiled import CompiledAttention
from kvproof.attention.large_pages import LargePages
from kvproof.attention.torch_paged import TorchAttention
from kvproof.backend.models.decoder import CompiledDecoder, Layer, Shape
from kvproof.backend.models.linear import gated_linear, linear

SHAPE = Shape(num_heads=4, num_kv_heads=2, head_size=32, eps=1e-5)
HIDDEN, INNER, LAYERS = 96, 160, 3


@pytest.fixture(autouse=True)
def matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROOF_NO_KERNEL", "0")
    if tiled_kernel.load() is None:
        pytest.skip("no matrix unit, or no compiler")
    torch.manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return (torch.randn(shape) / shape[-1] ** 0.5).bfloat16()


def decoder() -> CompiledDecoder:
    memory, q, kv = LargePages(), SHAPE.num_heads * SHAPE.head_size, SHAPE.num_kv_heads * SHAPE.head_size
    return CompiledDecoder(
        [
            Layer(
                attention_norm=1 + drawn(HIDDEN),
                qkv=linear(drawn(q + 2 * kv, HIDDEN), None, memory),
                qk_norm=None,
                output=linear(drawn(HIDDEN, q), None, memory),
                mlp_norm=1 + drawn(HIDDEN),
                gate_up=gated_linear(drawn(INNER, HIDDEN), drawn(INNER, HIDDEN), memory),
                down=linear(drawn(HIDDEN, INNER), None, memory),
            )
            for _ in range(LAYERS)
        ],
        SHAPE,
    )


def spec(**changes: Any) -> CacheSpec:
    fields = {
        "num_layers": LAYERS,
        "num_heads": SHAPE.num_heads,
        "num_kv_heads": SHAPE.num_kv_heads,
        "head_size": SHAPE.head_size,
        "dtype": "bfloat16",
        "num_blocks": 60,
        "block_size": 16,
    }
    return CacheSpec(**(fields | changes))


def planned(backend: TorchAttention) -> TorchAttention:
    """A decode of 300 tokens, one of 5, and a prefill of 20 after 33."""
    tables = [array("i", range(start, start + count)) for start, count in ((1, 19), (20, 1), (21, 4))]
    backend.plan(BatchPlan.build(tables, [300, 5, 53], [1, 1, 20], backend.spec.block_size))
    return backend


def rows(count: int = 22) -> tuple[Tensor, Tensor, Tensor]:
    return drawn(count, HIDDEN), drawn(count, SHAPE.head_size), drawn(count, SHAPE.head_size)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_same_bits(layout: str) -> None:
    model, (x, cos, sin) = decoder(), rows()
    at_once, one_by_one = (planned(TorchAttention(spec(layout=layout))) for _ in range(2))
    at_once.cache.normal_()
    one_by_one.cache.copy_(at_once.cache)
    attention = at_once.step_attention()
    assert isinstance(attention, CompiledAttention)
    y = x.clone()
    delta, expected = model(x, cos, sin, attention), model(y, cos, sin, one_by_one.run)
    assert delta is not None
    assert expected is not None
    assert torch.equal(delta, expected)
    assert torch.equal(x, y)
    assert torch.equal(at_once.cache, one_by_one.cache)


def test_it_can_be_called_as_run_is() -> None:
    backend = planned(TorchAttention(spec()))
    backend.cache.normal_()
    q, k, v = drawn(22, 4, 32), drawn(22, 2, 32), drawn(22, 2, 32)
    assert torch.equal(backend.step_attention()(1, q, k, v), backend.run(1, q, k, v))


def test_another_step_or_model_is_refused() -> None:
    """Memory behind its own would be written."""
    attention = planned(TorchAttention(spec())).step_attention()
    with pytest.raises(InvalidArgument, match=r"^attention is planned for \(22, 4, 2, 32, 'bfloat16', 3\) .*\(21, "):
        decoder()(*rows(21), attention)
    for other in ({"num_layers": 2}, {"num_heads": 8}, {"num_kv_heads": 1}, {"head_size": 64}):
        with pytest.raises(InvalidArgument, match=r"^attention is planned for "):
            decoder()(*rows(), planned(TorchAttention(spec(**other))).step_attention())


def test_without_a_plan_there_is_none() -> None:
    with pytest.raises(NotPlanned):
        TorchAttention(spec()).step_attention()


class Doubled(TorchAttention):
    def _attend(self, layer: int, q: Tensor) -> Tensor:
        return 2 * super()._attend(layer, q)


def test_what_stands_in_the_place_of_run_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = planned(TorchAttention(spec()))
    monkeypatch.setattr(backend, "run", lambda layer, q, k, v: torch.zeros_like(q))
    for other in (planned(Doubled(spec())), planned(TorchAttention(spec(dtype="float32"))), backend):
        assert other.step_attention() == other.run
    q, k, v = drawn(22, 4, 32), drawn(22, 2, 32), drawn(22, 2, 32)
    right = planned(TorchAttention(spec())).run(0, q, k, v)
    assert torch.equal(planned(Doubled(spec())).run(0, q, k, v), 2 * right)


def test_it_holds_the_memory_it_points_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the kernel has got itself more, for a longer step and for more threads."""
    backend, model, (x, cos, sin) = planned(TorchAttention(spec(num_blocks=200))), decoder(), rows()
    attention, kernel = backend.step_attention(), backend._kernel
    assert isinstance(attention, CompiledAttention)
    assert isinstance(kernel, tiled_kernel.TiledKernel)
    first = model(x.clone(), cos, sin, attention)
    monkeypatch.setattr("kvproof.attention.native.num_threads", lambda: 7)
    backend.plan(BatchPlan.build([array("i", range(1, 189))], [3000], [1], 16))
    q, k, v = drawn(1, 4, 32), drawn(1, 2, 32), drawn(1, 2, 32)
    backend.run(0, q, k, v)
    assert len(kernel._parts) > 0
    gc.collect()
    torch.full((10**6,), torch.nan)  # in what was freed, if it was
    again = model(x.clone(), cos, sin, attention)
    assert first is not None
    assert again is not None
    assert torch.equal(first, again)


def test_a_cache_that_has_moved_and_another_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = planned(TorchAttention(spec()))
    attention, model = backend.step_attention(), decoder()
    backend.cache.share_memory_()
    with pytest.raises(NotPlanned, match=r"^the cache has moved"):
        model(*rows(), attention)
    attention = backend.step_attention()
    model(*rows(), attention)
    monkeypatch.setattr("os.getpid", lambda: 1)
    with pytest.raises(NotPlanned, match=r"^the step was planned by another process"):
        model(*rows(), attention)
