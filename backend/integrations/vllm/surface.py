"""What of vLLM the integration stands on: names, signatures, fields, and what each means to us.

`seam` imports these names and no others. `contract` reads their sources, and has them on record for each version.
"""

from __future__ import annotations

NAMES = {
    "vllm.distributed.kv_events": ("AllBlocksCleared", "BlockRemoved", "BlockStored", "KVCacheEvent"),
    "vllm.v1.core.block_pool": ("BlockPool",),
    "vllm.v1.core.kv_cache_utils": (
        "KVCacheBlock", "generate_block_hash_extra_keys", "maybe_convert_block_hash", "to_event_extra_keys",
    ),
    "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",),
    "vllm.v1.core.sched.scheduler": ("Scheduler",),
    "vllm.v1.core.single_type_kv_cache_manager": ("FullAttentionManager", "SlidingWindowManager"),
    "vllm.v1.kv_cache_interface": ("get_kv_cache_spec_kind",),
    "vllm.v1.metrics.stats": ("PrefixCacheStats",),
    "vllm.v1.request": ("Request", "RequestStatus"),
    # of the attention
    "vllm.config": ("get_layers_from_vllm_config",),
    "vllm.model_executor.layers.attention": ("Attention",),
    "vllm.v1.attention.backend": (
        "AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder", "CommonAttentionMetadata",
    ),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum", "register_backend"),
    "vllm.v1.kv_cache_layout": ("KVCacheLayout",),
}  # fmt: skip
"""Modules, and what we import from them."""

SIGNATURES = {
    # what our schedulers extend
    "v1/core/sched/scheduler.py:Scheduler.__init__": "builds the KV-cache manager, which ours replaces after it",
    "v1/core/sched/scheduler.py:Scheduler.add_request": "the first that a scheduler sees of a request",
    "v1/core/sched/async_scheduler.py:AsyncScheduler.__init__": "as Scheduler's",
    # what our manager answers in the place of
    "v1/core/kv_cache_manager.py:KVCacheManager.allocate_slots": "None: no blocks, and nothing has changed",
    "v1/core/kv_cache_manager.py:KVCacheManager.get_computed_blocks": "hits, tokens, a boundary for sparse groups",
    "v1/core/kv_cache_manager.py:KVCacheManager.get_blocks": "all blocks of a request, for the worker",
    "v1/core/kv_cache_manager.py:KVCacheManager.free": "a request has finished, or is preempted",
    "v1/core/kv_cache_manager.py:KVCacheManager.pop_blocks_for_free": "as free, but the blocks are given back later",
    "v1/core/kv_cache_manager.py:KVCacheManager.cache_blocks": "so many tokens of a request are known and computed",
    "v1/core/kv_cache_manager.py:KVCacheManager.estimate_cached_tokens": "tokens of a request that are findable",
    "v1/core/kv_cache_manager.py:KVCacheManager.record_prefix_cache_stats": "once for each admission that looked",
    "v1/core/kv_cache_manager.py:KVCacheManager.make_prefix_cache_stats": "since the last call; None without log_stats",
    "v1/core/kv_cache_manager.py:KVCacheManager.reset_prefix_cache": "False while blocks are in use",
    "v1/core/kv_cache_manager.py:KVCacheManager.take_events": "since the last call",
    "v1/core/kv_cache_manager.py:KVCacheManager.take_new_block_ids": "blocks that the worker must zero",
    "v1/core/kv_cache_manager.py:KVCacheManager.take_kv_cache_block_copies": "copies on write, only for partial hits",
    "v1/core/kv_cache_manager.py:KVCacheManager.take_boundary_state_offloads": "only for Mamba",
    "v1/core/kv_cache_manager.py:KVCacheManager.new_step_starts": "the first call of a scheduler step",
    "v1/core/kv_cache_manager.py:KVCacheBlocks.get_block_ids": "one list for each group; None if allowed and all empty",
    # what our pool overrides and leans on
    "v1/core/block_pool.py:BlockPool.__init__": "blocks, free_block_queue, cached_block_hash_to_block, null_block",
    "v1/core/block_pool.py:BlockPool.get_new_blocks": "referenced once, their content gone; ValueError for too many",
    "v1/core/block_pool.py:BlockPool.touch": "one reference more on each",
    "v1/core/block_pool.py:BlockPool.free_blocks": "one reference less on each, the first is reused first",
    "v1/core/block_pool.py:BlockPool.reset_prefix_cache": "False while blocks are in use",
    "v1/core/block_pool.py:BlockPool.get_num_free_blocks": "unreferenced blocks, cached ones included",
    "v1/core/block_pool.py:BlockPool.unpin_blocks": "give up references to blocks that are read until they are reused",
    "v1/core/block_pool.py:BlockPool._maybe_evict_cached_block": "drop a block's content, with its events",
    "v1/core/block_pool.py:BlockPool._remove_cached_block_hashes": "pops a block's keys and resets its hash",
    "v1/core/kv_cache_utils.py:KVCacheBlock.set_block_hash": "a block becomes findable",
    "v1/core/kv_cache_utils.py:KVCacheBlock.reset_hash": "a block is findable no longer",
    # what we call
    "v1/core/kv_cache_utils.py:generate_block_hash_extra_keys": "what tells a block's content apart, beside its tokens",
    "v1/core/kv_cache_utils.py:maybe_convert_block_hash": "a block hash as events carry it",
    "v1/kv_cache_interface.py:get_kv_cache_spec_kind": "a group's kind, as events carry it",
    "v1/kv_cache_interface.py:SlidingWindowSpec.max_admission_blocks_per_request": "what a request holds at most",
    "v1/metrics/stats.py:PrefixCacheStats.record": "one admission",
    # what our attention backend extends
    "v1/attention/backend.py:AttentionBackend.get_name": "the member of AttentionBackendEnum that it is registered as",
    "v1/attention/backend.py:AttentionBackend.get_impl_cls": "the class of a layer's attention",
    "v1/attention/backend.py:AttentionBackend.get_builder_cls": "the class that makes a step's metadata",
    "v1/attention/backend.py:AttentionBackend.supported_kv_cache_layouts": "the cache is in one of these",
    "v1/attention/backend.py:AttentionBackend.supports_sliding_window": "models with windows may select it",
    "v1/attention/backend.py:AttentionMetadataBuilder.__init__": "one for each KV-cache group, before caches are bound",
    "v1/attention/backend.py:AttentionMetadataBuilder.build": "once a step, for its layers' forward",
    "v1/attention/backend.py:AttentionImpl.__init__": "one layer's attention, made with its model",
    "v1/attention/backend.py:AttentionImpl.forward": "writes the cache, then output; no metadata: memory is measured",
    # how it is selected, and finds its layers
    "v1/attention/backends/registry.py:register_backend": "a class, by its dotted name, for a member",
    "v1/attention/backends/registry.py:AttentionBackendEnum.is_overridden": "somebody has registered a class",
    "v1/attention/backends/registry.py:AttentionBackendEnum.get_path": "the registered class",
    "platforms/cpu.py:CpuPlatform.get_attn_backend_cls": "CPU_ATTN's path, whatever is selected",
    "config/vllm.py:get_layers_from_vllm_config": "the layers of a class, by name",
}
"""Functions and methods, and what they mean to us."""

