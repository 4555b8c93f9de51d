"""Plants each fault of the catalogue in turn, and tells what noticed it, after how much.

The explorer looks where it is known to find the fault, the machine or the conformance check from a seed that it was not
tuned for. Nothing is shrunk: the question is whether, not how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from kvproof.fuzz.catalogue import CONFORMANCE, fault_named
from kvproof.fuzz.plan import Engine, Plan, seed_of
from kvproof.fuzz.processes import Job, Worker

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


Ask = Callable[[Job], dict[str, Any]]


@contextmanager
def workers(plan: Plan) -> Iterator[Ask]:
    """A function that has a job done by the next of the plan's processes that is free. Raises `WorkerCrashed`."""
    free: SimpleQueue[Worker] = SimpleQueue()
    for _ in range(plan.jobs):
        free.put(Worker(plan, Path()))

    def ask(job: Job) -> dict[str, Any]:
        worker = free.get()
        try:
            return worker.ask(job)
        finally:
            free.put(worker)

    try:
        yield ask
    finally:
        while not free.empty():
            free.get().close()


def hunt(
    faults: Iterable[str], *, seed: int, examples: int, jobs: int = 1, engine: Engine = "hypothesis"
) -> Iterator[Find]:
    """One find for each fault, in their order; `examples` is the most a machine gets. Raises `WorkerCrashed`."""
    plan = Plan(machines=(), seed=seed, examples=examples, jobs=jobs, engine=engine)
    with workers(plan) as ask, ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(lambda fault: _find(ask, fault, plan), faults)


def _find(ask: Ask, name: str, plan: Plan) -> Find:
    planted = fault_named(name)
    scope, by_explorer = explored(ask, name)
    by_finder = None if planted.finder is None else sight(ask, name, planted.finder, plan)
    return Find(name, planted.fault.why, planted.finder, by_finder, scope, by_explorer)


def explored(ask: Ask, fault: str) -> tuple[str | None, Sighting | None]:
    """The scope in which the explorer finds a fault, and what it saw there; two Nones where no scope can show it."""
    hunt = fault_named(fault).hunt
    if hunt is None:
        return None, None
    answer = ask(("explore", {"scope": hunt.scope, "hash": hunt.hash, "fault": fault}))
    return hunt.scope, Sighting(answer["transitions"], round(answer["seconds"], 2), answer["violation"])


def sight(ask: Ask, fault: str, finder: str, plan: Plan) -> Sighting:
    """Look for a fault at random, by the plan's engine and from its seed."""
    common = {"fault": fault, "examples": plan.examples, "seed": seed_of(plan, finder, 0)}
    if finder == CONFORMANCE:
        answer = ask(("check", common))
    else:
        settings = {"machine": finder, "engine": plan.engine, "steps": STEPS, "shrink": False}
        answer = ask(("round", {**common, **settings}))
    return Sighting(answer["examples"], round(answer["seconds"], 2), answer["error"])


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
