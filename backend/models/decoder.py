"""A decoder's layers, around the attention between them: one operation after the other, or compiled.

A decode step of a small model is hundreds of operations of microseconds each, and to call them takes as long again.
Where all projections are on the matrix unit, what is between two layers' attention is one call (`decoder.c`), of the
same parts and with the same bits; and where attention is compiled too, all layers are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_float, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvproof.allocator import InvalidArgument
from kvproof.attention import native
from kvproof.attention.compiled import CompiledAttention
from kvproof.backend.models.layers import SOURCE as LAYERS
from kvproof.backend.models.layers import add_rms_norm, rotate
from kvproof.backend.models.linear import SOURCE as LINEAR
from kvproof.backend.models.linear import Projection, TiledLinear, TiledWeight, tiles

SOURCE = Path(__file__).with_name("decoder.c")

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`Step.attention`."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights, with projections of the same input fused."""

    attention_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_size]
    output: Projection
    mlp_norm: Tensor
    gate_up: Projection  # silu(gate) * up
    down: Projection


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_size: int
    eps: float


class Decoder:
    """All layers of a decoder, operation by operation."""

    def __init__(self, layers: Sequence[Layer], shape: Shape) -> None:
        self._layers, self._shape = layers, shape

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor | None:
        """Go through the layers with x [T, hidden], in place. Returns what is still to be added to it.

        `cos` and `sin` are those of `rotate`.
        """
        shape, delta = self._shape, None
        rotated = shape.num_heads + shape.num_kv_heads
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(add_rms_norm(x, delta, layer.attention_norm, shape.eps))
            heads = qkv.view(len(x), rotated + shape.num_kv_heads, shape.head_size)
            if layer.qk_norm is not None:
                qk = heads[:, :rotated]
                qk.copy_(F.rms_norm(qk, (shape.head_size,), eps=shape.eps) * layer.qk_norm)
            rotate(heads, rotated, cos, sin)
            delta = layer.output(attention(index, *_split(heads, shape)).flatten(1))
            delta = layer.down(layer.gate_up(add_rms_norm(x, delta, layer.mlp_norm, shape.eps)))
        return delta


