"""Attention on the processor's matrix unit: `tiled.c`, where there is Intel AMX.

Prefills and decodes alike, in bfloat16. A token's result has the same bits in any batch, and whether it was a decode or
one of a prefill of any length.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_int32, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvproof.attention import native
from kvproof.attention.compiled import CompiledAttention
from kvproof.attention.errors import NotPlanned
from kvproof.attention.plan import BatchPlan
from kvproof.attention.planned_kernel import THREAD_BYTES, PlannedKernel, rows_of
from kvproof.attention.spec import INT32_LIMIT, CacheSpec
from kvproof.attention.tiled_plan import SPAN, cut

SOURCE = Path(__file__).with_name("tiled.c")
TILE, QUERIES, HEAD_SIZE, DEPTH = 16, 96, 256, 32
"""Queries of a column, most queries of a key head in an item, largest head size, and what it is a multiple of."""


class Shape(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_size", "block_size", "hnd")),
        ("scale", c_float),
        ("soft_cap", c_float),
    ]


class Plan(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("num_items", "num_tokens")),
        *((name, c_void_p) for name in ("items", "members", "rows", "starts", "ends", "first_parts", "num_parts")),
        *((name, c_void_p) for name in ("kv_indptr", "kv_indices", "slot_mapping", "pending", "parts")),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("cache", "q", "k", "v")),
        *((name, c_size_t) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_void_p) for name in ("out", "lse")),
    ]


class Context(ctypes.Structure):
    _fields_ = [
        ("shape", POINTER(Shape)),
        ("plan", POINTER(Plan)),
        ("cache", c_void_p),
        ("layer_bytes", c_size_t),
        ("work", c_void_p),
        ("threads", c_int),
    ]


class Planned(NamedTuple):
    """A step for the kernel. `plan` points into `arrays`, which are copies: what a caller does to its own batch later
    must not decide where memory is written."""

    tokens: int
    most_threads: int
    plan: Plan
    arrays: tuple[object, ...]


class TiledKernel(PlannedKernel[Planned]):
    """Attention of a step's tokens, and the writing of their keys and values, on one cache.

    Subnormal numbers count as zero.
    """

    @classmethod
    def create(cls, spec: CacheSpec, kv_cache: Tensor) -> TiledKernel | None:
        """The kernel on the cache of `spec`, or None where this machine or this cache has none."""
        if spec.cache_dtype is not None or kv_cache.device.type != "cpu" or spec.dtype != "bfloat16":
            return None
        if spec.head_size % DEPTH or spec.head_size > HEAD_SIZE or spec.group_size > QUERIES:
            return None
        if native.switched_off():
            return None
        library = load()
        return None if library is None else cls(library, spec, kv_cache)

    def __init__(self, library: ctypes.CDLL, spec: CacheSpec, kv_cache: Tensor) -> None:
        super().__init__(spec, kv_cache)
        self._library = library
        self._shape = Shape(
            *(spec.num_heads, spec.num_kv_heads, spec.head_size, spec.block_size, spec.layout == "HND"),
            *(spec.softmax_scale, spec.soft_cap or 0.0),
        )
        self._part_floats: int = library.kvproof_part_floats(self._shape)
        self._work_bytes: int = library.kvproof_work_bytes()
        self._work = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._parts = torch.empty(0, dtype=torch.float32, device="cpu")

    @staticmethod
    def num_attended(batch: BatchPlan) -> int:
        """How many of a batch's tokens, from the first on, it attends for."""
        return batch.num_tokens

    def plan(self, batch: BatchPlan) -> None:
        """Prepare a validated batch."""
        qo_indptr, kv_indptr, kv_indices, slots, positions = (
            array.numpy().copy()
            for array in (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.slot_mapping, batch.positions)
        )
        ends = positions + np.int32(1)
        starts = np.maximum(ends - np.int32(self._spec.window or INT32_LIMIT - 1), 0)
        items, members, first_parts, num_parts = cut(
            *(qo_indptr, kv_indptr, kv_indices, starts, ends),
            decodes=batch.num_decodes,
            block_size=self._spec.block_size,
            threads=native.num_threads(),
            least=-(-TILE // self._spec.group_size),
            most=QUERIES // self._spec.group_size,
        )
        rows = np.repeat(np.arange(batch.num_rows, dtype=np.int32), np.diff(qo_indptr))
        arrays = (items, members, rows, starts, ends, first_parts, num_parts, kv_indptr, kv_indices, slots)
        pending = num_parts.copy()
        most_threads = 1 + int((ends - starts).sum(dtype=np.int64)) * self._token_bytes // THREAD_BYTES
        with self._lock:
            # Memory that was used before is real, and stays so; new memory is made real page by page.
            parts, size = self._parts, int(num_parts.sum(dtype=np.int64)) * self._part_floats
            if size > len(parts):
                parts = torch.empty(size, dtype=torch.float32, device="cpu")
            addresses = (array.ctypes.data for array in (*arrays, pending))
            plan = Plan(len(items), batch.num_tokens, *addresses, parts.data_ptr())
            self._planned = Planned(batch.num_tokens, most_threads, plan, (*arrays, pending, parts))
            self._parts = parts

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write all tokens' k and v [T, num_kv_heads, head_size] to their slots."""
        k, v = self._packed(k), self._packed(v)
        with self._lock:
            step = self._step(len(k))
            (at_k, k_stride), (at_v, v_stride) = rows_of(k), rows_of(v)
            call = Call(self._cache[layer].data_ptr(), None, at_k, at_v, 0, k_stride, v_stride, None, None)
            self._library.kvproof_write(self._shape, step.plan, call)

    def attend(self, layer: int, q: Tensor, lse: Tensor | None = None) -> Tensor:
        """Attention of all tokens, [T, num_heads, head_size].

        Fills `lse`, contiguous float32 [T, num_heads], with the natural log-sum-exps of their scores.
        """
        q = self._packed(q)
        with self._lock:
            step = self._step(len(q))
            out = q.new_empty(q.shape)
            at_q, q_stride = rows_of(q)
            cache, at_lse = self._cache[layer].data_ptr(), None if lse is None else lse.data_ptr()
            call = Call(cache, at_q, None, None, q_stride, 0, 0, out.data_ptr(), at_lse)
            threads = self._threads(step)
            self._library.kvproof_attend(self._shape, step.plan, call, threads, self._work.data_ptr())
        return out

    def compiled(self, run: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> CompiledAttention:
        """The planned step for compiled code, and `run` for others. Raises `NotPlanned` before the first plan."""
        with self._lock:
            step = self._planned
            if step is None:
                raise NotPlanned("there is no plan")
            threads = self._threads(step)
            layer_bytes = self._cache.stride(0) * self._cache.element_size()
            addresses = self._cache.data_ptr(), layer_bytes, self._work.data_ptr()
            context = Context(ctypes.pointer(self._shape), ctypes.pointer(step.plan), *addresses, threads)
        function = ctypes.cast(self._library.kvproof_attend_layer, c_void_p).value or 0
        memory = (context, step, self._work)
        return CompiledAttention(
            run, self._spec, self._cache, step.tokens, function, ctypes.addressof(context), self._lock, memory
        )

    def _threads(self, step: Planned) -> int:
        """How many threads the step is worth now; there is memory for them."""
        threads = min(native.num_threads(), step.most_threads)
        if (size := threads * self._work_bytes) > len(self._work):
            self._work = torch.empty(size, dtype=torch.uint8, device="cpu")
        return threads


@cache
def load() -> ctypes.CDLL | None:
    """The compiled library, where the processor has the unit and the system lets this process use it."""
    library = native.loaded(SOURCE, SOURCE.with_name("tiled_span.h"))
    if library is None or not library.kvproof_may_use_tiles():
        return None
    if [library.kvproof_limits(i) for i in range(3)] != [SPAN, QUERIES, HEAD_SIZE]:
        raise RuntimeError(f"{SOURCE} has other limits")
    library.kvproof_part_floats.argtypes = [POINTER(Shape)]
    library.kvproof_part_floats.restype = c_size_t
    library.kvproof_work_bytes.restype = c_size_t
    library.kvproof_attend.argtypes = [POINTER(Shape), POINTER(Plan), POINTER(Call), c_int, c_void_p]
    library.kvproof_attend.restype = None
    library.kvproof_write.argtypes = [POINTER(Shape), POINTER(Plan), POINTER(Call)]
    library.kvproof_write.restype = None
    return library
