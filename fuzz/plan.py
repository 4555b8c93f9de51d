"""What a campaign is to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import xxhash

from kvproof.fuzz.targets import MACHINES

Engine = Literal["hypothesis", "atheris"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run: `examples` for each machine, or everything for `seconds`, half of it at most for the explorer.

    engine    what draws random examples: "hypothesis", or "atheris", guided by the coverage of the code under test
    packages  whose coverage is measured; none when the package coverage is missing
    target    foreign code for the machine, "module:Class", and `known`, the checks that it is known to fail
    fault     planted in our own code
    """

    machines: tuple[str, ...]
    scopes: tuple[str, ...] = ()
    examples: int | None = None
    seconds: float | None = None
    seed: int = 0
    engine: Engine = "hypothesis"
    jobs: int = 1
    steps: int = 30
    corpus: str | None = None
    packages: tuple[str, ...] = ()
    target: str | None = None
    known: tuple[str, ...] = ()
    fault: str | None = None

    @property
    def guides(self) -> tuple[str, ...]:
        """The packages whose coverage guides the examples."""
        if self.engine == "hypothesis":
            return ()
        if self.target is not None:
            return (self.target.partition(":")[0].partition(".")[0],)
        return tuple(sorted({MACHINES[machine].package for machine in self.machines} or {"kvproof.allocator"}))


def seed_of(plan: Plan, machine: str, number: int) -> int:
    """The seed of a machine's round; the corpus is round -1."""
    return xxhash.xxh3_64_intdigest(f"{plan.seed}/{machine}/{number}".encode())
