"""One layer of decode attention (write, then attend) beside attention on contiguous memory, in one run.

A round goes through all layers, as a model does, so that each layer's cache is as cold as it is in real use. The
contiguous peer holds the same sequences padded to the longest, with nothing to gather and nothing to write.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvproof.attention import BatchPlan, CacheSpec
from kvproof.attention.torch_paged import TorchAttention

LENGTHS = {
    "32 x 100-200 tokens": [random.Random(0).randint(100, 200) for _ in range(32)],
    "32 x 1000-1100 tokens": [random.Random(0).randint(1000, 1100) for _ in range(32)],
    "31 x 100 tokens and 1 x 2000": [100] * 31 + [2000],
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def spread_tables(seq_lens: list[int], block_size: int) -> list[array[int]]:
    counts = [-(-length // block_size) for length in seq_lens]
    blocks = iter(random.Random(1).sample(range(sum(counts)), sum(counts)))
    return [array("i", [next(blocks) for _ in range(count)]) for count in counts]


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@pytest.mark.parametrize(
    ("workload", "num_layers", "layout"),
    [
        ("32 x 100-200 tokens", 30, "NHD"),
        ("32 x 100-200 tokens", 30, "HND"),
        ("32 x 1000-1100 tokens", 5, "NHD"),
        ("31 x 100 tokens and 1 x 2000", 5, "NHD"),
    ],
)
@pytest.mark.benchmark(group="decode attention, 9 query and 3 key heads of 64, bfloat16, block 16, all layers")
def test_decode(benchmark: BenchmarkFixture, workload: str, num_layers: int, layout: str) -> None:
    seq_lens = LENGTHS[workload]
    tables = spread_tables(seq_lens, 16)
    rows, longest = len(seq_lens), max(seq_lens)
    spec = CacheSpec(
        num_layers=num_layers,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        dtype="bfloat16",
        num_blocks=sum(map(len, tables)),
        block_size=16,
        layout=layout,
    )
    backend = TorchAttention(spec)
    backend.cache.copy_(torch.randn(spec.cache_shape[1:]))
    q = torch.randn(rows, 9, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, rows, 3, 64, dtype=torch.bfloat16)
    contiguous = torch.randn(2, rows, 3, longest, 64, dtype=torch.bfloat16).repeat(num_layers, 1, 1, 1, 1, 1)
    mask = (torch.arange(longest) < torch.tensor(seq_lens)[:, None])[:, None, None]
    mask = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, float("-inf"))

    def paged() -> Tensor:
        return torch.stack([backend.run(layer, q, k, v) for layer in range(num_layers)])

    def peer() -> Tensor:
        attend = scaled_dot_product_attention
        return torch.stack([attend(q[:, :, None], *kv, attn_mask=mask, enable_gqa=True) for kv in contiguous])

    plan = BatchPlan.build(tables, seq_lens, [1] * rows, 16)
    backend.plan(plan)
    assert paged().shape == (num_layers, rows, 9, 64)
    peer()
    pairs = [(timed(paged), timed(peer)) for _ in range(1 if benchmark.disabled else 10)]
    benchmark.extra_info |= {
        "rows": rows,
        "tokens": sum(seq_lens),
        "layers": num_layers,
        "threads": torch.get_num_threads(),
        "paged_ms_per_layer": statistics.median(ours for ours, _ in pairs) / num_layers * 1e3,
        "contiguous_ms_per_layer": statistics.median(theirs for _, theirs in pairs) / num_layers * 1e3,
        "paged_over_contiguous": statistics.median(ours / theirs for ours, theirs in pairs),
        "plan_ms_per_step": min(timed(lambda: backend.plan(plan)) for _ in range(5)) * 1e3,
    }
    benchmark.pedantic(paged, rounds=10, warmup_rounds=1)


@pytest.mark.parametrize("rows", [32, 256])
@pytest.mark.parametrize("operation", ["build", "validate"])
@pytest.mark.benchmark(group="batch metadata of decodes of 1000-1100 tokens, block 16")
def test_metadata(benchmark: BenchmarkFixture, operation: str, rows: int) -> None:
    seq_lens = [random.Random(row).randint(1000, 1100) for row in range(rows)]
    tables = spread_tables(seq_lens, 16)
    num_blocks = sum(map(len, tables))
    spec = CacheSpec(
        num_layers=1, num_heads=1, num_kv_heads=1, head_size=1, dtype="float32", num_blocks=num_blocks, block_size=16
    )
    plan = BatchPlan.build(tables, seq_lens, [1] * rows, 16)
    benchmark.extra_info |= {"rows": rows, "blocks": num_blocks}
    if operation == "build":
        built = benchmark(BatchPlan.build, tables, seq_lens, [1] * rows, 16)
        assert torch.equal(built.slot_mapping, plan.slot_mapping)
    else:
        assert benchmark(plan.validate, spec) is None
