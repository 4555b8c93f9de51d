"""The smallest model that notices everything: a two-layer transformer with random weights.

Every logit depends on every earlier token and its position, and all of that through the KV cache, so one wrong slot
anywhere changes what is generated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvproof.attention import DType
from kvproof.backend.runner import ModelSpec, Step


class ToyRunner:
    """Implements `ModelRunner`. The same `seed` gives the same model."""

    def __init__(
        self,
        *,
        vocab_size: int = 13,
        max_length: int = 64,
        eos_token_ids: tuple[int, ...] = (),
        dtype: DType = "float32",
        seed: int = 0,
    ) -> None:
        self.spec = ModelSpec(
            architecture="toy",
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_size=8,
            vocab_size=vocab_size,
            max_length=max_length,
            dtype=dtype,
            eos_token_ids=eos_token_ids,
        )
        generator = torch.Generator().manual_seed(seed)
        hidden = self.spec.num_heads * self.spec.head_size

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))

        self._tokens, self._positions = weight(vocab_size, hidden), weight(max_length, hidden)
        kv = self.spec.num_kv_heads * self.spec.head_size
        self._layers = [(weight(hidden, hidden + 2 * kv), weight(hidden, hidden)) for _ in range(self.spec.num_layers)]
        self._sizes = [hidden, kv, kv]

    def forward(self, step: Step) -> Tensor:
        x = self._tokens[step.token_ids] + self._positions[step.positions]
        for layer, (qkv, out) in enumerate(self._layers):
            x = torch.nn.functional.layer_norm(x, x.shape[-1:])
            parts = torch.split(x @ qkv, self._sizes, dim=-1)
            q, k, v = (part.reshape(len(x), -1, self.spec.head_size) for part in parts)
            x = x + step.attention(layer, q, k, v).flatten(-2) @ out
        return torch.nn.functional.layer_norm(x[step.logits_rows], x.shape[-1:]) @ self._tokens.T
