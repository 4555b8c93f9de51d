"""What a process pays to import the allocator, beside the tenth of a second that nobody should wait for it, and beside
the start of an interpreter that imports nothing.

Seconds are the processor's: all of them are spent in a process that lives a few dozen milliseconds, and waiting for a
busy machine is not what is asked. The files are in the system's cache.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kvproof.cli.bench_figures import Figures

ROUNDS = 10
PROGRAM = """
from time import process_time
started = process_time()
import kvproof.allocator
print(started, process_time() - started)
"""


@pytest.mark.benchmark(group="a process that imports kvproof.allocator")
def test_import(benchmark: BenchmarkFixture) -> None:
    start: list[float] = []
    mine: list[float] = []

    def process() -> None:
        told = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
        for turns, seconds in zip((start, mine), map(float, told.split()), strict=True):
            turns.append(seconds)

    process()  # reads the files
    benchmark.pedantic(process, rounds=ROUNDS)
    figures = Figures(benchmark)
    figures.over("100 ms", mine[1:], [0.1] * len(mine[1:]), aim=0.5)
    figures.over("an interpreter's start", mine[1:], start[1:])
    figures.note(ms=round(statistics.median(mine[1:]) * 1e3, 1))
    figures.show()
