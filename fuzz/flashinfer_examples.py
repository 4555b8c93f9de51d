"""Random attention examples within what the FlashInfer driver declares, held to dense attention in float64."""

from __future__ import annotations

import math
from array import array
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvproof.attention import AttentionBackend, BatchPlan, CacheSpec
from kvproof.fuzz.dense import Sequence, dense
from kvproof.fuzz.flashinfer_double import FlashInferOverDouble

NUM_BLOCKS = 300
# The double rounds once, from float64, so what is left is half a unit in the last place of the result; a scale of the
# values comes after that and rounds again.
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
        "cache_dtype": random.choice([None, None, "float8_e4m3fn"]),
    }
    fields = drawn | fixed
    if fields["cache_dtype"] is not None:
        fields |= {"k_scale": random.choice([0.25, 0.5, 1.0]), "v_scale": random.choice([0.125, 0.7])}
    return make_spec(**fields)


def kept(spec: CacheSpec, x: Tensor, scale: float) -> Tensor:
    """Keys or values as the cache gives them back: nothing here is too large for 8 bits."""
    return x if spec.cache_dtype is None else (x.float() / scale).to(spec.torch_cache_dtype).double() * scale


def random_sequences(random: Random, spec: CacheSpec) -> list[Sequence]:
    blocks = iter(random.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1))  # without the null block
    sharing = random.choice([0.0, 0.5, 1.0])
    made = []
    for _ in range(random.randint(1, 4)):
        # All that share have a block in common.
        length = random.randint(spec.block_size + 1 if sharing == 1 else 1, 3 * spec.block_size + 2)
        q = torch.randn(length, spec.num_heads, spec.head_size).to(spec.torch_dtype)
        k, v = torch.randn(2, length, spec.num_kv_heads, spec.head_size).to(spec.torch_dtype)
        made.append(Sequence(q, k, v, array("i", [next(blocks) for _ in range(-(-length // spec.block_size))])))
    for sequence in made[1:]:
        if random.random() < sharing:
            sequence.share_prefix(made[0], spec.block_size)
    for sequence in made:
        k, v = kept(spec, sequence.k, spec.k_scale), kept(spec, sequence.v, spec.v_scale)
        sequence.right = dense(spec, sequence.q, k, v)[0]
    return made


def run_example(
    backend_class: type[AttentionBackend], seed: int, *, fill: float = math.nan, atol: float = 1e-6, **fixed: Any
) -> None:
    """Sequences on scattered blocks of a cache full of NaN, some with a common prefix, computed in steps of decodes,
    chunks, prompts and empty rows, or of decodes alone, padded to the size of a graph where there is one. Every output
    must be right: at once, or on a lazy stream after the last step.

    `fixed` are fields of the `CacheSpec` that are not to be drawn.
    """
    random = Random(seed)
    torch.manual_seed(seed)
    spec = random_spec(random, **fixed)
    backend = backend_class(spec)
    stream = backend.stream if isinstance(backend, FlashInferOverDouble) and backend.stream.lazy else None
    backend.cache.fill_(fill)
    sequences = random_sequences(random, spec)
    results: list[tuple[Tensor, Tensor]] = []
    while any(s.done < len(s.q) for s in sequences):
        ready = [s for s in sequences if s.done < len(s.q) and sequences[0].done >= s.shared]
        decodes_only = random.random() < 0.5
        lengths = [[1] if decodes_only else [1, min(3, len(s.q) - s.done), len(s.q) - s.done] for s in ready]
        step = sorted(((s, random.choice(n)) for s, n in zip(ready, lengths, strict=True)), key=lambda row: row[1] != 1)
        rows = [(s.table, s.done + n, n) for s, n in step]
        for _ in range(0 if decodes_only else random.randint(0, 2)):
            rows.insert(random.randint(sum(n == 1 for _, n in step), len(rows)), (array("i"), 0, 0))
        tables, seq_lens, query_lens = zip(*rows, strict=True)
        batch = BatchPlan.build(tables, seq_lens, query_lens, spec.block_size)
        size = backend.graph_rows(batch)
        batch = batch if size is None else batch.pad(size)
        backend.plan(batch)
        q, k, v = (torch.cat([getattr(s, name)[s.done : s.done + n] for s, n in step]) for name in "qkv")
        live, padding = len(q), batch.num_padding
        q, k, v = (torch.cat((x, torch.randn(padding, *x.shape[1:]).to(x))) for x in (q, k, v))
        if random.random() < 0.5:  # as a slice of a fused projection
            q = torch.stack([q, q], dim=-1)[..., 0]
        q, k, v = (x.to(spec.device) for x in (q, k, v))
        right = torch.cat([s.right[s.done : s.done + n] for s, n in step])
        results += [(backend.run(0, q, k, v)[:live], right), (backend.run(1, q, k, -v)[:live], -right)]
        for s, n in step:
            s.done += n
        if stream is None:
            assert_right(spec, results, atol)
            results.clear()
    if stream is not None:
        stream.wait()
        assert_right(spec, results, atol)


def assert_right(spec: CacheSpec, results: list[tuple[Tensor, Tensor]], atol: float) -> None:
    rtol = TOLERANCE[spec.dtype] * (1 if spec.cache_dtype is None else 2)
    for got, right in results:
        torch.testing.assert_close(got.cpu().double(), right, rtol=rtol, atol=atol)
