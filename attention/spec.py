"""The shape of a paged KV cache: the one description that allocator, backend and model agree on."""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from pydantic import Field, field_validator, model_validator

from kvproof.attention.errors import InvalidSpec
from kvproof.attention.validated import Validated

DType = Literal["float32", "bfloat16", "float16", "float64"]
CacheDType = Literal["float8_e4m3fn"]
Layout = Literal["NHD", "HND"]

MAX_HEAD_SIZE = 512
"""The widest head any kernel we drive takes (FlashInfer's FA2)."""

INT32_LIMIT = 2**31
"""Batch metadata and the kernels' strides are 32-bit: slot numbers and a block's elements stay below this."""


class CacheSpec(Validated):
    """A paged KV cache of `num_blocks` blocks of `block_size` token slots in each of `num_layers` layers.

    Immutable. A value out of bounds raises `InvalidSpec`.
    """

    error = InvalidSpec

    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1, description="query heads")
    num_kv_heads: int = Field(ge=1, description="key and value heads; each serves `group_size` query heads")
    head_size: int = Field(ge=1, le=MAX_HEAD_SIZE)
    dtype: DType = Field(description="of queries, keys, values and outputs; and of the cache, unless it says otherwise")
    cache_dtype: CacheDType | None = Field(default=None, description="of the stored keys and values; None is dtype")
    k_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="stored keys times this are the keys")
    v_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="and the same of the values")
    device: str = "cpu"
    num_blocks: int = Field(ge=1)
    block_size: int = Field(ge=1, description="token slots of one block")
    layout: Layout = "NHD"
    scale: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="factor of the scores; None is 1/sqrt(head_size)"
    )
    window: int | None = Field(
        default=None, ge=1, lt=INT32_LIMIT, description="latest tokens that a token sees, itself included; None is all"
    )
    soft_cap: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="scaled scores s become soft_cap * tanh(s / soft_cap)"
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        try:
            torch.device(device)
        except RuntimeError:
            raise ValueError("is not a torch device such as 'cpu' or 'cuda:0'") from None
        return device

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.cache_dtype is None and (scales := (self.k_scale, self.v_scale)) != (1.0, 1.0):
            raise ValueError(
                f"k_scale, v_scale={scales} need a cache_dtype; a cache of dtype={self.dtype} is not scaled"
            )
        if (slots := self.num_blocks * self.block_size) >= INT32_LIMIT:
            raise ValueError(
                f"num_blocks={self.num_blocks} of block_size={self.block_size} make {slots} token slots; "
                f"32-bit metadata numbers fewer than {INT32_LIMIT}"
            )
        if (stride := 2 * self.block_size * self.num_kv_heads * self.head_size) >= INT32_LIMIT:
            raise ValueError(
                f"block_size={self.block_size} makes a block of {stride} elements per layer; "
                f"32-bit strides need fewer than {INT32_LIMIT}"
            )
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def torch_cache_dtype(self) -> torch.dtype:
        """What the cache is stored in."""
        dtype: torch.dtype = getattr(torch, self.cache_dtype or self.dtype)
        return dtype

    @property
    def group_size(self) -> int:
        """Query heads per key and value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        return self.scale if self.scale is not None else 1 / math.sqrt(self.head_size)

    @property
    def cache_shape(self) -> tuple[int, int, int, int, int, int]:
        """[num_layers, num_blocks, 2, block_size, num_kv_heads, head_size], keys before values.

        HND swaps block_size and num_kv_heads. One layer of it is what FlashInfer takes as a paged KV cache.
        """
        slots, heads = self.block_size, self.num_kv_heads
        inner = (slots, heads) if self.layout == "NHD" else (heads, slots)
        return (self.num_layers, self.num_blocks, 2, *inner, self.head_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of all layers."""
        elements = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_size
        return elements * self.torch_cache_dtype.itemsize
