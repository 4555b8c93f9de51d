"""Attention that compiled code can call: no Python between a model's layers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from kvproof.attention.errors import NotPlanned
from kvproof.attention.spec import CacheSpec


@dataclass(frozen=True, slots=True, eq=False)
class CompiledAttention:
    """A planned step's `AttentionBackend.run`, which it is called as, and the same as a C function:

        void attend(void *context, int layer, const void *q, const void *k, const void *v, size_t stride, void *out)

    They are as for `run`, in the dtype of `spec`: `out` [num_tokens, num_heads, head_size] is contiguous; the others
    have each token's heads in one piece, and the next token's `stride` bytes further. Nothing is checked there, so
    `check` comes before a step's first call. It is good until the next plan, and `lock` is to be held during a call.
    """

    run: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    spec: CacheSpec
    cache: Tensor = field(repr=False)
    num_tokens: int
    function: int
    context: int
    lock: threading.Lock
    memory: object = field(repr=False)
    """What `context` points into, beside the cache."""
    cache_at: int = field(init=False)
    process: int = field(init=False, default_factory=os.getpid)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_at", self.cache.data_ptr())

    def check(self) -> None:
        """Raise `NotPlanned` where the cache has moved since, or in a forked child, which has none of the threads."""
        if os.getpid() != self.process:
            raise NotPlanned("the step was planned by another process, before this one was forked")
        if self.cache.data_ptr() != self.cache_at:
            raise NotPlanned("the cache has moved since the step was planned")

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.run(layer, q, k, v)
