"""Attention that compiled code can call: no Python between a model's layers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvproof.attention.spec import CacheSpec


@dataclass(frozen=True, slots=True)
class CompiledAttention:
    """A planned step's `AttentionBackend.run`, which it is called as, and the same as a C function:

        void attend(void *context, int layer, const void *q, const void *k, const void *v, size_t stride, void *out)

    They are as for `run`, in the dtype of `spec`: `out` [num_tokens, num_heads, head_size] is contiguous; the others
    have each token's heads in one piece, and the next token's `stride` bytes further. Nothing is checked. It is there
    until the next plan, and `lock` is to be held during a call.
    """

    run: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    spec: CacheSpec
    num_tokens: int
    function: int
    context: int
    lock: threading.Lock
    memory: object
    """What `context` points into."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.run(layer, q, k, v)
