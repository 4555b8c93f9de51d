"""What our block manager serves of vLLM's features, and the refusal of the others by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvproof.backend.integrations.vllm.errors import UnsupportedFeature
from kvproof.backend.integrations.vllm.seam import (
    FullAttentionManager,
    SlidingWindowManager,
    get_kv_cache_spec_kind,
)

POOL = "use PoolScheduler, which keeps vLLM's own manager, or vLLM's scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a scheduler tells its manager.

    num_blocks       in the KV cache, block 0, which vLLM pads with, among them
    max_model_len    tokens that a request never outgrows
    window           of a sliding-window group
    admission_cap    blocks that a request of such a group never exceeds, for admission
    watermark        blocks that an admission must leave free while others run
    drop_last_hit    the last block of a hit is computed again, for EAGLE's sake
    zeroing          the worker zeroes new blocks, and must be told of them
    kind, spec       of the group, as vLLM calls it
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    enable_caching: bool
    window: int | None = None
    admission_cap: int | None = None
    watermark: int = 0
    drop_last_hit: bool = False
    zeroing: bool = False
    log_stats: bool = False
    events: bool = False
    kind: str = "full_attention"
    spec: Any = None


def settings_of(scheduler: Any) -> Settings:
    """What a vLLM scheduler that was just made wants of its manager. Raises `UnsupportedFeature`."""
    config, groups = scheduler.vllm_config, scheduler.kv_cache_config.kv_cache_groups
    if config.kv_transfer_config is not None:
        raise UnsupportedFeature("KV connectors (kv_transfer_config)", POOL)
    if scheduler.is_encoder_decoder:
        raise UnsupportedFeature("encoder-decoder models", POOL)
    if len(groups) != 1:
        raise UnsupportedFeature(f"hybrid models ({len(groups)} KV-cache groups)", POOL)
    spec = groups[0].kv_cache_spec
    stock = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    if type(stock) not in (FullAttentionManager, SlidingWindowManager):
        kind = get_kv_cache_spec_kind(spec).value
        raise UnsupportedFeature(f"{type(spec).__name__} ({kind})", POOL)
    window = spec.sliding_window if type(stock) is SlidingWindowManager else None
    unsupported = {
        "context parallelism": scheduler.dcp_world_size > 1 or scheduler.pcp_world_size > 1,
        "prompt embeddings (enable_prompt_embeds)": config.model_config.enable_prompt_embeds,
        "KV-cache residency metrics (kv_cache_metrics)": scheduler.kv_metrics_collector is not None,
        "prefix matches shorter than a block (prefix_match_unit)": scheduler.hash_block_size != scheduler.block_size,
        "several draft modules (num_prefill_lookahead above 1)": scheduler.num_prefill_lookahead > 1,
        "EAGLE with a sliding window": scheduler.use_eagle_block_drop and window is not None,
        # 0, vLLM's default, keeps what a prompt's next request may build on; ours keeps more, which serves as well.
        "sparse retention (prefix_cache_retention_interval above 0)": window is not None
        and bool(scheduler.kv_cache_config.prefix_cache_retention_interval),
    }
    for feature, asked in unsupported.items():
        if asked:
            raise UnsupportedFeature(feature, POOL)
    num_blocks = scheduler.kv_cache_config.num_blocks
    return Settings(
        num_blocks=num_blocks,
        block_size=scheduler.block_size,
        max_model_len=scheduler.max_model_len,
        enable_caching=bool(scheduler.cache_config.enable_prefix_caching),
        window=window,
        admission_cap=spec.max_admission_blocks_per_request(config.max_in_flight_tokens, scheduler.max_model_len)
        if window is not None
        else None,
        watermark=int(scheduler.scheduler_config.watermark * num_blocks),
        drop_last_hit=scheduler.use_eagle_block_drop,
        zeroing=scheduler.kv_cache_config.needs_kv_cache_zeroing,
        log_stats=scheduler.log_stats,
        events=scheduler.enable_kv_cache_events,
        kind=get_kv_cache_spec_kind(spec).value,
        spec=spec,
    )
