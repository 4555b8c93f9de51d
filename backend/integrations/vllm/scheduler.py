"""vLLM's schedulers with our block manager, or with our pool below vLLM's own manager."""

from __future__ import annotations

from typing import Any

from kvproof.backend.integrations.vllm import seam
from kvproof.backend.integrations.vllm.manager import KVCacheManager
from kvproof.backend.integrations.vllm.pool import use_pool
from kvproof.backend.integrations.vllm.seam import Request
from kvproof.backend.integrations.vllm.supported import settings_of


class Scheduler(seam.Scheduler):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's scheduler on our `BlockManager`. Raises `UnsupportedFeature` for what that does not serve."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_cache_manager = KVCacheManager(settings_of(self))

    def add_request(self, request: Request) -> None:
        """As vLLM's. Our manager hashes for itself: vLLM's hashes are wanted for events only."""
        if not self.enable_kv_cache_events:
            request._block_hasher = None
        super().add_request(request)


class AsyncScheduler(Scheduler, seam.AsyncScheduler):  # type: ignore[misc]
    """The same for asynchronous scheduling."""


class PoolScheduler(seam.Scheduler):  # type: ignore[misc]
    """vLLM's scheduler and KV-cache manager, hybrid models included, on our block pool."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_pool(self)


class AsyncPoolScheduler(PoolScheduler, seam.AsyncScheduler):  # type: ignore[misc]
    """The same for asynchronous scheduling."""