def _split(heads: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, num_heads, head_size], and k and v [T, num_kv_heads, head_size]."""
    rotated = shape.num_heads + shape.num_kv_heads
    return heads[:, : shape.num_heads], heads[:, shape.num_heads : rotated], heads[:, rotated:]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm")),
        *((name, TiledWeight) for name in ("qkv", "output", "gate_up", "down")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, c_int) for name in ("threads", "rows", "hidden", "heads", "turned", "head_size", "inner")),
        ("eps", c_float),
        *((name, c_void_p) for name in ("cos", "sin", "x", "normed", "qkv", "gated", "delta")),
    ]


class CompiledDecoder:
    """The same in one call where attention is compiled too, and else in one between two layers' attention.

    `can_run` says where.
    """

    @staticmethod
    def can_run(layers: Sequence[Layer], shape: Shape) -> bool:
        return bool(layers) and all(_fits(layer, layers[0], shape) for layer in layers) and _load() is not None

    def __init__(self, layers: Sequence[Layer], shape: Shape) -> None:
        library = _load()
        if library is None:
            raise RuntimeError("there is no compiled decoder: see can_run")
        self._between, self._all = library.kvproof_between_attention, library.kvproof_decoder
        self._layers, self._shape = layers, shape  # whose memory is pointed to
        self._structures = (_Layer * len(layers))(*map(_structure, layers))
        self._inner: int = self._structures[0].down.inputs
        self._most_threads = max(it.most_threads for it in _tiled(layers[0]))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor | None:
        shape, rows, hidden = self._shape, len(x), self._structures[0].qkv.inputs
        shapes = [x.shape, cos.shape, sin.shape]
        if shapes != [(rows, hidden), *[(rows, shape.head_size)] * 2] or not all(map(_is_plain, (x, cos, sin))):
            expected = f"contiguous bfloat16 on the CPU, x of {hidden} elements and the others of {shape.head_size}"
            raise InvalidArgument(f"x, cos and sin are {shapes}; they must be {expected}")
        num_heads = shape.num_heads + 2 * shape.num_kv_heads
        heads = x.new_empty((rows, num_heads, shape.head_size))
        normed, delta, gated = torch.empty_like(x), torch.empty_like(x), x.new_empty((rows, self._inner))
        step = _Step(
            min(native.num_threads(), self._most_threads),
            *(rows, hidden, num_heads, shape.num_heads + shape.num_kv_heads, shape.head_size, self._inner, shape.eps),
            *(tensor.data_ptr() for tensor in (cos, sin, x, normed, heads, gated, delta)),
        )
        if isinstance(attention, CompiledAttention):
            self._attend_compiled(attention, step, x)
        else:
            self._attend(attention, step, heads)
        return delta

    def _attend_compiled(self, attention: CompiledAttention, step: _Step, x: Tensor) -> None:
        spec, shape = attention.spec, self._shape
        given = (attention.num_tokens, spec.num_heads, spec.num_kv_heads, spec.head_size, spec.dtype, spec.num_layers)
        wanted = (len(x), shape.num_heads, shape.num_kv_heads, shape.head_size, "bfloat16", len(self._layers))
        if given != wanted:
            names = "tokens, num_heads, num_kv_heads, head_size, dtype and num_layers"
            raise InvalidArgument(f"attention is planned for {given} ({names}); the model has {wanted}")
        attention.check()
        attended = x.new_empty((len(x), shape.num_heads, shape.head_size))
        with attention.lock:
            self._all(
                *(self._structures, len(self._layers), step, attention.function, attention.context),
                attended.data_ptr(),
            )

    def _attend(self, attention: Attention, step: _Step, heads: Tensor) -> None:
        q, k, v = _split(heads, self._shape)
        last, attended = None, None
        for index, layer in enumerate(self._structures):
            self._between(last, layer, step, None if attended is None else attended.data_ptr())
            attended = attention(index, q, k, v).contiguous()
            if attended.shape != q.shape or attended.dtype != heads.dtype or attended.device != heads.device:
                given = f"{attended.dtype} {list(attended.shape)} on {attended.device}"
                wanted = f"{heads.dtype} {list(q.shape)} on {heads.device}"
                raise InvalidArgument(f"attention returned {given}; it must be {wanted}")
            last = layer
        self._between(last, None, step, None if attended is None else attended.data_ptr())


def _tiled(layer: Layer) -> list[TiledLinear]:
    """Its projections that are on the matrix unit, in their order."""
    projections = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return [it for it in projections if isinstance(it, TiledLinear)]


def _fits(layer: Layer, first: Layer, shape: Shape) -> bool:
    """Whether a layer's weights are of the sizes that the compiled code takes them to be."""
    tiled, of_first = _tiled(layer), _tiled(first)
    if layer.qk_norm is not None or len(tiled) < 4 or len(of_first) < 4:
        return False
    hidden, inner = of_first[0].weight.inputs, of_first[3].weight.inputs
    q, qkv = (n * shape.head_size for n in (shape.num_heads, shape.num_heads + 2 * shape.num_kv_heads))
    sizes = [(it.weight.inputs, it.weight.outputs, bool(it.weight.gated)) for it in tiled]
    right = [(hidden, qkv, False), (q, hidden, False), (hidden, 2 * inner, True), (inner, hidden, False)]
    norms = (layer.attention_norm, layer.mlp_norm)
    return sizes == right and all(norm.shape == (hidden,) and _is_plain(norm) for norm in norms)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.device.type == "cpu"


def _structure(layer: Layer) -> _Layer:
    norms = layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr()
    return _Layer(*norms, *(it.weight for it in _tiled(layer)))


@cache
def _load() -> ctypes.CDLL | None:
    library = native.loaded(SOURCE, LAYERS, LINEAR)
    if library is None or tiles() is None:
        return None
    library.kvproof_between_attention.argtypes = [*[POINTER(_Layer)] * 2, POINTER(_Step), c_void_p]
    library.kvproof_between_attention.restype = None
    library.kvproof_decoder.argtypes = [POINTER(_Layer), c_int, POINTER(_Step), *[c_void_p] * 3]
    library.kvproof_decoder.restype = None
    return library
