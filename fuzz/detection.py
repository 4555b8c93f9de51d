"""How often the random machines find each planted fault: the same hunt from many seeds, each to its first failure.

Where a machine finds a fault after `m` examples in the median, it misses it in `n` about once in 2 ** (n / m) times. So
`FEW` seeds are enough where each of them found it and the median is below a tenth of what is allowed; the others get
all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from shlex import quote
from statistics import median
from typing import Any

from kvproof.fuzz.catalogue import fault_named
from kvproof.fuzz.hunt import Sighting, explored, sight, workers
from kvproof.fuzz.plan import Engine, Plan

FEW = 20
REQUIRED = 0.95
"""The share of seeds from which a fault has to be found."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What came of looking for one fault from the seeds 0, 1, ..., and once by the explorer where that can find it."""

    fault: str
    finder: str | None
    sightings: tuple[Sighting, ...]
    scope: str | None
    explorer: Sighting | None

    @property
    def found(self) -> int:
        return sum(sighting.found for sighting in self.sightings)

    @property
    def examples(self) -> list[int]:
        """How many each of the seeds took, in ascending order."""
        return sorted(sighting.amount for sighting in self.sightings)

    @property
    def suffices(self) -> bool:
        by_explorer = self.explorer is None or self.explorer.found
        return bool(self.sightings or self.explorer) and by_explorer and self.found >= REQUIRED * len(self.sightings)

    def as_json(self) -> dict[str, Any]:
        middle = median(self.examples) if self.sightings else None
        return {**asdict(self), "found": self.found, "median": middle, "suffices": self.suffices}


def rates(
    faults: Iterable[str], *, seeds: int, examples: int, jobs: int = 1, engine: Engine = "hypothesis"
) -> Iterator[Rate]:
    """The rate of each fault, in their order. Raises `WorkerCrashed`."""
    plan = Plan(machines=(), examples=examples, jobs=jobs, engine=engine)
    with workers(plan) as ask, ThreadPoolExecutor(jobs) as threads:

        def rate(fault: str) -> Rate:
            scope, by_explorer = explored(ask, fault)
            finder = fault_named(fault).finder
            sightings: list[Sighting] = []
            for seed in range(seeds):
                if finder is None or (seed == FEW and _settled(sightings, examples)):
                    break
                sightings.append(sight(ask, fault, finder, replace(plan, seed=seed)))
            return Rate(fault, finder, tuple(sightings), scope, by_explorer)

        yield from threads.map(rate, faults)


def _settled(sightings: Sequence[Sighting], examples: int) -> bool:
    amounts = [sighting.amount for sighting in sightings]
    return all(sighting.found for sighting in sightings) and median(amounts) <= examples / 10


def page_of(rated: Sequence[Rate], *, planted: str, seeds: int, examples: int) -> str:
    """The result file of `--planted` and `--seeds`, Markdown, the slowest to be found first."""
    tries = [sighting for rate in rated for sighting in rate.sightings]
    found, enough = sum(sighting.found for sighting in tries), sum(rate.suffices for rate in rated)
    columns = "fault", "found by", "of seeds", "examples, median", "most", "seconds, most", "scope", "transitions", "s"
    odds = f"within {examples // 10:,}: one in a thousand misses it then."
    few = f"{FEW} seeds had to do where each found it, in the median {odds}"
    lines = [
        "# How often planted faults are found",
        "",
        f"Written by `kvproof fuzz --planted {quote(planted)} --seeds {seeds}`. Each fault was looked for from seeds",
        f"0 to {seeds - 1}, up to the first failure and for at most {examples:,} examples each time.",
        *([few] if seeds > FEW else []),
        "The explorer looked for it once, where one of its scopes can show it.",
        f"{found:,} of {len(tries):,} searches found theirs. {enough} of {len(rated)} faults were found as often as",
        f"they have to be, from {REQUIRED:.0%} of their seeds, and by the explorer.",
        "",
        f"| {' | '.join(columns)} |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    by_amount = sorted(rated, key=lambda rate: (-median(rate.examples or [0]), rate.fault))
    lines += [f"| {' | '.join((rate.fault, *_at_random(rate), *_explored(rate)))} |" for rate in by_amount]
    return "\n".join(lines) + "\n"


def _at_random(rate: Rate) -> tuple[str, ...]:
    if rate.finder is None:
        return ("",) * 5
    amounts, slowest = rate.examples, max(sighting.seconds for sighting in rate.sightings)
    of_seeds = f"{rate.found} of {len(amounts)}"
    return rate.finder, of_seeds, f"{median(amounts):,.0f}", f"{amounts[-1]:,}", f"{slowest:.1f}"


def _explored(rate: Rate) -> tuple[str, ...]:
    if rate.explorer is None:
        return ("",) * 3
    transitions = f"{rate.explorer.amount:,}" if rate.explorer.found else "MISSED"
    return rate.scope or "", transitions, f"{rate.explorer.seconds:.1f}"