FIELDS = {
    "v1/request.py:Request": (
        "request_id", "status", "num_computed_tokens", "num_prompt_tokens", "num_preemptions", "num_in_flight_tokens",
        "all_token_ids", "block_hashes", "_block_hasher", "cache_salt", "lora_request", "mm_features",
        "skip_reading_prefix_cache", "num_tokens", "is_finished", "session_id",
    ),
    "v1/core/kv_cache_utils.py:KVCacheBlock": (
        "block_id", "ref_cnt", "pool", "is_null", "block_hash", "block_hash_num_tokens",
    ),
    "v1/core/sched/scheduler.py:Scheduler": (
        "kv_cache_manager", "kv_cache_config", "vllm_config", "max_model_len", "block_size", "hash_block_size",
        "use_eagle_block_drop", "num_prefill_lookahead", "enable_kv_cache_events", "log_stats", "kv_metrics_collector",
        "dcp_world_size", "pcp_world_size", "is_encoder_decoder", "scheduler_config", "cache_config",
    ),
    "v1/core/kv_cache_manager.py:KVCacheManager": (
        "block_pool", "coordinator", "empty_kv_cache_blocks", "usage", "watermark_blocks",
    ),
    "v1/core/kv_cache_coordinator.py:KVCacheCoordinator": ("block_pool", "single_type_managers"),
    "v1/core/single_type_kv_cache_manager.py:SingleTypeKVCacheManager": (
        "block_pool", "block_size", "kv_cache_spec", "_null_block",
    ),
    "v1/kv_cache_interface.py:KVCacheConfig": ("num_blocks", "kv_cache_groups", "needs_kv_cache_zeroing"),
    "v1/core/block_pool.py:BlockPool": (
        "blocks", "free_block_queue", "cached_block_hash_to_block", "null_block", "kv_event_queue", "enable_caching",
        "hash_block_size", "enable_kv_cache_events", "metrics_collector", "medium", "_reuse_watchers",
    ),
    "distributed/kv_events.py:BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "session_id",
    ),
    "distributed/kv_events.py:BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "v1/attention/backend.py:AttentionBackend": (
        "supported_dtypes", "supported_kv_cache_dtypes", "forward_includes_kv_cache_update",
    ),
    "v1/attention/backend.py:AttentionMetadataBuilder": ("layer_names", "vllm_config", "reorder_batch_threshold"),
    "v1/attention/backend.py:AttentionImpl": ("kv_cache_dtype",),
    "v1/attention/backend.py:CommonAttentionMetadata": (
        "query_start_loc_cpu", "seq_lens", "num_reqs", "block_table_tensor", "causal",
    ),
    "v1/attention/backends/registry.py:AttentionBackendEnum": ("CUSTOM", "CPU_ATTN"),
    "v1/kv_cache_layout.py:KVCacheLayout": ("LBHNC",),
    "model_executor/layers/attention/attention.py:Attention": ("impl", "kv_cache", "layer_name"),
}  # fmt: skip
"""Classes, and the fields of theirs that we read, write or fill in; members, of an enum."""

ABSTRACT = tuple(
    f"v1/attention/backend.py:{name}" for name in ("AttentionBackend", "AttentionMetadataBuilder", "AttentionImpl")
)
"""Classes that ours are made from. What they leave to ours is recorded."""

ASKERS = ("v1/core/sched/scheduler.py", "v1/core/sched/async_scheduler.py", "v1/engine/core.py")
"""Who asks things of a KV-cache manager. What they ask is recorded too."""

UNREACHED = {
    "coordinator.get_num_blocks_to_allocate": "KV connectors",
    "evict_blocks": "KV connectors",
    "finalize_partial_tail_offloads": "KV connectors",
    "get_block_ids_for_computed_tokens": "KV connectors",
    "get_computed_blocks_for_connector": "KV connectors",
    "get_zeroing_block_ids_in_range": "KV connectors",
    "record_blocks_for_zeroing": "KV connectors",
    "remove_skipped_blocks": "KV connectors",
    "truncate_computed_blocks": "KV connectors",
    "empty_kv_cache_blocks.blocks": "KV connectors",
}
"""What is asked only on behalf of a feature that ours refuses at start, and does not answer."""
