"""Replaying request traces: how fast, beside a dict that does no more than the hits; and what each policy finds.

The speed is measured on a trace made here: conversations that go on, in turns, on a pool that holds half of it. The hit
rates are those of the public traces, where they are.
"""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from pathlib import Path
from time import perf_counter

import pytest
from mode import QUICK, TRACES, full_run
from pytest_benchmark.fixture import BenchmarkFixture

from kvproof.allocator.replay import replay
from kvproof.allocator.traces import Request, Trace, read_trace
from kvproof.backend.registry import Group, plugins
from kvproof.backend.selection import new_policy
from kvproof.cli.bench_figures import Figures

NUM_REQUESTS = 1_000 if QUICK else 5_000
ROUNDS = 3
FILES = {
    "conversation": (TRACES / "mooncake" / "conversation_trace.jsonl", [1_000, 4_000, 16_000, 32_000, 64_000, 200_000]),
    "agentic": (TRACES / "claude_code" / "sessions.jsonl.gz", [2_000, 5_000, 10_000, 20_000, 50_000]),
}
PUBLISHED = {"conversation": {1_000: 0.045, 4_000: 0.087, 16_000: 0.263, 64_000: 0.359, 200_000: 0.366}}
"""Hit rates of LRU that the trace was published with, to three places."""


def made_trace() -> Trace:
    draw = random.Random(1)
    open_ones: list[array[int]] = []
    requests, fresh = list[Request](), 0
    for number in range(NUM_REQUESTS):
        if not open_ones or draw.random() < 0.2:
            open_ones.append(array("i"))
        blocks = open_ones[draw.randrange(len(open_ones))]
        more = draw.randint(1, 8)
        blocks.extend(range(fresh, fresh + more))
        fresh += more
        requests.append(Request(float(number), 512 * len(blocks), blocks[:]))
        if len(open_ones) > 100:
            open_ones.pop(draw.randrange(len(open_ones)))
    return Trace(512, requests)


def bare_hits(trace: Trace, num_blocks: int) -> int:
    """An LRU cache of whole blocks in a dict, where a prompt's last block is always computed; its hits."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        blocks = request.blocks
        found = next((i for i, block in enumerate(blocks[:-1]) if block not in cached), len(blocks) - 1)
        hits += found
        for block in blocks[:found]:
            del cached[block]
        while len(cached) + len(blocks) > num_blocks:
            cached.popitem(last=False)
        for block in reversed(blocks):  # a parent is more recent than its children
            cached[block] = None
            cached.move_to_end(block)
    return hits


@pytest.mark.benchmark(group="replay of a made trace, as many blocks as half of it has, LRU")
def test_replay_speed(benchmark: BenchmarkFixture) -> None:
    trace = made_trace()
    num_blocks = 1 + max(block for request in trace.requests for block in request.blocks) // 2
    bare: list[float] = []
    mine: list[float] = []
    hits: list[int] = []

    def dicts_turn() -> None:
        started = perf_counter()
        hits.append(bare_hits(trace, num_blocks))
        bare.append(perf_counter() - started)

    def our_turn() -> None:
        result = replay(trace, num_blocks)
        assert result.evictions > 0
        assert result.hit_blocks == hits[-1] > result.prompt_blocks / 2
        mine.append(result.seconds)

    benchmark.pedantic(our_turn, setup=dicts_turn, rounds=ROUNDS)
    blocks = sum(len(request.blocks) for request in trace.requests)
    figures = Figures(benchmark)
    figures.over("an LRU dict", mine, bare)
    figures.note(requests=NUM_REQUESTS, prompt_blocks=blocks, pool_blocks=num_blocks)
    figures.note(us_per_block=round(min(mine) / blocks * 1e6, 3))
    figures.show()


@full_run
@pytest.mark.parametrize("name", FILES)
@pytest.mark.benchmark(group="replay of public traces, all policies and capacities")
def test_hit_rates(benchmark: BenchmarkFixture, name: str) -> None:
    file, capacities = FILES[name]
    trace = read(file)
    figures = Figures(benchmark)
    rates: dict[str, dict[int, float]] = {}

    def all_policies() -> None:
        for policy in plugins(Group.POLICY):
            rates[policy] = {size: replay(trace, size, policy=new_policy(policy)).hit_rate for size in capacities}

    benchmark.pedantic(all_policies, rounds=1)
    for policy, rate in rates.items():
        figures.curve(
            f"Hit rate against capacity, {name} trace", policy, rate,
            x=f"blocks of {trace.block_size} tokens", y="share of the prompts' blocks found",
        )  # fmt: skip
    for size, published in PUBLISHED.get(name, {}).items():
        aim = round((published - 0.001) / published, 3)
        figures.times(f"the published hit rate, {size:,} blocks", [rates["lru"][size]], [published], aim=aim)
    figures.note(requests=len(list(trace.requests)), hit_rates=rates)
    figures.show()


def read(file: Path) -> Trace:
    if not file.exists():
        pytest.skip(f"no {file.name} (set KVPROOF_TRACES to the folder of the public traces)")
    trace = read_trace(file)
    return Trace(trace.block_size, list(trace.requests))
