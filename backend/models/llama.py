"""The Llama family on kvproof's cache: Llama, Qwen2 (biases on q, k and v) and Qwen3 (norms on q and k).

The formulas, and where they round, are those of transformers' `LlamaForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kvproof.attention import DType
from kvproof.attention.large_pages import LargePages
from kvproof.backend.models.checkpoint import Checkpoint
from kvproof.backend.models.config import ModelConfig
from kvproof.backend.models.decoder import CompiledDecoder, Decoder, Layer, Shape
from kvproof.backend.models.layers import add_rms_norm
from kvproof.backend.models.linear import gated_linear, linear
from kvproof.backend.runner import ModelSpec, Step


class LlamaRunner:
    """A decoder of the Llama family. Attention and its cache come with the step; this is everything else."""

    architectures = frozenset({"llama", "qwen2", "qwen3"})

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: DType = "float32",
        device: str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """The checkpoint's weights as `dtype` on `device`. `progress` is told the tensors read and their number.

        Raises `CheckpointError` if a tensor can't be read.
        """
        total = len(checkpoint.config.tensor_shapes())
        weights = {}
        for name, tensor in checkpoint.tensors():
            weights[name] = tensor.to(device, getattr(torch, dtype))
            if progress is not None:
                progress(len(weights), total)
        return cls(checkpoint.config, weights)

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        """`weights` are those of `config.tensor_shapes()`, all of one dtype on one device; they are taken out of the
        dict as they are fused, so that a large model isn't held twice."""
        embedding = weights.pop("model.embed_tokens.weight")
        self.spec = ModelSpec(
            architecture=config.architecture,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            vocab_size=config.vocab_size,
            max_length=config.max_length,
            dtype=cast(DType, str(embedding.dtype).removeprefix("torch.")),
            device=str(embedding.device),
            eos_token_ids=config.eos_token_ids,
        )
        self._eps = config.rms_norm_eps
        self._embedding = embedding
        self._frequencies = _rotary_frequencies(config).to(embedding.device)
        memory = LargePages()
        layers = [_layer(config, index, weights, memory) for index in range(config.num_layers)]
        shape = Shape(config.num_heads, config.num_kv_heads, config.head_size, config.rms_norm_eps)
        self._decoder = (CompiledDecoder if CompiledDecoder.can_run(layers, shape) else Decoder)(layers, shape)
        self._norm = weights.pop("model.norm.weight")
        head = embedding if config.tie_word_embeddings else weights.pop("lm_head.weight")
        self._head = linear(head, None, memory)

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Logits [R, vocab_size] of `step.logits_rows`, in the model's dtype."""
        cos, sin = self._rotation(step.positions)
        x = F.embedding(step.token_ids, self._embedding)
        delta = self._decoder(x, cos, sin, step.attention)
        rows = step.logits_rows
        return self._head(add_rms_norm(x[rows], None if delta is None else delta[rows], self._norm, self._eps))

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Factors [T, head_size] of a head and of the head with its halves swapped. The second is negative where it
        multiplies a second half."""
        angles = positions[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        dtype = self._embedding.dtype
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def _rotary_frequencies(config: ModelConfig) -> Tensor:
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies / torch.tensor(config.rope_factors) if config.rope_factors else frequencies


def _layer(config: ModelConfig, index: int, weights: dict[str, Tensor], memory: LargePages) -> Layer:
    def take(*names: str, kind: str = "weight") -> Tensor:
        parts = [weights.pop(f"model.layers.{index}.{name}.{kind}") for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output, down = "self_attn.o_proj", "mlp.down_proj"
    qk_norm = None
    if config.qk_norm:
        q_norm, k_norm = take("self_attn.q_norm"), take("self_attn.k_norm")
        qk_norm = torch.stack([q_norm] * config.num_heads + [k_norm] * config.num_kv_heads)
    return Layer(
        attention_norm=take("input_layernorm"),
        qkv=linear(take(*qkv), take(*qkv, kind="bias") if config.qkv_bias else None, memory),
        qk_norm=qk_norm,
        output=linear(take(output), take(output, kind="bias") if config.output_bias else None, memory),
        mlp_norm=take("post_attention_layernorm"),
        gate_up=gated_linear(take("mlp.gate_proj"), take("mlp.up_proj"), memory),
        down=linear(take(down), None, memory),
    )
