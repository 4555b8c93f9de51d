"""Random attention examples within what the FlashInfer driver declares, held to dense attention in float64."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvproof.attention import AttentionBackend, BatchPlan, CacheSpec
from kvproof.fuzz.flashinfer_double import LazyOverDouble

NUM_BLOCKS = 300
# The double rounds once, from float64, so what is left is half a unit in the last place of the result.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11}


def make_spec(**changes: Any) -> CacheSpec:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "bfloat16",
        "num_blocks": NUM_BLOCKS,
        "block_size": 4,
    }
    return CacheSpec(**(fields | changes))


def random_spec(random: Random, **fixed: Any) -> CacheSpec:
    num_kv_heads = random.choice([1, 1, 2])
    drawn = {
        "num_heads": num_kv_heads * random.choice([1, 2, 3, 4, 5, 7, 9]),
        "num_kv_heads": num_kv_heads,
        "head_size": random.choice([64, 64, 128, 256]),
        "dtype": random.choice(["bfloat16", "float16"]),
        "block_size": random.choice([1, 2, 3, 5, 8, 16, 24, 32]),
        "layout": random.choice(["NHD", "HND"]),
        "scale": random.choice([None, None, 0.3]),
        "window": random.choice([None, None, 1, 2, 5, 17]),
        "soft_cap": random.choice([None, None, 2.0]),
    }
    return make_spec(**(drawn | fixed))


def dense(spec: CacheSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one whole sequence in float64, and the natural log-sum-exp of its scores."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(spec.group_size, dim=0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) * spec.softmax_scale
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
    """A sequence's queries, keys and values in full, and how many of its tokens have been computed."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: array[int]
    shared: int = 0
    done: int = 0
    right: Tensor = field(init=False)

    def share_prefix(self, parent: Sequence, block_size: int) -> None:
        blocks = min(len(parent.q), len(self.q) - 1) // block_size
        self.shared = self.done = tokens = blocks * block_size
        self.k[:tokens], self.v[:tokens] = parent.k[:tokens], parent.v[:tokens]
        self.table[:blocks] = parent.table[:blocks]


def random_sequences(random: Random, spec: CacheSpec) -> list[Sequence]:
    blocks = iter(random.sample(range(NUM_BLOCKS), NUM_BLOCKS))
    made = []
    for _ in range(random.randint(1, 4)):
        length = random.randint(1, 3 * spec.block_size + 2)
        q = torch.randn(length, spec.num_heads, spec.head_size).to(spec.torch_dtype)
        k, v = torch.randn(2, length, spec.num_kv_heads, spec.head_size).to(spec.torch_dtype)
        made.append(Sequence(q, k, v, array("i", [next(blocks) for _ in range(-(-length // spec.block_size))])))
    for sequence in made[1:]:
        if random.random() < 0.5:
            sequence.share_prefix(made[0], spec.block_size)
    for sequence in made:
        sequence.right = dense(spec, sequence.q, sequence.k, sequence.v)[0]
    return made


def run_example(
    backend_class: type[AttentionBackend], seed: int, *, fill: float = math.nan, atol: float = 1e-6, **fixed: Any
) -> None:
    """Sequences on scattered blocks of a cache full of NaN, some with a common prefix, computed in steps of decodes,
    chunks, prompts and empty rows. Every output must be right: at once, or on a lazy stream after the last step.

    `fixed` are fields of the `CacheSpec` that are not to be drawn.
    """
    random = Random(seed)
    torch.manual_seed(seed)
    spec = random_spec(random, **fixed)
    backend = backend_class(spec)
    stream = backend.stream if isinstance(backend, LazyOverDouble) else None
    backend.cache.fill_(fill)
    sequences = random_sequences(random, spec)
    results: list[tuple[Tensor, Tensor]] = []
    while any(s.done < len(s.q) for s in sequences):
        ready = [s for s in sequences if s.done < len(s.q) and sequences[0].done >= s.shared]
        step = [(s, random.choice([1, min(3, len(s.q) - s.done), len(s.q) - s.done])) for s in ready]
        step.sort(key=lambda row: row[1] != 1)
        rows = [(s.table, s.done + n, n) for s, n in step]
        for _ in range(random.randint(0, 2)):
            rows.insert(random.randint(sum(n == 1 for _, n in step), len(rows)), (array("i"), 0, 0))
        tables, seq_lens, query_lens = zip(*rows, strict=True)
        backend.plan(BatchPlan.build(tables, seq_lens, query_lens, spec.block_size))
        q, k, v = (torch.cat([getattr(s, name)[s.done : s.done + n] for s, n in step]) for name in "qkv")
        if random.random() < 0.5:  # as a slice of a fused projection
            q = torch.stack([q, q], dim=-1)[..., 0]
        q, k, v = (x.to(spec.device) for x in (q, k, v))
        right = torch.cat([s.right[s.done : s.done + n] for s, n in step])
        results += [(backend.run(0, q, k, v), right), (backend.run(1, q, k, -v), -right)]
        for s, n in step:
            s.done += n
        if stream is None:
            assert_right(spec, results, atol)
            results.clear()
    if stream is not None:
        stream.wait()
        assert_right(spec, results, atol)


def assert_right(spec: CacheSpec, results: list[tuple[Tensor, Tensor]], atol: float) -> None:
    for got, right in results:
        torch.testing.assert_close(got.cpu().double(), right, rtol=TOLERANCE[spec.dtype], atol=atol)
