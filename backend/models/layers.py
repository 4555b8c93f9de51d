"""What a decoder layer does between its matrix products, in one pass over memory each.

PyTorch takes up to eight passes for one of them, each with the cost of an operator: in a decode step of a small model
that is as much as attention. So on the CPU they are compiled (`layers.c`), with the same rounding; where that can't be
had, and on other devices, they are PyTorch's.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvproof.attention import native

SOURCE = Path(__file__).with_name("layers.c")
THREAD_ELEMENTS = 2**14
"""Elements that are worth a thread."""


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to x [T, hidden] in place, and return the result divided by its root mean square, times `weight`."""
    library = _library(x)
    if library is None:
        if delta is not None:
            x += delta
        return F.rms_norm(x, weight.shape, weight, eps)
    out = torch.empty_like(x)
    added = None if delta is None else delta.data_ptr()
    library.kvproof_add_rms_norm(*_call(x), *x.shape, x.data_ptr(), added, weight.data_ptr(), eps, out.data_ptr())
    return out


def rotate(heads: Tensor, count: int, cos: Tensor, sin: Tensor) -> None:
    """Apply rotary position embeddings to the first `count` of `heads` [T, all heads, head_size], in place.

    `cos` and `sin` [T, head_size] multiply a head and that head with its halves swapped.
    """
    library = _library(heads)
    if library is None:
        turned = heads[:, :count]
        swapped = turned.roll(turned.shape[-1] // 2, dims=-1)
        turned.copy_(torch.addcmul(turned * cos[:, None], swapped, sin[:, None]))
        return
    rows, all_heads, size = heads.shape
    places = heads.data_ptr(), cos.data_ptr(), sin.data_ptr()
    library.kvproof_rotate(*_call(heads), rows, all_heads, count, size, *places)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `gate_up` [T, 2 * inner], a row's gates before its ups: [T, inner]."""
    library = _library(gate_up)
    if library is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, size))
    library.kvproof_silu_mul(*_call(gate_up), rows, size, gate_up.data_ptr(), out.data_ptr())
    return out


def _call(x: Tensor) -> tuple[int, int]:
    """The number of x's type, and of threads."""
    return _numbers()[x.dtype], min(native.num_threads(), 1 + x.numel() // THREAD_ELEMENTS)


def _library(x: Tensor) -> ctypes.CDLL | None:
    return _load() if x.device.type == "cpu" and x.dtype in _numbers() and x.is_contiguous() else None


@cache
def _numbers() -> dict[torch.dtype, int]:
    return {getattr(torch, name): number for number, name in enumerate(native.DTYPES)}


@cache
def _load() -> ctypes.CDLL | None:
    library = native.loaded(SOURCE)
    if library is None:
        return None
    ints, pointers = [c_int] * 4, [c_void_p] * 3
    library.kvproof_add_rms_norm.argtypes = [*ints, *pointers, c_float, c_void_p]
    library.kvproof_rotate.argtypes = [*ints, c_int, c_int, *pointers]
    library.kvproof_silu_mul.argtypes = [*ints, c_void_p, c_void_p]
    for function in (library.kvproof_add_rms_norm, library.kvproof_rotate, library.kvproof_silu_mul):
        function.restype = None
    return library
