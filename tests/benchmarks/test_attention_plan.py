"""What a step's metadata costs on the host, once for all layers: building it, validating it, planning with both.

`validate` knows nothing of other steps; `next` knows the one before, which had the same tables. `plan` is the torch
backend's, in which `next` is the first thing. Beside each stands the bare limit: copying as many block numbers as the
batch names, which a kernel has to be given in one array. In a series of steps tables change: see `test_growth.py`.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from time import perf_counter

import numpy as np
import pytest
from mode import QUICK
from pytest_benchmark.fixture import BenchmarkFixture

from kvproof.attention import BatchPlan, CacheSpec
from kvproof.attention.ownership import Ownership
from kvproof.attention.torch_paged import TorchAttention
from kvproof.cli.bench_figures import Figures

BLOCK_SIZE = 16
TURNS = 100
STEPS = {  # sequence lengths, query lengths, and blocks that all rows begin with
    "1 decode of 1000": ([1000], [1], 0),
    "32 decodes of 2048": ([2048] * 32, [1] * 32, 0),
    "256 decodes of 1000": ([1000] * 256, [1] * 256, 0),
    "256 decodes of 4096": ([4096] * 256, [1] * 256, 0),
    "256 decodes of 4096, half of it common": ([4096] * 256, [1] * 256, 128),
    "31 decodes of 2048 and a chunk of 512": ([2048] * 32, [1] * 31 + [512], 0),
}


@pytest.mark.parametrize("work", ["build", "validate", "next", "plan"])
@pytest.mark.parametrize("step", list(STEPS)[1:3] if QUICK else STEPS)
def test_plan(step: str, work: str, benchmark: BenchmarkFixture) -> None:
    seq_lens, query_lens, common = STEPS[step]
    counts = [-(-length // BLOCK_SIZE) for length in seq_lens]
    blocks = iter(random.Random(1).sample(range(sum(counts)), sum(counts)))
    tables = [array("i", [next(blocks) for _ in range(count)]) for count in counts]
    for table in tables:
        table[:common] = tables[0][:common]
    spec = CacheSpec(
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        dtype="bfloat16",
        num_blocks=sum(counts),
        block_size=BLOCK_SIZE,
    )
    plan = BatchPlan.build(tables, seq_lens, query_lens, BLOCK_SIZE)
    backend, known = TorchAttention(spec), Ownership(spec)
    calls: dict[str, Callable[[], object]] = {
        "build": lambda: BatchPlan.build(tables, seq_lens, query_lens, BLOCK_SIZE),
        "validate": lambda: plan.validate(spec),
        "next": lambda: plan.validate(spec, known),
        "plan": lambda: backend.plan(plan),
    }
    benchmark.group = f"metadata of a batch: {step}, block {BLOCK_SIZE}"
    benchmark(calls[work])
    named = np.concatenate(tables).astype(np.int32)
    turns = [(timed(calls[work]), timed(named.copy)) for _ in range(TURNS)]
    figures = Figures(benchmark)
    figures.over("a copy of as many block numbers", *zip(*turns, strict=True))
    figures.note(rows=len(tables), blocks=sum(counts), block_size=BLOCK_SIZE)
    figures.show()


def timed(run: Callable[[], object]) -> float:
    """The quickest of several calls: one takes microseconds, and now and then waits for whoever has the core."""
    quickest = float("inf")
    for _ in range(20):
        started = perf_counter()
        run()
        quickest = min(quickest, perf_counter() - started)
    return quickest
