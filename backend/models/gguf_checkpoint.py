"""A checkpoint in one GGUF file, quantised or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
from torch import Tensor

from kvproof.backend.errors import UnsupportedModel
from kvproof.backend.models.config import Metadata, ModelConfig
from kvproof.backend.models.gguf_file import GGUFFile
from kvproof.backend.models.tokenizer import Tokenizer

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: Llama 3's frequency scaling, written out."""


class GGUFCheckpoint:
    """The model in the GGUF file `path`. Tensors come out in float32, dequantised, in Hugging Face's layout.

    Raises `CheckpointError` if the file is damaged, isn't a supported architecture or doesn't hold exactly the tensors
    of its config.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self._metadata = Metadata(path, self._file.metadata)
        self.config = _config(self._metadata, self._file)
        self.architecture = self.config.architecture
        names = gguf.get_tensor_name_map(ARCHITECTURES[self.config.architecture], self.config.num_layers)
        canonical = {names.get_name(name, (".weight", ".bias")): name for name in self.config.tensor_shapes()}
        self._canonical = {name: canonical.get(name, name) for name in self._file.tensors if name != ROPE_FACTORS}
        shapes = {name: self._file.tensors[stored].shape for stored, name in self._canonical.items()}
        self.config.check_tensors(path, shapes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its Hugging Face name, float32. Raises `CheckpointError` for an unsupported block format."""
        for stored, name in self._canonical.items():
            tensor = self._file.tensor(stored)
            if self.config.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                tensor = _unpermuted(tensor, self.config.head_size)
            yield name, tensor

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file. Raises `CheckpointError` if it is of an unsupported kind."""
        return Tokenizer.from_gguf(self._metadata, self.config)


def _config(metadata: Metadata, file: GGUFFile) -> ModelConfig:
    architecture = metadata.require("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: architecture {architecture!r} is not supported, only {', '.join(ARCHITECTURES)}"
        )
    key = f"{architecture}.{{}}".format
    hidden, heads = metadata.dimension(key("embedding_length")), metadata.dimension(key("attention.head_count"))
    head_size = metadata.dimension(key("attention.key_length"), hidden // heads)
    metadata.refuse(key("attention.value_length"), unless=head_size)
    metadata.refuse(key("rope.dimension_count"), unless=head_size)
    metadata.refuse(key("attention.sliding_window"), unless=0)
    metadata.refuse(key("rope.scale_linear"), unless=1.0)
    eos = metadata.get("tokenizer.ggml.eos_token_id", int, -1)
    return ModelConfig.checked(
        file.path,
        architecture=architecture,
        num_layers=metadata.dimension(key("block_count")),
        hidden_size=hidden,
        intermediate_size=metadata.dimension(key("feed_forward_length")),
        num_heads=heads,
        num_kv_heads=metadata.dimension(key("attention.head_count_kv"), heads),
        head_size=head_size,
        vocab_size=metadata.dimension(key("vocab_size"), len(metadata.get("tokenizer.ggml.tokens", list, []))),
        max_length=metadata.require(key("context_length"), int),
        rope_theta=metadata.number(key("rope.freq_base"), 10000.0),
        rope_factors=_rope_factors(metadata, key("rope.scaling."), file, head_size),
        rms_norm_eps=metadata.number(key("attention.layer_norm_rms_epsilon")),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        bos_token_id=metadata.values.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=() if eos < 0 else (eos,),
    )


def _rope_factors(metadata: Metadata, prefix: str, file: GGUFFile, head_size: int) -> tuple[float, ...]:
    written_out = ROPE_FACTORS in file.tensors
    if metadata.get(f"{prefix}type", str, "none") == "linear" and not written_out:
        return (metadata.number(f"{prefix}factor"),) * (head_size // 2)
    metadata.refuse(f"{prefix}type", unless="none")
    return tuple(file.tensor(ROPE_FACTORS).flatten().tolist()) if written_out else ()


def _unpermuted(weight: Tensor, head_size: int) -> Tensor:
    """Rows back from the order in which llama.cpp rotates neighbours to that in which halves are rotated.

    Inverse of `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    rows, columns = weight.shape
    pairs = weight.view(rows // head_size, head_size // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
