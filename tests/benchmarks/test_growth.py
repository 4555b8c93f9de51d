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
STAY = 512  # steps for which a sequence decodes


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


class Change(NamedTuple):
    """What has changed since the step before: blocks that tables gained, and a row that left for a new last one."""

    grown: list[tuple[array[int], int]]
    replaced: tuple[int, array[int]] | None
    lengths: list[int]


def metadata_steps(load: Load) -> Step:
    """As the engine does it for each step: the plan of the batch, and the attention backend's planning with it.

    A row gains a token a step, and so a block in one of sixteen; in one of `STAY` it leaves, and another comes with all
    of its context. Of that, nothing is timed but the changes to the tables.
    """
    longest = -(-(load.context + WARM_UP + STEPS) // BLOCK_SIZE)
    num_blocks = max(load.pool, 4 * load.running * longest // 3)
    spec = CacheSpec(
        num_layers=1, num_heads=1, num_kv_heads=1, head_size=8, dtype="bfloat16", num_blocks=num_blocks, block_size=16
    )
    backend, draw = TorchAttention(spec), random.Random(1)
    tables: list[array[int]] = []
    changes: list[Change] = []

    def prepare() -> None:
        free = iter(draw.sample(range(num_blocks), num_blocks))

        def table_of(length: int) -> array[int]:
            return array("i", [next(free) for _ in range(-(-length // BLOCK_SIZE))])

        lengths = [load.context - i % BLOCK_SIZE for i in range(load.running)]
        tables[:] = [table_of(length) for length in lengths]
        changes.clear()
        rows = tables[:]
        for step in range(WARM_UP + STEPS):
            full = [table for table, length in zip(rows, lengths, strict=True) if length % BLOCK_SIZE == 0]
            grown, replaced = [(table, next(free)) for table in full], None
            lengths = [length + 1 for length in lengths]
            if step % max(1, STAY // load.running) == 0:
                left, new = replaced = draw.randrange(load.running), table_of(load.context)
                rows = [*rows[:left], *rows[left + 1 :], new]
                lengths = [*lengths[:left], *lengths[left + 1 :], load.context]
            changes.insert(0, Change(grown, replaced, lengths))

    def run(steps: int) -> None:
        ones = [1] * load.running
        for _ in range(steps):
            grown, replaced, lengths = changes.pop()
            for table, block in grown:
                table.append(block)
            if replaced:
                left, new = replaced
                del tables[left]
                tables.append(new)
            backend.plan(BatchPlan.build(tables, lengths, ones, BLOCK_SIZE))

    return Step(prepare, run)


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
