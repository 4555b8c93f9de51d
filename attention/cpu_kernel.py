"""The decode kernel: `decode.c`, compiled when it is first needed.

Where it can't be had (no C compiler, no folder of the user's own), a warning in the log says why, and attention falls
back to PyTorch's operators. `KVPROOF_NO_KERNEL=1` in the environment chooses that.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
from ctypes import POINTER, c_float, c_int, c_int32, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvproof.attention.native import DTYPES, built, num_threads, switched_off
from kvproof.attention.plan import BatchPlan
from kvproof.attention.planned_kernel import THREAD_BYTES, PlannedKernel, rows_of
from kvproof.attention.spec import INT32_LIMIT, CacheSpec

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decode.c")


class Shape(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("dtype", "num_heads", "num_kv_heads", "head_size", "block_size", "hnd")),
        ("scale", c_float),
        ("soft_cap", c_float),
    ]


class Plan(ctypes.Structure):
    _fields_ = [
        ("num_spans", c_int32),
        *(
            (name, c_void_p)
            for name in ("span_indptr", "span_rows", "kv_indptr", "kv_indices", "starts", "seq_lens", "pending", "work")
        ),
    ]


class Planned(NamedTuple):
    """A step for the kernel. `plan` points into `arrays`, which are copies: what a caller does to its own batch later
    must not decide where memory is written."""

    rows: int
    tokens: int
    most_threads: int
    plan: Plan
    slots: NDArray[np.int32]
    arrays: tuple[object, ...]


class DecodeKernel(PlannedKernel[Planned]):
    """Attention of a step's decodes, and the writing of all its keys and values, on one cache."""

    @classmethod
    def create(cls, spec: CacheSpec, kv_cache: Tensor) -> DecodeKernel | None:
        """The kernel on the cache of `spec`, or None where this machine or this cache has none."""
        if spec.cache_dtype is not None or kv_cache.device.type != "cpu" or spec.dtype not in DTYPES:
            return None
        if switched_off():
            return None
        library = load()
        return None if library is None else cls(library, spec, kv_cache)

    def __init__(self, library: ctypes.CDLL, spec: CacheSpec, kv_cache: Tensor) -> None:
        super().__init__(spec, kv_cache)
        self._library = library
        self._shape = Shape(
            DTYPES.index(spec.dtype),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            spec.block_size,
            spec.layout == "HND",
            spec.softmax_scale,
            spec.soft_cap or 0.0,
        )
        self._span_bytes = library.kvproof_span_bytes(self._shape)

    @staticmethod
    def num_attended(batch: BatchPlan) -> int:
        """How many of a batch's tokens, from the first on, it attends for."""
        return batch.num_decodes

    def plan(self, batch: BatchPlan) -> None:
        """Prepare a validated batch."""
        rows = batch.num_decodes
        kv_indptr, kv_indices, seq_lens, slots = (
            array.numpy().copy() for array in (batch.kv_indptr, batch.kv_indices, batch.seq_lens, batch.slot_mapping)
        )
        seen = np.minimum(seq_lens[:rows], self._spec.window or INT32_LIMIT - 1)
        starts = seq_lens[:rows] - seen
        spans = -(-seen // self._library.kvproof_span_tokens())
        span_indptr = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(spans, out=span_indptr[1:])
        num_spans = int(span_indptr[-1])
        span_rows = np.repeat(np.arange(rows, dtype=np.int32), spans)
        work = torch.empty(num_spans * self._span_bytes, dtype=torch.uint8, device="cpu")  # aligned, as it must be
        arrays = (span_indptr, span_rows, kv_indptr, kv_indices, starts, seq_lens, spans)
        plan = Plan(num_spans, *(array.ctypes.data for array in arrays), work.data_ptr())
        most_threads = 1 + int(seen.sum()) * self._token_bytes // THREAD_BYTES
        with self._lock:
            self._planned = Planned(rows, batch.num_tokens, most_threads, plan, slots, (*arrays, work))

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write all tokens' k and v [T, num_kv_heads, head_size] to their slots."""
        k, v = self._packed(k), self._packed(v)
        with self._lock:
            step = self._step(len(k))
            slots, cache = step.slots.ctypes.data, self._cache[layer].data_ptr()
            self._library.kvproof_write(self._shape, step.tokens, slots, cache, *rows_of(k), *rows_of(v))

    def attend(self, layer: int, q: Tensor, lse: Tensor | None = None) -> Tensor:
        """Attention of the decodes, which are the first of q's tokens: [num_decodes, num_heads, head_size].

        Fills the first rows of `lse`, contiguous float32 [T, num_heads], with the natural log-sum-exps of their scores.
        """
        q = self._packed(q)
        with self._lock:
            step = self._step(len(q))
            out = q.new_empty((step.rows, *q.shape[1:]))
            threads, cache = min(num_threads(), step.most_threads), self._cache[layer].data_ptr()
            results = out.data_ptr(), None if lse is None else lse.data_ptr()
            self._library.kvproof_decode(self._shape, step.plan, threads, cache, *rows_of(q), *results)
        return out


@cache
def load() -> ctypes.CDLL | None:
    """The compiled library, built unless the cache has it; None, and a warning, where it can't be built."""
    try:
        library = ctypes.CDLL(str(built(SOURCE)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("decode attention runs without its compiled kernel, several times slower: %s", error)
        return None
    library.kvproof_span_tokens.restype = c_int
    library.kvproof_span_bytes.argtypes = [POINTER(Shape)]
    library.kvproof_span_bytes.restype = c_size_t
    library.kvproof_decode.argtypes = [POINTER(Shape), POINTER(Plan), c_int, *[c_void_p] * 2, c_size_t, *[c_void_p] * 2]
    library.kvproof_decode.restype = None
    library.kvproof_write.argtypes = [POINTER(Shape), c_int, *[c_void_p] * 3, c_size_t, c_void_p, c_size_t]
    library.kvproof_write.restype = None
    return library
