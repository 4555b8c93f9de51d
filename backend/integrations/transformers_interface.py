"""Our entry in transformers' table of attention functions: it hands every call on to whoever computes the present step.

A model reads the table by the name in its config. Its code stays as it is, and it need not pass any argument through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface

from kvproof.allocator import KvproofError

RUN = "kvproof"
"""The `attn_implementation` of a model that runs: no mask is made, since a step's plan says who sees whom."""

PROBE = "kvproof-probe"
"""That of a model that is looked at: its masks are `Mask`."""

Attend = Callable[[Module, Tensor, Tensor, Tensor, Any, dict[str, Any]], Tensor]
"""(module, q, k, v, mask, options): q [1, num_heads, T, head_size], k and v with num_kv_heads; returns
[1, T, num_heads, head_size]. `module.layer_idx` numbers the layer."""


@dataclass(frozen=True, slots=True)
class Mask:
    """An attention mask as a function of positions: `sees(batch, head, query, key)`, all int64 that broadcast."""

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class NotInAStep(KvproofError, RuntimeError):
    """The attention interface was called outside `attending`: the model isn't for `model.generate` any more."""


_attend: ContextVar[Attend] = ContextVar("kvproof_attend")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Within it, models of `RUN` and `PROBE` have their attention computed by `attend`."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def _attention(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    attend = _attend.get(None)
    if attend is None:
        raise NotInAStep("a model with attn_implementation='kvproof' runs on a TransformersRunner only")
    return attend(module, query, key, value, attention_mask, options), None


def _mask(*, mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], **_: Any) -> Mask:
    return Mask(mask_function)


AttentionInterface.register(RUN, _attention)
AttentionInterface.register(PROBE, _attention)
AttentionMaskInterface.register(PROBE, _mask)
