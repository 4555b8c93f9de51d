"""What a Hugging Face model asks of attention, found out by running it on two tokens instead of reading its config.

Configs name one thing in many ways. What reaches the attention interface is the thing itself: tensors, a scale, a cap,
and a mask, which transformers makes from a function of positions that can be looked at anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from kvproof.backend.errors import UnsupportedModel
from kvproof.backend.integrations.transformers_interface import PROBE, Mask, attending

HARMLESS = frozenset(
    {
        "dropout",
        "is_causal",  # the mask says so
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "sliding_window",  # the mask has it
        "use_cache",
    }
)
"""Options of the attention interface that change nothing in a causal step without a cache of Hugging Face's."""

NAMES = {"s_aux": "attention sinks", "indices": "sparse attention", "position_bias": "a position bias"}
"""What some of the others are for."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer asks for, as `CacheSpec` has it."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float | None
    soft_cap: float | None
    window: int | None


def ask(model: PreTrainedModel, max_length: int) -> list[LayerAttention]:
    """What each layer asks for that attends, in order. Leaves the model unable to run on anything but `PROBE`.

    `max_length` is how far masks are looked at. Raises `UnsupportedModel` with what is asked for that we lack.
    """
    layers: dict[int, LayerAttention] = {}

    def attend(module: Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
        layer: Any = module.layer_idx
        if layer in layers:
            raise UnsupportedModel("layers that attend more than once")
        _refuse_options(mask, options)
        if v.shape != k.shape:
            raise UnsupportedModel(f"keys of size {k.shape[-1]} with values of size {v.shape[-1]}")
        scale = options.get("scaling")
        is_default = scale is None or math.isclose(scale, q.shape[-1] ** -0.5, rel_tol=1e-6)
        layers[layer] = LayerAttention(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_size=q.shape[-1],
            scale=None if is_default else scale,
            soft_cap=options.get("softcap"),
            window=window_of(mask, max_length),
        )
        return torch.zeros_like(q).transpose(1, 2)

    model.set_attn_implementation(PROBE)
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    try:
        with attending(attend), torch.inference_mode():
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), position_ids=positions, use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnsupportedModel(f"a forward pass on a plain causal attention ({reason})") from error
    return [layers[layer] for layer in sorted(layers)]


def window_of(mask: Mask, length: int) -> int | None:
    """How many of the latest positions each one sees, in sequences of up to `length`; None is all.

    Raises `UnsupportedModel` if the mask is anything else.
    """
    keys, zero = torch.arange(length), torch.zeros((), dtype=torch.int64)
    # Of two neighbours: chunks of attention begin at the same place for them, which a window does not.
    windows = []
    for query in (length - 1, max(length - 2, 0)):
        seen = mask.sees(zero, zero, torch.tensor(query), keys).expand(length)
        count = int(seen.sum())
        if not torch.equal(seen, (keys <= query) & (keys > query - count)):
            raise UnsupportedModel("attention that is not causal")
        windows.append(None if count == query + 1 else count)
    if windows[0] != windows[1] and None not in windows:
        raise UnsupportedModel("chunked attention")
    return windows[0]


def _refuse_options(mask: Any, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None and name not in HARMLESS | {"scaling", "softcap"}:
            raise UnsupportedModel(NAMES.get(name, f"the attention option {name!r}"))
    if not isinstance(mask, Mask):
        raise UnsupportedModel(f"an attention mask of its own ({type(mask).__name__})")
