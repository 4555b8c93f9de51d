"""Plants each fault of the catalogue in turn, and tells what noticed it, after how much.

The explorer looks where it is known to find the fault, the machine or the conformance check from a seed that it was not
tuned for. Nothing is shrunk: the question is whether, not how.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from kvproof.fuzz.campaign import Job, Plan, Worker, seed_of
from kvproof.fuzz.catalogue import CONFORMANCE, fault_named

if TYPE_CHECKING:
    from rich.table import Table

DOES_NOT_RUN = ("NameError", "AttributeError", "TypeError")
"""What a replacement raises that is not a fault but a mistake in the catalogue."""

STEPS = 50


@dataclass(frozen=True, slots=True)
class Sighting:
    """`amount` is examples or transitions. `error` is what was noticed, None for nothing."""

    amount: int
    seconds: float
    error: str | None

    @property
    def found(self) -> bool:
        return self.error is not None and not self.error.startswith(DOES_NOT_RUN)


@dataclass(frozen=True, slots=True)
class Find:
    """What came of one fault. `finder` is a machine or the conformance checks; a side that can't find it is None."""

    fault: str
    why: str
    finder: str | None
    examples: Sighting | None
    scope: str | None
    explorer: Sighting | None

    @property
    def found(self) -> bool:
        """By every side that the catalogue says can find it."""
        sides = [side for side in (self.examples, self.explorer) if side is not None]
        return bool(sides) and all(side.found for side in sides)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "found": self.found}


def hunt(faults: Iterable[str], *, seed: int, examples: int, jobs: int = 1) -> Iterator[Find]:
    """One find for each fault, in their order; `examples` is the most a machine gets. Raises `WorkerCrashed`."""
    workers: SimpleQueue[Worker] = SimpleQueue()
    plan = Plan(machines=(), seed=seed)
    for _ in range(jobs):
        workers.put(Worker(plan, Path()))

    def find(fault: str) -> Find:
        worker = workers.get()
        try:
            return _find(worker, plan, fault, examples)
        finally:
            workers.put(worker)

    try:
        with ThreadPoolExecutor(jobs) as threads:
            yield from threads.map(find, faults)
    finally:
        while not workers.empty():
            workers.get().close()


def _find(worker: Worker, plan: Plan, name: str, examples: int) -> Find:
    planted = fault_named(name)
    scope, by_explorer, by_finder = None, None, None
    if planted.hunt is not None:
        scope = planted.hunt.scope
        answer = worker.ask(("explore", {"scope": scope, "hash": planted.hunt.hash, "fault": name}))
        by_explorer = Sighting(answer["transitions"], round(answer["seconds"], 2), answer["violation"])
    if planted.finder is not None:
        answer = worker.ask(_job(planted.finder, name, examples, seed_of(plan, planted.finder, 0)))
        by_finder = Sighting(answer["examples"], round(answer["seconds"], 2), answer["error"])
    return Find(name, planted.fault.why, planted.finder, by_finder, scope, by_explorer)


def _job(finder: str, fault: str, examples: int, seed: int) -> Job:
    common = {"fault": fault, "examples": examples, "seed": seed}
    if finder == CONFORMANCE:
        return "check", common
    return "round", {**common, "machine": finder, "steps": STEPS, "shrink": False}


def table_of(finds: Iterable[Find]) -> Table:
    """The finds for a terminal."""
    from rich.table import Table

    table = Table("fault", "scope", box=None, header_style="bold", pad_edge=False)
    for column in ("transitions", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("found by")
    for column in ("examples", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("")
    for find in finds:
        table.add_row(
            find.fault,
            find.scope or "",
            *_cells(find.explorer),
            find.finder or "",
            *_cells(find.examples),
            "" if find.found else "[bold red]MISSED[/]",
        )
    return table


def _cells(sighting: Sighting | None) -> tuple[str, str]:
    return ("", "") if sighting is None else (f"{sighting.amount:,}", f"{sighting.seconds:.1f}")
