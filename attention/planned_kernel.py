"""What the compiled attention kernels have in common: one cache, one planned step, and one caller at a time."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from kvproof.attention.errors import NotPlanned
from kvproof.attention.spec import CacheSpec

THREAD_BYTES = 2**16
"""Keys and values that are worth a thread: reading as much takes about as long as waking one and waiting for it."""


class Step(Protocol):
    @property
    def tokens(self) -> int: ...


S = TypeVar("S", bound=Step)


class PlannedKernel(Generic[S]):
    """A kernel on the cache of `spec`. Calls from several threads take turns."""

    def __init__(self, spec: CacheSpec, kv_cache: Tensor) -> None:
        self._spec = spec
        self._cache = kv_cache  # whose address is asked for at each call: it may move
        self._token_bytes = 2 * spec.num_kv_heads * spec.head_size * kv_cache.element_size()
        self._lock = threading.Lock()
        self._planned: S | None = None

    def _step(self, num_tokens: int) -> S:
        """The planned step, which must be of so many tokens: memory behind others would be read."""
        if self._planned is None or self._planned.tokens != num_tokens:
            raise NotPlanned(f"there are {num_tokens} tokens, and the last plan was of another step")
        return self._planned

    def _packed(self, x: Tensor) -> Tensor:
        """With each token's heads in one piece; tokens may be apart, as in a slice of fused projections."""
        return x if x.stride()[1:] == (self._spec.head_size, 1) else x.contiguous()


def rows_of(x: Tensor) -> tuple[int, int]:
    """Address of the first token, and bytes from one to the next."""
    return x.data_ptr(), x.stride(0) * x.element_size()
