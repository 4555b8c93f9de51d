"""Attention that knows nothing of blocks, and how far from it a backend may be."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvproof.attention import CacheSpec


class Dense(NamedTuple):
    """float64: outputs [..., m, num_heads, head_size], natural log-sum-exps [..., m, num_heads], and the errors that
    either may have, which `dense` derives."""

    out: Tensor
    lse: Tensor
    out_error: Tensor
    lse_error: Tensor


def dense(spec: CacheSpec, q: Tensor, k: Tensor, v: Tensor) -> Dense:
    """Causal attention of a sequence's last m tokens over its n, in float64.

    q [..., m, num_heads, head_size], k and v [..., n, num_kv_heads, head_size], of any dtype; keys and values are
    first stored as a cache of `spec` does.

    An error is the first-order rounding error of softmax attention, element by element, for any order of summation.
    With u the unit roundoff of the spec's dtype and e that of the sums (float32's, or float64's for float64), s the
    largest score that the query sees, p the largest sum of |q| |k| scale, d the head size, n the keys, and
    a = sum(weight * |v|), all in the row's own numbers:

        scores   q, k and the score may each be rounded to the dtype: 3 u s; summing d products: e d p; a soft cap's
                 tanh good to four units: 4 e s, or on a GPU, whose instruction (PTX's tanh.approx) promises so much
                 and no more, 2^-11 s. An error of x in every score changes the output by 2 x a at most.
        weights  rounded to the dtype before they meet the values, as flash kernels do: u a
        output   rounded to the dtype: u a; and once more where the values of an 8-bit cache are scaled last: u a
        tiny     weights and outputs below the dtype's normal numbers lose up to half of its smallest one, t, instead
        sums     n weighted values, n weights, and an exponential good to a few units: e (2 n + 8) a
        lse      the scores' error; its sum of n weights, e (n + 8); and float32's, f, in a largest score of s and the
                 logarithm of at most n, each rounded and perhaps converted from base 2: 4 f (s + log n)

    Nothing is added for luck. A backend that sums in less than float32 does not pass, and should not.
    """
    m, n = q.shape[-3], k.shape[-3]
    if not m:
        nothing = q.double()
        return Dense(nothing, nothing[..., 0], nothing, nothing[..., 0])
    # Not by spec's own arithmetic, which is under test as well.
    scale = spec.scale if spec.scale is not None else 1 / math.sqrt(spec.head_size)
    group = spec.num_heads // spec.num_kv_heads
    k, v = (
        as_stored(spec, x, scale).repeat_interleave(group, -2) for x, scale in ((k, spec.k_scale), (v, spec.v_scale))
    )
    q = q.double()
    at = torch.arange(n, device=q.device)
    behind = (at[n - m :, None] - at)[:, None]
    hidden = behind < 0 if spec.window is None else (behind < 0) | (behind >= spec.window)
    raw = torch.einsum("...qhd,...khd->...qhk", q, k) * scale
    scores = raw if spec.soft_cap is None else spec.soft_cap * (raw / spec.soft_cap).tanh()
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1)

    u, f = (torch.finfo(dtype).eps / 2 for dtype in (spec.torch_dtype, torch.float32))
    e = min(u, f)
    products = torch.einsum("...qhd,...khd->...qhk", q.abs(), k.abs()) * scale
    s, p = (x.masked_fill(hidden, 0).amax(-1) for x in (raw.abs(), products))
    a = torch.einsum("...qhk,...khd->...qhd", weights, v.abs())
    tanh = 2**-11 if spec.soft_cap is not None and q.device.type == "cuda" else 4 * e
    score = 3 * u * s + e * spec.head_size * p + tanh * s
    tiny = torch.finfo(spec.torch_dtype).smallest_normal * u
    roundings = 2 if spec.cache_dtype is None else 3
    return Dense(
        out=torch.einsum("...qhk,...khd->...qhd", weights, v),
        lse=scores.logsumexp(-1),
        out_error=a * (2 * score + e * (2 * n + 8) + roundings * u).unsqueeze(-1)
        + tiny * (roundings + v.abs().sum(-3, keepdim=True)),
        lse_error=score + e * (n + 8) + 4 * f * (s + math.log(n)),
    )


def as_stored(spec: CacheSpec, x: Tensor, scale: float) -> Tensor:
    """Keys or values as a cache of `spec` gives them back, float64."""
    return x.double() if spec.cache_dtype is None else to_cache(spec, x, scale).double() * scale


def to_cache(spec: CacheSpec, x: Tensor, scale: float) -> Tensor:
    """Keys or values as a cache of `spec` holds them. Beyond its largest number there is only that one."""
    if spec.cache_dtype is None:
        return x
    largest = torch.finfo(spec.torch_cache_dtype).max
    return (x.double() / scale).clamp(-largest, largest).to(spec.torch_cache_dtype)
