"""A decoder's hyperparameters, and the tensors that they say its checkpoint must hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvproof.backend.errors import CheckpointError, UnsupportedModel

T = TypeVar("T")
D = TypeVar("D")

Shape = tuple[int, ...]

MAX_DIMENSION = 2**24
"""Above any vocabulary or width; damaged files say more, and would have us build lists of it."""


class ModelConfig(BaseModel):
    """A decoder of the Llama family.

    `rope_factors`, one per pair of dimensions, divide the rotary frequencies; empty means unscaled. Every kind of
    frequency scaling comes down to them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    architecture: str = Field(min_length=1)
    num_layers: int = Field(ge=1, le=1024)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_heads: int = Field(ge=1, description="query heads")
    num_kv_heads: int = Field(ge=1)
    head_size: int = Field(ge=2, multiple_of=2)
    vocab_size: int = Field(ge=1)
    max_length: int = Field(ge=1, description="longest sequence in tokens")
    rope_theta: float = Field(gt=0, allow_inf_nan=False)
    rope_factors: tuple[float, ...] = ()
    rms_norm_eps: float = Field(ge=0, allow_inf_nan=False)
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = Field(default=False, description="bias on the attention's output projection")
    qk_norm: bool = Field(default=False, description="RMS norm of every query and key head before the rotation")
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if len(self.rope_factors) not in (0, self.head_size // 2):
            raise ValueError(f"{len(self.rope_factors)} rope_factors for head_size={self.head_size}")
        if not all(factor > 0 for factor in self.rope_factors):
            raise ValueError("rope_factors must be positive")
        return self

    @classmethod
    def checked(cls, source: Path, **fields: Any) -> Self:
        """The config of the checkpoint `source`. Raises `CheckpointError` where a value is out of bounds."""
        try:
            return cls(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            field = "".join(f"{name}={first['input']!r:.60}: " for name in first["loc"][:1])
            raise CheckpointError(f"{source}: {field}{first['msg'].removeprefix('Value error, ')}") from None

    def tensor_shapes(self) -> dict[str, Shape]:
        """The shape of every weight by its Hugging Face name; a projection is [out, in]."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        layer: dict[str, Shape] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if self.qkv_bias:
            layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
        if self.output_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if self.qk_norm:
            layer |= {f"self_attn.{name}_norm.weight": (self.head_size,) for name in "qk"}
        shapes: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def check_tensors(self, source: Path, found: Mapping[str, Shape]) -> None:
        """Raises `CheckpointError` unless `found` are exactly the tensors of this config."""
        wanted = self.tensor_shapes()
        for problem, names in (("lacks", wanted.keys() - found.keys()), ("has unknown", found.keys() - wanted.keys())):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise CheckpointError(f"{source}: {problem} tensor {min(names)!r}{more}")
        for name, shape in wanted.items():
            if found[name] != shape:
                raise CheckpointError(f"{source}: tensor {name!r} has shape {found[name]}, the config says {shape}")


class Metadata:
    """Typed look-up in what a checkpoint says of itself. `None` counts as absent; `source` is named in errors."""

    def __init__(self, source: Path, values: Mapping[str, object]) -> None:
        self.source = source
        self.values = values

    @classmethod
    def from_json(cls, file: Path) -> Self:
        """The object in a JSON file. Raises `CheckpointError` if there is none."""
        try:
            values = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{file.parent}: has no {file.name}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: not readable as JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{file}: not a JSON object")
        return cls(file, values)

    def get(self, key: str, kind: type[T], default: D) -> T | D:
        """The value of `key`, `default` where absent. Raises `CheckpointError` where it isn't a `kind`."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.source}: {key} is {value!r:.60}, not of type {kind.__name__}")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key`. Raises `CheckpointError` where it is absent or isn't a `kind`."""
        value = self.get(key, kind, None)
        if value is None:
            raise CheckpointError(f"{self.source}: lacks {key}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The number `key`, required if it has no default. Raises `CheckpointError` where it isn't one."""
        value = self.values.get(key)
        if type(value) is int and abs(value) < 2**63:  # as JSON may write a whole one
            return float(value)
        return self.require(key, float) if default is None else self.get(key, float, default)

    def dimension(self, key: str, default: int | None = None) -> int:
        """The size `key`, required if it has no default. Raises `CheckpointError` where no model could have it."""
        size = self.require(key, int) if default is None else self.get(key, int, default)
        if not 1 <= size <= MAX_DIMENSION:
            raise CheckpointError(f"{self.source}: {key}={size} is not between 1 and {MAX_DIMENSION}")
        return size

    def refuse(self, key: str, unless: Any) -> None:
        """Raises `UnsupportedModel` if `key` has a value other than `unless`: the model would be computed wrongly."""
        value = self.values.get(key)
        if value is not None and value != unless:
            raise UnsupportedModel(f"{self.source}: {key}={value!r:.60} is not supported")
