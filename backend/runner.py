"""What a model runner is: the interface between a model's arithmetic and the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pydantic import Field
from torch import Tensor

from kvproof.attention import CacheSpec, DType, Validated

AttentionCall = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class ModelSpec(Validated):
    """What the engine must know of a model to give it a KV cache and to end its sequences."""

    architecture: str = Field(min_length=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1, description="query heads")
    num_kv_heads: int = Field(ge=1)
    head_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    max_length: int = Field(ge=1, description="longest sequence the model takes, prompt and output, in tokens")
    dtype: DType
    device: str = "cpu"
    eos_token_ids: tuple[int, ...] = ()
    window: int | None = Field(default=None, ge=1, description="latest tokens that a token sees in every layer, or all")
    scale: float | None = Field(default=None, description="factor of the scores in every layer, as in `CacheSpec`")
    soft_cap: float | None = Field(default=None, description="cap of the scores in every layer, as in `CacheSpec`")

    def cache_spec(self, *, num_blocks: int, block_size: int) -> CacheSpec:
        """The KV cache of `num_blocks` blocks of `block_size` token slots that this model runs on."""
        return CacheSpec(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            device=self.device,
            num_blocks=num_blocks,
            block_size=block_size,
            window=self.window,
            scale=self.scale,
            soft_cap=self.soft_cap,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over a batch of sequences, flattened token by token.

    token_ids   int64 [T]
    positions   int64 [T], each token's index in its own sequence
    logits_rows int64 [R], the rows of T whose logits are wanted (the last token of each sequence that samples)
    attention   called once per layer as attention(layer, q, k, v) with q [T, num_heads, head_size] and
                k, v [T, num_kv_heads, head_size], rotary embedding applied; returns [T, num_heads, head_size].
                It writes k and v into the paged cache, then attends causally to each sequence's own tokens.
    """

    token_ids: Tensor
    positions: Tensor
    logits_rows: Tensor
    attention: AttentionCall


@runtime_checkable
class ModelRunner(Protocol):
    """A model that runs on kvproof's cache. `kvproof.backend.models.llama` is a complete example."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, step: Step) -> Tensor:
        """Logits [R, vocab_size] of `step.logits_rows`, in any floating dtype. Reads no state but the weights."""
        ...
