"""What a model runner is: the interface between a model's arithmetic and the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol, Self, runtime_checkable

from pydantic import Field, model_validator
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
    layer_windows: tuple[Annotated[int, Field(ge=1)] | None, ...] = Field(
        default=(), description="the same of each layer, where layers differ"
    )
    scale: float | None = Field(default=None, description="factor of the scores in every layer, as in `CacheSpec`")
    soft_cap: float | None = Field(default=None, description="cap of the scores in every layer, as in `CacheSpec`")

    @model_validator(mode="after")
    def _one_window_a_layer(self) -> Self:
        if self.layer_windows and (self.window is not None or len(self.layer_windows) != self.num_layers):
            raise ValueError(
                f"{len(self.layer_windows)} layer_windows of {self.num_layers} layers, window {self.window}"
            )
        return self

    def cache_spec(self, *, num_blocks: int, block_size: int) -> CacheSpec:
        """The KV cache of `num_blocks` blocks of `block_size` token slots that this model runs on.

        Its window is what the layer that sees most sees: what it has left, no layer needs.
        """
        widest = self.window
        if self.layer_windows and None not in self.layer_windows:
            widest = max(window for window in self.layer_windows if window is not None)
        return CacheSpec(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            device=self.device,
            num_blocks=num_blocks,
            block_size=block_size,
            window=widest,
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
                It writes k and v into the paged cache, then attends causally to each sequence's own tokens. They are
                valid during the call: the next layer's may lie in the same memory. A `CompiledAttention` can be called
                from C as well.
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
