"""Faults of what an attention backend computes: see `kvproof.fuzz.conformance.faults`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvproof.attention import AttentionBackend, CacheSpec
from kvproof.attention.reference import ReferenceAttention
from kvproof.attention.torch_paged import TorchAttention
from kvproof.fuzz.conformance import attention as checks
from kvproof.fuzz.conformance.planting import Method, MethodFault


def _on_queries(change: Callable[[AttentionBackend, Tensor], Tensor]) -> Callable[[Method], Method]:
    """Attention of changed queries."""

    def around(attend: Method) -> Method:
        return lambda self, layer, q: attend(self, layer, change(self, q))

    return around


def _heads_interleaved(attend: Method) -> Method:
    """Query head h on key head h % num_kv_heads, instead of h // group_size."""

    def attend_wrongly(self: AttentionBackend, layer: int, q: Tensor) -> Tensor:
        spec = self.spec
        to = torch.arange(spec.num_heads).view(spec.group_size, spec.num_kv_heads).T.reshape(-1)
        out: Tensor = attend(self, layer, q[:, to])
        return out[:, to.argsort()]

    return attend_wrongly


def _mask_upside_down(attend: Method) -> Method:
    """The first query token of a row sees all of it, and the last one only the context and the first."""

    def attend_wrongly(self: AttentionBackend, layer: int, q: Tensor) -> Tensor:
        parts = q.tensor_split(self.batch.qo_indptr[1:-1].long())
        out: Tensor = attend(self, layer, torch.cat([part.flip(0) for part in parts]))
        return torch.cat([part.flip(0) for part in out.tensor_split(self.batch.qo_indptr[1:-1].long())])

    return attend_wrongly


def _multiplied_by_zero(attend: Method) -> Method:
    return lambda self, layer, q: attend(self, layer, q) + 0 * self.cache[layer].sum()


def _restless(attend: Method) -> Method:
    calls = iter(range(2**62))
    return lambda self, layer, q: attend(self, layer, q) * (1 + 2 * torch.finfo(q.dtype).eps * (next(calls) % 2))


def _in_bfloat16(_: AttentionBackend, q: Tensor) -> Tensor:
    return q.bfloat16().to(q.dtype)


def _default_scale(_: Any) -> Any:
    return property(lambda self: 1 / math.sqrt(self.head_size))


def _spec(change: Callable[[CacheSpec], dict[str, object]]) -> Callable[[Method], Method]:
    """A backend that takes its spec for another one."""

    def around(init: Method) -> Method:
        def wrong(self: AttentionBackend, spec: CacheSpec) -> None:
            init(self, spec.model_copy(update=change(spec)))

        return wrong

    return around


def _on_lse(change: Callable[[Tensor], Tensor]) -> Callable[[Method], Method]:
    def around(attend_lse: Method) -> Method:
        def wrong(self: AttentionBackend, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = attend_lse(self, layer, q)
            return out, change(lse)

        return wrong

    return around


def _fault(
    name: str,
    method: str,
    around: Callable[[Method], Method],
    why: str,
    noticed_by: Callable[..., None] = checks.a_step_is_right,
    owner: type = TorchAttention,
) -> MethodFault:
    return MethodFault(name, owner, method, around, noticed_by, why)


ARITHMETIC_FAULTS = (
    _fault(
        "the scale is applied twice",
        "_attend",
        _on_queries(lambda self, q: q * self.spec.softmax_scale),
        "once by the model, once by the kernel",
    ),
    _fault("the scale is always the default", "softmax_scale", _default_scale, "a custom scale", owner=CacheSpec),
    _fault("queries in bfloat16", "_attend", _on_queries(_in_bfloat16), "half the digits"),
    _fault("heads interleaved", "_attend", _heads_interleaved, "h % n instead of h // group"),
    _fault("the mask upside down", "_attend", _mask_upside_down, "not causal"),
    _fault(
        "the window is one too wide",
        "__init__",
        _spec(lambda spec: {"window": spec.window and spec.window + 1}),
        "Hugging Face's window of W is window_left = W - 1",
    ),
    _fault("the window is ignored", "__init__", _spec(lambda _: {"window": None}), "all tokens are seen"),
    _fault("the soft cap is ignored", "__init__", _spec(lambda _: {"soft_cap": None}), "scores as they are"),
    _fault(
        "keys scaled by the values' scale",
        "__init__",
        _spec(lambda spec: {"k_scale": spec.v_scale, "v_scale": spec.k_scale}),
        "of an 8-bit cache",
        checks.writes_touch_the_planned_slots_only,
        ReferenceAttention,
    ),
    _fault(
        "values are not scaled back",
        "_read",
        lambda read: lambda self, *where: read(self, *where) / torch.tensor([1, self.spec.v_scale]).view(2, 1, 1, 1),
        "of an 8-bit cache",
        owner=ReferenceAttention,
    ),
    _fault(
        "the log-sum-exp is base 2",
        "_attend_lse",
        _on_lse(lambda lse: lse / math.log(2)),
        "as FlashInfer's is (sglang#40903, vllm#28840)",
        checks.log_sum_exps_are_right,
    ),
    _fault(
        "the log-sum-exp is a sum",
        "_attend_lse",
        _on_lse(torch.exp),
        "merged, the larger part drowns the other",
        checks.parts_of_a_sequence_merge_by_log_sum_exp,
    ),
    _fault(
        "unused slots multiplied by zero",
        "_attend",
        _multiplied_by_zero,
        "0 * NaN is NaN (flashinfer#941)",
        checks.unused_slots_are_not_read,
    ),
    _fault("other bits the second time", "_attend", _restless, "not deterministic", checks.a_run_can_be_repeated),
)
"""A backend that computes something else."""
