"""Our attention backends as an attention backend of vLLM's, on vLLM's own KV cache; docs/vllm-attention.md tells how.

A step's metadata is turned into a `BatchPlan` and planned once for all layers of a KV-cache group.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from kvproof.attention import AttentionBackend as PagedAttention
from kvproof.attention import CacheSpec, DType
from kvproof.backend.integrations.vllm import seam
from kvproof.backend.integrations.vllm.attention_batch import Batch, UnsupportedAttention, paged_cache
from kvproof.backend.integrations.vllm.attention_plugin import CHOICE
from kvproof.backend.integrations.vllm.seam import CommonAttentionMetadata, KVCacheLayout
from kvproof.backend.selection import AUTO, over_cache, select

log = logging.getLogger("vllm.plugins.kvproof")


@dataclass(frozen=True, slots=True)
class Metadata:
    """A planned step: the backend of each layer by the layer's name, and its number there."""

    layers: dict[str, tuple[PagedAttention, int]]
    num_tokens: int
    order: Tensor | None


class Backend(seam.AttentionBackend):  # type: ignore[misc]  # vLLM has no types here
    """Selected with `attention_config={"backend": "CUSTOM"}`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


class CPUBackend(Backend):
    """The same, where vLLM's CPU platform insists on its own."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


class Builder(seam.AttentionMetadataBuilder[Metadata]):  # type: ignore[misc]
    """Plans a step of one KV-cache group."""

    reorder_batch_threshold = 1  # so that rows of one token mostly come first already

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._caches: list[Tensor] = []
        self._layers: dict[str, tuple[PagedAttention, int]] = {}

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        """Raises `UnsupportedAttention`, and `InvalidBatch` for metadata that breaks a rule of `BatchPlan`."""
        step = common_attn_metadata
        if step.causal is not True:
            raise UnsupportedAttention("attention that is not causal")
        self._find_caches()
        for backend in {backend for backend, _ in self._layers.values()}:
            batch = Batch.build(
                step.query_start_loc_cpu[: step.num_reqs + 1],
                step.seq_lens[: step.num_reqs],
                step.block_table_tensor[: step.num_reqs],
                backend.spec.block_size,
                backend.spec.window,
            )
            backend.plan(batch.plan)
        return Metadata(self._layers, batch.plan.num_tokens, batch.order)

    def _find_caches(self) -> None:
        """vLLM binds a layer's cache after it has made the builder, and profiles with another one before."""
        found = seam.get_layers_from_vllm_config(self.vllm_config, seam.Attention, self.layer_names)
        layers = [found[name] for name in self.layer_names]
        caches = [layer.kv_cache for layer in layers]
        if [id(cache) for cache in caches] != [id(cache) for cache in self._caches]:
            self._layers = backends([layer.impl for layer in layers], self.layer_names, caches)
            self._caches = caches


class Impl(seam.AttentionImpl[Metadata]):  # type: ignore[misc]
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        """Raises `UnsupportedAttention`."""
        unsupported = {
            "ALiBi (alibi_slopes)": alibi_slopes is not None,
            f"{attn_type} attention": attn_type != "decoder",
            f"a KV cache of type {kv_cache_dtype}": kv_cache_dtype not in Backend.supported_kv_cache_dtypes,
            "layers that share a KV cache (kv_sharing_target_layer_name)": kv_sharing_target_layer_name is not None,
        } | {name: value is not None for name, value in others.items()}
        for feature, asked in unsupported.items():
            if asked:
                raise UnsupportedAttention(feature)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap or None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query and output [T, num_heads, head_size], key and value [T, num_kv_heads, head_size], T padded."""
        if attn_metadata is None:  # vLLM measures memory
            return output
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedAttention("quantised outputs")
        backend, number = attn_metadata.layers[layer.layer_name]
        tokens = attn_metadata.order if attn_metadata.order is not None else slice(attn_metadata.num_tokens)
        output[tokens] = backend.run(number, query[tokens], key[tokens], value[tokens])
        return output


def backends(
    impls: Sequence[Impl], names: Sequence[str], caches: Sequence[Tensor]
) -> dict[str, tuple[PagedAttention, int]]:
    """A backend and a layer number for each layer of a KV-cache group.

    Layers that differ in window, cap or scale have backends of their own, all of them over the whole group's cache.
    """
    cache = paged_cache(caches)
    made: dict[CacheSpec, PagedAttention] = {}
    layers = {}
    for number, (name, impl) in enumerate(zip(names, impls, strict=True)):
        spec = _cache_spec(impl, cache)
        if spec not in made:
            made[spec] = over_cache(select(os.environ.get(CHOICE) or AUTO, spec), spec, cache)
        layers[name] = made[spec], number
    for backend in made.values():
        count = sum(mine is backend for mine, _ in layers.values())
        log.info("kvproof's %s backend attends in %d layers: %s", backend.name, count, backend.spec)
    return layers


def _cache_spec(impl: Impl, cache: Tensor) -> CacheSpec:
    num_layers, num_blocks, _, block_size, num_kv_heads, head_size = cache.shape
    return CacheSpec(
        num_layers=num_layers,
        num_heads=impl.num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=cast(DType, str(cache.dtype).removeprefix("torch.")),
        device=str(cache.device),
        num_blocks=num_blocks,
        block_size=block_size,
        scale=None if math.isclose(impl.scale, head_size**-0.5, rel_tol=1e-6) else impl.scale,
        window=impl.sliding_window,
        soft_cap=impl.logits_soft_cap,
    )
