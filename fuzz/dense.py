"""Attention that knows nothing of blocks, and sequences to hold a backend to it."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvproof.attention import CacheSpec


def dense(spec: CacheSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of one whole sequence in float64, and the natural log-sum-exp of its scores.

    q [T, num_heads, head_size], k and v [T, num_kv_heads, head_size] of any dtype. Returns [T, num_heads, head_size]
    and [T, num_heads].
    """
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    # Not by spec's own arithmetic, which is under test as well.
    k, v = (x.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=0) for x in (k, v))
    scale = spec.scale if spec.scale is not None else 1 / math.sqrt(spec.head_size)
    scores = (q @ k.transpose(1, 2)) * scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
    ones = torch.ones(scores.shape[1:])
    hidden = ones.triu(1).bool()
    if spec.window is not None:
        hidden |= ones.tril(-spec.window).bool()
    scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).T


@dataclass
class Sequence:
    """A sequence's queries, keys and values in full, how many of its tokens have been computed, and what is right."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: array[int]
    shared: int = 0
    done: int = 0
    right: Tensor = field(init=False)
    lse: Tensor = field(init=False)

    def share_prefix(self, parent: Sequence, block_size: int) -> None:
        """Use the parent's full blocks for as much as both have, all but one token at most."""
        blocks = min(len(parent.q), len(self.q) - 1) // block_size
        self.shared = self.done = tokens = blocks * block_size
        self.k[:tokens], self.v[:tokens] = parent.k[:tokens], parent.v[:tokens]
        self.table[:blocks] = parent.table[:blocks]
