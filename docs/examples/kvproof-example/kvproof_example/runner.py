"""A model runner: GPT-2, from a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvproof.attention import DType
from kvproof.backend import ModelSpec, Step
from kvproof.backend.models.checkpoint import Checkpoint, CheckpointError, UnsupportedModel

COMPUTED = {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
"""Options of the config that change the arithmetic, and the values that are computed here."""


class GPT2Runner:
    architectures = frozenset({"gpt2"})  # `model_type` in config.json; None would be "ask `load`"

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: DType = "float32",
        device: str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Raises `UnsupportedModel`, and other runners are asked, or `CheckpointError`, and none is."""
        config = json.loads((checkpoint.path / "config.json").read_bytes())
        for option, value in COMPUTED.items():
            if config.get(option, value) != value:
                raise UnsupportedModel(f"{checkpoint.path}: GPT-2 with {option}={config[option]!r} is not supported")
        weights = {}
        for name, tensor in checkpoint.tensors():
            weights[name.removeprefix("transformer.")] = tensor.to(device, getattr(torch, dtype))
            if progress is not None:
                progress(len(weights), 12 * config["n_layer"] + 4)
        try:
            return cls(config, weights, dtype, device)
        except KeyError as error:
            raise CheckpointError(f"{checkpoint.path}: lacks {error}") from None

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], dtype: DType, device: str) -> None:
        heads = config["n_head"]
        self.spec = ModelSpec(
            architecture="gpt2",
            num_layers=config["n_layer"],
            num_heads=heads,
            num_kv_heads=heads,
            head_size=config["n_embd"] // heads,
            vocab_size=config["vocab_size"],
            max_length=config["n_positions"],
            dtype=dtype,
            device=device,
            eos_token_ids=() if config.get("eos_token_id") is None else (config["eos_token_id"],),
        )
        self._eps = config.get("layer_norm_epsilon", 1e-5)
        self._embedding, self._positions = weights["wte.weight"], weights["wpe.weight"]
        # Looked up here, so that a missing one is noticed now. A projection's weight is [in, out].
        self._layers = [
            {
                part: (weights[f"h.{layer}.{part}.weight"], weights[f"h.{layer}.{part}.bias"])
                for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
            }
            for layer in range(self.spec.num_layers)
        ]
        self._last_norm = weights["ln_f.weight"], weights["ln_f.bias"]

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Logits [R, vocab_size] of `step.logits_rows`. The step's tokens are those of many sequences, end to end."""
        x = F.embedding(step.token_ids, self._embedding) + F.embedding(step.positions, self._positions)
        for index, layer in enumerate(self._layers):
            qkv = _project(self._norm(x, layer["ln_1"]), layer["attn.c_attn"])
            q, k, v = qkv.view(len(x), 3, self.spec.num_heads, self.spec.head_size).unbind(1)
            x = x + _project(step.attention(index, q, k, v).flatten(1), layer["attn.c_proj"])
            hidden = F.gelu(_project(self._norm(x, layer["ln_2"]), layer["mlp.c_fc"]), approximate="tanh")
            x = x + _project(hidden, layer["mlp.c_proj"])
        return self._norm(x[step.logits_rows], self._last_norm) @ self._embedding.T

    def _norm(self, x: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *weights, eps=self._eps)


def _project(x: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    weight, bias = weights
    return torch.addmm(bias, x, weight)
