"""How often the random machines find each planted fault: the same hunt from many seeds, up to the first failure each.

Where a machine finds a fault after `m` examples in the median, it misses it in `n` about once in 2 ** (n / m) times. So
`FEW` seeds are enough where each of them found it and the median is below a tenth of what is allowed; the others get
all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from kvproof.fuzz.catalogue import fault_named
from kvproof.fuzz.hunt import Sighting, sight, workers
from kvproof.fuzz.plan import Engine, Plan

FEW = 20
REQUIRED = 0.95
"""The share of seeds from which a fault has to be found."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What came of looking for one fault from the seeds 0, 1, ...; `scope` is where the explorer finds it."""

    fault: str
    finder: str
    scope: str | None
    sightings: tuple[Sighting, ...]

    @property
    def found(self) -> int:
        return sum(sighting.found for sighting in self.sightings)

    @property
    def examples(self) -> list[int]:
        """How many each of the seeds took, in ascending order."""
        return sorted(sighting.amount for sighting in self.sightings)

    @property
    def suffices(self) -> bool:
        return self.found >= REQUIRED * len(self.sightings)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "found": self.found, "median": median(self.examples), "suffices": self.suffices}


def rates(
    faults: Iterable[str], *, seeds: int, examples: int, jobs: int = 1, engine: Engine = "hypothesis"
) -> Iterator[Rate]:
    """The rate of each fault that is looked for at random, in their order. Raises `WorkerCrashed`."""
    plan = Plan(machines=(), examples=examples, jobs=jobs, engine=engine)
    with workers(plan) as ask, ThreadPoolExecutor(jobs) as threads:

        def rate(fault: str) -> Rate | None:
            planted = fault_named(fault)
            if planted.finder is None:
                return None
            sightings: list[Sighting] = []
            for seed in range(seeds):
                if seed == FEW and _settled(sightings, examples):
                    break
                sightings.append(sight(ask, fault, planted.finder, replace(plan, seed=seed)))
            scope = None if planted.hunt is None else planted.hunt.scope
            return Rate(fault, planted.finder, scope, tuple(sightings))

        yield from filter(None, threads.map(rate, faults))


def _settled(sightings: Sequence[Sighting], examples: int) -> bool:
    amounts = [sighting.amount for sighting in sightings]
    return all(sighting.found for sighting in sightings) and median(amounts) <= examples / 10


def page_of(rated: Sequence[Rate], examples: int) -> str:
    """The result file, Markdown, the slowest to be found first."""
    enough = sum(rate.suffices for rate in rated)
    lines = [
        "# How often planted faults are found",
        "",
        "Written by `kvproof fuzz --planted all --seeds N`. Each fault was looked for from the seeds 0, 1, ... with at",
        f"most {examples:,} examples each: from all N if one of the first {FEW} missed it or took over a tenth of that",
        f"in the median, else from {FEW}. {enough} of {len(rated)} faults were found from {REQUIRED:.0%} of them.",
        "",
        "| fault | found by | seeds | found | median | most | explorer, scope |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {rate.fault} | {rate.finder} | {len(rate.sightings)} | {rate.found} | {median(rate.examples):,.0f} "
        f"| {rate.examples[-1]:,} | {rate.scope or ''} |"
        for rate in sorted(rated, key=lambda rate: (-median(rate.examples), rate.fault))
    ]
    return "\n".join(lines) + "\n"
