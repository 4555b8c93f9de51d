"""Linear projections, with their weights laid out as the processor likes them.

On a processor with a matrix unit (Intel AMX), products in bfloat16 are our own (`linear.c`). Those of a decode step
take two thirds of the time that oneDNN takes for them, and a row has the same bits alone and in any batch. Elsewhere
oneDNN packs the weights, and where that can't be had, projections are PyTorch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int, c_size_t, c_void_p
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvproof.allocator import InvalidArgument
from kvproof.attention import native
from kvproof.attention.large_pages import LargePages
from kvproof.backend.models.layers import silu_mul

SOURCE = Path(__file__).with_name("linear.c")
TILE, DEPTH = 16, 32
"""Outputs and inputs of a tile; a panel has two tiles side by side."""
THREAD_BYTES = 2**16
"""Weights that are worth a thread: reading as much takes about as long as waking one and waiting for it."""
PACKED_ROWS = 512
"""Batch size that oneDNN is told to lay weights out for. Smaller and larger ones run as fast with this layout."""

Projection = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out]."""


def linear(weight: Tensor, bias: Tensor | None, memory: LargePages) -> Projection:
    """x @ weight.T + bias, for many calls. A weight that is laid out anew lies in `memory`."""
    library = tiles()
    if library is not None and _fits_tiles(weight, bias):
        return TiledLinear(library, weight, bias, memory)
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _can_pack():
        return partial(_packed_linear, torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS), bias)
    return lambda x: F.linear(x, weight, bias)


def gated_linear(gate: Tensor, up: Tensor, memory: LargePages) -> Projection:
    """silu(x @ gate.T) * (x @ up.T), for many calls."""
    library, both = tiles(), torch.stack((gate, up))
    if library is not None and _fits_tiles(gate):
        panels = both.view(2, -1, TILE, gate.shape[1]).transpose(0, 1)  # of 16 gates and their 16 ups each
        return TiledLinear(library, panels.reshape(-1, gate.shape[1]), None, memory, gated=True)
    projection = linear(both.flatten(0, 1), None, memory)
    return lambda x: silu_mul(projection(x))


class TiledWeight(ctypes.Structure):
    """`Weight` of linear.c."""

    _fields_ = [
        *((name, c_int) for name in ("inputs", "outputs", "gated")),
        *((name, c_void_p) for name in ("panels", "bias")),
    ]


class TiledLinear:
    """A projection on the matrix unit: `weight` [out, in] in bfloat16, of whole panels.

    With `gated`, each panel of 32 outputs is 16 gates and then their 16 ups, and the result silu(gate) * up.
    """

    def __init__(
        self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, memory: LargePages, *, gated: bool = False
    ) -> None:
        self._call = library.kvproof_linear
        outputs, self._inputs = weight.shape
        self._results = outputs // 2 if gated else outputs
        # [panel, half, output, depth, pair of inputs, 2] -> [panel, depth, half, pair of inputs, output, 2]
        tiles = weight.view(outputs // (2 * TILE), 2, TILE, self._inputs // DEPTH, DEPTH // 2, 2)
        self._panels = memory.empty(weight.nbytes).view(torch.bfloat16)
        self._panels.view(outputs // (2 * TILE), self._inputs // DEPTH, 2, DEPTH // 2, TILE, 2).copy_(
            tiles.permute(0, 3, 1, 4, 2, 5)
        )
        self._bias = bias if bias is None else bias.contiguous()
        bias_at = None if self._bias is None else self._bias.data_ptr()
        self.weight = TiledWeight(self._inputs, outputs, gated, self._panels.data_ptr(), bias_at)
        self.most_threads = 1 + weight.nbytes // THREAD_BYTES

    def __call__(self, x: Tensor) -> Tensor:
        """Raises `InvalidArgument` unless x is [T, in], bfloat16 on the CPU: other memory would be read."""
        if x.dim() != 2 or x.shape[1] != self._inputs or x.dtype != torch.bfloat16 or x.device.type != "cpu":
            given = f"{x.dtype} {list(x.shape)} on {x.device}"
            raise InvalidArgument(f"x is {given}; it must be torch.bfloat16 [T, {self._inputs}] on the CPU")
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        y = x.new_empty((rows, self._results))
        threads = min(native.num_threads(), self.most_threads)
        self._call(self.weight, threads, rows, x.data_ptr(), x.stride(0) * 2, y.data_ptr())
        return y


def _fits_tiles(weight: Tensor, bias: Tensor | None = None) -> bool:
    whole = weight.shape[0] % (2 * TILE) == 0 and weight.shape[1] % DEPTH == 0
    if bias is not None and (bias.dtype != weight.dtype or bias.shape != weight.shape[:1]):
        return False
    return whole and weight.device.type == "cpu" and weight.dtype == torch.bfloat16


@cache
def tiles() -> ctypes.CDLL | None:
    """The compiled library, where the processor has the unit and the system lets this process use it."""
    library = native.loaded(SOURCE)
    if library is None or not library.kvproof_may_use_tiles():
        return None
    library.kvproof_linear.argtypes = [POINTER(TiledWeight), c_int, c_int, c_void_p, c_size_t, c_void_p]
    library.kvproof_linear.restype = None
    return library


def _packed_linear(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


@cache
def _can_pack() -> bool:
    """PyTorch keeps these two operators for its compiler; without them, or with others, `F.linear` does as well."""
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    weight = torch.eye(64, dtype=torch.bfloat16)
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        return torch.equal(_packed_linear(packed, None, x), F.linear(x, weight))
    except (AttributeError, RuntimeError):
        return False
