"""One layer of decode attention (write, then attend) beside its peers, all taking turns in one run.

A round goes through all layers, as a model does, so that each layer's cache is as cold as it is in real use. The peers:
what we do without the compiled kernel (gather); attention on contiguous memory, with the same sequences padded to the
longest, nothing to gather and nothing to write; a bare sum over as many bytes in the same kind of memory, which no
attention can beat; and vLLM's kernel, where KVPROOF_VLLM_PYTHON names an interpreter that has it. Each has memory of
its own: what another has just read would still be in the processor's shared cache.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from mode import NO_VLLM, PEERS, QUICK, VLLM_PYTHON
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvproof.attention import BatchPlan, CacheSpec
from kvproof.attention.torch_paged import TorchAttention
from kvproof.cli.bench_figures import Figures

ROUNDS = 10
LENGTHS = {
    "32 x 100": [100] * 32,
    "32 x 1000": [1000] * 32,
    "32 x 2048": [2048] * 32,
    "1 x 8192": [8192],
    "31 x 100 and 1 x 2000": [100] * 31 + [2000],
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


@contextmanager
def vllm(seq_lens: list[int], num_layers: int) -> Iterator[Callable[[], float] | None]:
    """Seconds of one of vLLM's rounds, in a process of its own, or None where there is no vLLM."""
    if VLLM_PYTHON is None:
        yield None
        return
    job = {"seq_lens": seq_lens, "num_layers": num_layers, "threads": torch.get_num_threads()}
    script = Path(__file__).parent / "peers" / "vllm_attention.py"
    with subprocess.Popen(
        [VLLM_PYTHON, str(script), json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout
        print("\nvLLM", answers.readline().strip())  # noqa: T201

        def seconds() -> float:
            print(file=requests, flush=True)
            return float(answers.readline())

        yield seconds
        requests.close()


def planned(spec: CacheSpec, plan: BatchPlan, *, kernel: bool) -> TorchAttention:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPROOF_NO_KERNEL", "0" if kernel else "1")
        backend = TorchAttention(spec)
    backend.cache.copy_(torch.randn(spec.cache_shape[1:]))
    backend.plan(plan)
    return backend


@pytest.mark.parametrize(
    ("workload", "num_layers", "layout"),
    [("32 x 100", 30, "NHD"), ("32 x 1000", 5, "NHD")]
    if QUICK
    else [
        ("32 x 100", 30, "NHD"),
        ("32 x 100", 30, "HND"),
        ("32 x 1000", 5, "NHD"),
        ("32 x 2048", 3, "NHD"),
        ("1 x 8192", 20, "NHD"),
        ("31 x 100 and 1 x 2000", 10, "NHD"),
    ],
    ids=lambda value: f"{value} layers" if isinstance(value, int) else value,
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
    plan = BatchPlan.build(tables, seq_lens, [1] * rows, 16)
    kernel, gather = planned(spec, plan, kernel=True), planned(spec, plan, kernel=False)
    q = torch.randn(rows, 9, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, rows, 3, 64, dtype=torch.bfloat16)
    contiguous = torch.randn(2, rows, 3, longest, 64, dtype=torch.bfloat16).repeat(num_layers, 1, 1, 1, 1, 1)
    mask = (torch.arange(longest) < torch.tensor(seq_lens)[:, None])[:, None, None]
    mask = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, float("-inf"))
    bare = kernel.create_cache(spec).copy_(kernel.cache)
    whole_bytes = bare.view(num_layers, -1).view(torch.int64)  # the last blocks' free slots too: under 5 %

    def paged(backend: TorchAttention) -> Tensor:
        return torch.stack([backend.run(layer, q, k, v) for layer in range(num_layers)])

    def padded() -> Tensor:
        attend = scaled_dot_product_attention
        return torch.stack([attend(q[:, :, None], *kv, attn_mask=mask, enable_gqa=True) for kv in contiguous])

    gather.cache.copy_(kernel.cache)
    torch.testing.assert_close(paged(kernel), paged(gather), rtol=0, atol=2e-2)
    contenders: dict[str, Callable[[], float]] = {
        "kernel": lambda: timed(lambda: paged(kernel)),
        "gather": lambda: timed(lambda: paged(gather)),
        "bare_read": lambda: timed(lambda: [layer.sum() for layer in whole_bytes]),
    }
    if PEERS:
        contenders["contiguous"] = lambda: timed(padded)
    with vllm(seq_lens, num_layers) as peer:
        if peer is not None:
            contenders["vllm"] = peer
        rounds = [
            {name: run() for name, run in contenders.items()} for _ in range(2 if benchmark.disabled else ROUNDS + 1)
        ]
    moved = sum(seq_lens) * 2 * 3 * 64 * 2
    figures = Figures(benchmark)
    figures.note(threads=torch.get_num_threads(), bytes_per_layer=moved)
    figures.note(plan_ms_per_step=min(timed(lambda: kernel.plan(plan)) for _ in range(5)) * 1e3)
    times = {name: [turn[name] / num_layers for turn in rounds[1:]] for name in contenders}
    figures.over("bare read", times["kernel"], times["bare_read"], aim=1.5 if workload == "32 x 2048" else None)
    for name in [name for name in times if name not in ("kernel", "bare_read")]:
        figures.times(name, times[name], times["kernel"], aim=1 if name == "vllm" else None)
    if VLLM_PYTHON is None:
        figures.absent("vllm", NO_VLLM)
    print(f"\n{workload}, {layout}, {torch.get_num_threads()} threads, {moved / 1e6:.1f} MB a layer")  # noqa: T201
    for name, seconds in times.items():
        best, median = min(seconds), statistics.median(seconds)
        over_read = statistics.median(a / b for a, b in zip(seconds, times["bare_read"], strict=True))
        figures.note(**{f"{name}_ms": median * 1e3, f"{name}_over_bare_read": over_read})
        print(  # noqa: T201
            f"{name:>12}: median {median * 1e3:7.3f} ms, best {best * 1e3:7.3f} ms ({moved / best / 1e9:5.1f} GB/s), "
            f"{over_read:5.2f} x the bare read"
        )
    benchmark.pedantic(paged, args=(kernel,), rounds=ROUNDS, warmup_rounds=1)
