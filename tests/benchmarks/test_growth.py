"""What a decode step costs as running sequences, context and pool grow, each alone: for the allocator, and for the
attention's metadata. Nothing should grow with what did not change.

A step's work is a token for each running sequence, so against their number its cost is taken for each of them. All
sizes take turns in each round, and a ratio is that of the largest to the smallest, round by round.
"""

from __future__ import annotations

import random
import statistics
from array import array
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import pytest
from mode import QUICK
from peers.ours import Batched
from pytest_benchmark.fixture import BenchmarkFixture

from kvproof.allocator import Sequence
from kvproof.attention import BatchPlan, CacheSpec
from kvproof.attention.torch_paged import TorchAttention
from kvproof.cli.bench_figures import Figures

BLOCK_SIZE = 16
STEPS = 128  # eight blocks of each sequence
WARM_UP = 16
ROUNDS = 5


class Load(NamedTuple):
    """How many sequences decode, their context in tokens, and the blocks of the pool, all of which have content."""

    running: int = 16
    context: int = 512
    pool: int = 100_000


AXES: dict[str, tuple[str, list[int]]] = {
    "running": ("running sequences", [32, 128, 512] if QUICK else [1, 2, 8, 32, 128, 512]),
    "context": ("tokens of context", [128, 1024, 8192] if QUICK else [128, 256, 512, 1024, 2048, 4096, 8192]),
    "pool": ("blocks in the pool", [1_000, 10_000, 100_000] if QUICK else [1_000, 10_000, 100_000, 1_000_000]),
}
SMALLEST = {"running": 32, "context": 128, "pool": 1_000}
"""What the largest is compared with. One sequence alone has the whole fixed cost of a step to bear."""


class Step(NamedTuple):
    """`prepare` makes ready for a round and is not timed; `run` does so many steps."""

    prepare: Callable[[], None]
    run: Callable[[int], None]


def allocator_steps(load: Load) -> Step:
    """The prompts end at any phase of their blocks: in a mean step, one in sixteen crosses into a new one."""
    allocator = Batched(load.pool, BLOCK_SIZE, load.running)
    allocator.fill()
    draw, running = random.Random(1), list[Sequence]()

    def prepare() -> None:
        for seq in running:
            allocator.release(seq)
        lengths = [load.context - i % BLOCK_SIZE for i in range(load.running)]
        running[:] = [allocator.admit(draw.choices(range(1000), k=length), 0) for length in lengths]

    def run(steps: int) -> None:
        batch, sampled = allocator.batch, list(range(load.running))
        for _ in range(steps):
            assert not batch.reserve()
            batch.commit(sampled)

    return Step(prepare, run)


def metadata_steps(load: Load) -> Step:
    """As the engine does it for each step: the plan of the batch, and the attention backend's planning with it."""
    count = -(-load.context // BLOCK_SIZE)
    num_blocks = max(load.pool, load.running * count)
    spec = CacheSpec(
        num_layers=1, num_heads=1, num_kv_heads=1, head_size=8, dtype="bfloat16", num_blocks=num_blocks, block_size=16
    )
    backend = TorchAttention(spec)
    blocks = random.Random(1).sample(range(num_blocks), load.running * count)
    tables = [array("i", blocks[row * count : (row + 1) * count]) for row in range(load.running)]
    lengths, ones = [load.context] * load.running, [1] * load.running

    def run(steps: int) -> None:
        for _ in range(steps):
            backend.plan(BatchPlan.build(tables, lengths, ones, BLOCK_SIZE))

    return Step(lambda: None, run)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("part", ["allocator", "attention metadata"])
@pytest.mark.benchmark(group="a decode step as one thing grows; the time is that of 144 steps at all sizes")
def test_growth(benchmark: BenchmarkFixture, part: str, axis: str) -> None:
    label, sizes = AXES[axis]
    make = {"allocator": allocator_steps, "attention metadata": metadata_steps}[part]
    steps = {size: make(Load()._replace(**{axis: size})) for size in sizes}
    times: dict[int, list[float]] = {size: [] for size in sizes}
    draw = random.Random(1)

    def prepare() -> None:
        for step in steps.values():
            step.prepare()

    def run() -> None:
        for size, step in draw.sample(list(steps.items()), len(steps)):  # none is always the first
            step.run(WARM_UP)
            started = perf_counter()
            step.run(STEPS)
            seconds = (perf_counter() - started) / STEPS
            times[size].append(seconds * 1e6 / (size if axis == "running" else 1))

    benchmark.pedantic(run, setup=prepare, rounds=ROUNDS, warmup_rounds=1)
    measured = {size: turns[-ROUNDS:] for size, turns in times.items()}  # without the warm-up's
    figures = Figures(benchmark)
    smallest = SMALLEST[axis]
    figures.over(f"{smallest:,} {label}", measured[sizes[-1]], measured[smallest], aim=1.25)
    unit = "us a step and sequence" if axis == "running" else "us a step"
    medians = {size: statistics.median(turns) for size, turns in measured.items()}
    figures.curve(f"Decode step against {label}: {part}", part, medians, x=label, y=unit)
    figures.note(**{unit: {size: round(value, 2) for size, value in medians.items()}}, **Load()._asdict(), varied=axis)
    figures.show()
