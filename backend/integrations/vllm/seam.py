"""Everything that the integration takes from vLLM, in one place. Importing this imports vLLM.

Raises `UnsupportedVllm` where the installed version is not among those that `contract` has on record.
"""

from __future__ import annotations

from typing import Any

from vllm.version import __version__

from kvproof.backend.integrations.vllm.contract import require_known

require_known(__version__)

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    KVCacheBlock,
    generate_block_hash_extra_keys,
    get_block_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import (  # noqa: E402
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.metrics.stats import PrefixCacheStats  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

__all__ = [
    "AllBlocksCleared",
    "AsyncScheduler",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "FullAttentionManager",
    "KVCacheBlock",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVCacheManager",
    "PrefixCacheStats",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SingleTypeKVCacheManager",
    "SlidingWindowManager",
    "generate_block_hash_extra_keys",
    "get_block_hash",
    "get_kv_cache_spec_kind",
    "get_kv_cache_spec_sliding_window",
    "maybe_convert_block_hash",
    "to_event_extra_keys",
]


def _as_they_are(extra_keys: list[Any]) -> list[Any] | None:
    return extra_keys or None


to_event_extra_keys = getattr(kv_cache_utils, "to_event_extra_keys", _as_they_are)
"""Extra keys as events carry them; until 0.30 as the block hash does."""
