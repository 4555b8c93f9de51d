"""A checkpoint in a Hugging Face folder: config.json, safetensors files and tokenizer.json."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvproof.backend.errors import CheckpointError, UnsupportedModel
from kvproof.backend.models.config import Metadata, ModelConfig, Shape
from kvproof.backend.models.tokenizer import Tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")
DTYPES = ("BF16", "F16", "F32", "F64")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class FolderCheckpoint:
    """The model in the folder `path`, as `save_pretrained` writes it, sharded or not.

    Raises `CheckpointError` if there is no config.json that names an architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata = Metadata.from_json(path / "config.json")
        self.architecture = self._metadata.require("model_type", str)
        self._config: ModelConfig | None = None

    @property
    def config(self) -> ModelConfig:
        """Raises `UnsupportedModel` if the architecture or one of its options isn't of the Llama family, and
        `CheckpointError` if a file is missing or damaged, or the folder doesn't hold exactly the tensors of its config.
        """
        if self._config is None:
            self._config = self._checked_config()
        return self._config

    def _checked_config(self) -> ModelConfig:
        config = _config(self._metadata, self.path)
        found: dict[str, Shape] = {}
        for file in _weight_files(self.path):
            shapes = _tensor_shapes(file)
            if twice := found.keys() & shapes.keys():
                raise CheckpointError(f"{file}: tensor {min(twice)!r} is in another shard too")
            found |= shapes
        config.check_tensors(self.path, found)
        return config

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its Hugging Face name, in the dtype that it is stored in."""
        for file in _weight_files(self.path):
            with _opened(file) as weights:
                for name in weights.keys():  # noqa: SIM118 - not a mapping
                    yield name, weights.get_tensor(name)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of tokenizer.json. Raises `CheckpointError` if that is missing or damaged."""
        return Tokenizer.from_folder(self.path)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: missing, damaged or truncated: {error}") from error


def _tensor_shapes(file: Path) -> dict[str, Shape]:
    shapes = {}
    with _opened(file) as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            stored = weights.get_slice(name)
            if stored.get_dtype() not in DTYPES:
                raise CheckpointError(f"{file}: tensor {name!r} is {stored.get_dtype()}, which isn't supported")
            shapes[name] = tuple(stored.get_shape())
    return shapes


def _weight_files(path: Path) -> list[Path]:
    if not (path / INDEX).is_file():
        return [path / WEIGHTS]
    files = Metadata.from_json(path / INDEX).require("weight_map", dict).values()
    return [path / str(name) for name in dict.fromkeys(files)]


def _config(config: Metadata, path: Path) -> ModelConfig:
    architecture = config.require("model_type", str)
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{config.source}: architecture {architecture!r} is not supported, only {', '.join(ARCHITECTURES)}"
        )
    config.refuse("hidden_act", unless="silu")
    config.refuse("mlp_bias", unless=False)
    config.refuse("partial_rotary_factor", unless=1.0)
    config.refuse("quantization_config", unless={})
    config.refuse("use_sliding_window", unless=False)
    if other := [kind for kind in config.get("layer_types", list, []) if kind != "full_attention"]:
        raise UnsupportedModel(f"{config.source}: layers of type {other[0]!r:.60} are not supported")

    hidden, heads = config.dimension("hidden_size"), config.dimension("num_attention_heads")
    head_size = config.dimension("head_dim", hidden // heads)
    theta, factors = _rope(config, head_size)
    bias = config.get("attention_bias", bool, default=False)
    generation = config
    if (path / "generation_config.json").is_file():
        generation = Metadata.from_json(path / "generation_config.json")
    eos = next((m.values["eos_token_id"] for m in (generation, config) if m.values.get("eos_token_id") is not None), ())
    return ModelConfig.checked(
        config.source,
        architecture=architecture,
        num_layers=config.dimension("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=config.dimension("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.dimension("num_key_value_heads", heads),
        head_size=head_size,
        vocab_size=config.dimension("vocab_size"),
        max_length=config.require("max_position_embeddings", int),
        rope_theta=theta,
        rope_factors=factors,
        rms_norm_eps=config.number("rms_norm_eps"),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, default=False),
        qkv_bias=bias or architecture == "qwen2",
        output_bias=bias and architecture != "qwen2",
        qk_norm=architecture == "qwen3",
        bos_token_id=config.values.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
    )


def _rope(config: Metadata, head_size: int) -> tuple[float, tuple[float, ...]]:
    """theta and rope_factors, from `rope_parameters` or from `rope_theta` and `rope_scaling`, as older folders have."""
    scaling = config.get("rope_parameters", dict, config.get("rope_scaling", dict, {}))
    rope = Metadata(config.source, {"rope_theta": config.values.get("rope_theta"), **scaling})
    rope.refuse("partial_rotary_factor", unless=1.0)
    theta = rope.number("rope_theta", 10000.0)
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind == "default":
        return theta, ()
    if kind == "linear":
        return theta, (rope.number("factor"),) * (head_size // 2)
    if kind == "llama3":
        return theta, _llama3_factors(rope, theta, head_size)
    raise UnsupportedModel(f"{config.source}: rope scaling {kind!r} is not supported, only linear and llama3")


def _llama3_factors(rope: Metadata, theta: float, head_size: int) -> tuple[float, ...]:
    """Llama 3.1's scaling: `factor` for long wavelengths, none for short ones, and a ramp between the two."""
    factor, context = rope.number("factor"), rope.dimension("original_max_position_embeddings")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not (theta > 0 and factor > 0 and low < high):
        raise CheckpointError(f"{rope.source}: rope scaling llama3 can't have {theta=}, {factor=}, {low=}, {high=}")
    factors = []
    for i in range(0, head_size, 2):
        wavelength = 2 * math.pi * theta ** (i / head_size)
        unscaled = min(max((context / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / (unscaled + (1 - unscaled) / factor))
    return tuple(factors)
