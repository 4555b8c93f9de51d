"""A campaign: the explorer at every scope, then rounds of random examples for each machine, in several processes.

With a number of examples, a campaign is a function of its plan and the code: every round has a seed of its own, derived
from the campaign's, so that it does not matter which process runs it. With a time limit, how many rounds there are
depends on the machine, and each of them is still the same.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from kvproof.fuzz.measure import combined
from kvproof.fuzz.plan import Plan, seed_of
from kvproof.fuzz.processes import Job, Worker

ROUND = 100
"""Examples in a round."""

MEASURED = 3
"""Coverage is measured in the first three rounds of a machine and in every third one after. Measuring takes more than
half of such a round's time."""

ENDLESS = 10**12
"""Examples in a round that ends by time alone."""

SECONDS_PER_ROUND = 2.0
"""How long a round takes at most when time is limited, as far as the ones before it tell."""


@dataclass(slots=True)
class MachineResult:
    """The sum of a machine's rounds, up to and with the first that failed.

    `growth` has the distinct states after so many examples, round by round. `slowest` are examples with their seconds.
    """

    machine: str
    rounds: int = 0
    examples: int = 0
    invalid: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    invariants: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    growth: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0
    slowest: list[tuple[float, list[str]]] = field(default_factory=list)
    error: str | None = None
    program: list[str] = field(default_factory=list)

    @property
    def states(self) -> int:
        return self.growth[-1][1] if self.growth else 0


@dataclass(slots=True)
class Result:
    """`explored` has the answer of `run_explore` for each scope that was begun, in the plan's order."""

    explored: list[dict[str, Any]]
    machines: list[MachineResult]
    coverage: dict[str, Any] | None
    seconds: float

    @property
    def failed(self) -> bool:
        return any(scope["violation"] for scope in self.explored) or any(m.error for m in self.machines)


class Campaign:
    """One run of a plan. `progress` is the state so far, for whoever wants to show it, and told after every answer."""

    def __init__(self, plan: Plan, on_progress: Callable[[Progress], object] = lambda progress: None) -> None:
        self.plan = plan
        self.progress = Progress()
        self._on_progress = on_progress
        self._lock = Lock()
        self._answers: dict[tuple[str, int], dict[str, Any]] = {}
        self._corpus = plan.corpus
        self._failed: dict[str, int] = {}  # the first round of a machine that failed
        self._jobs = self._plan_jobs()
        self._started = monotonic()

    def run(self) -> Result:
        """Raises `WorkerCrashed`."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(self.plan.jobs) as threads:
            if self.plan.engine == "atheris" and self._corpus is None:
                self._corpus = folder  # it works by keeping examples, if only for now
            workers = [threads.submit(self._work, Path(folder, f"coverage.{i}")) for i in range(self.plan.jobs)]
            for worker in workers:
                worker.result()
            coverage = combined(Path(folder), self.plan.machines) if self.plan.packages else None
        return Result(
            [self._answers["explore", i] for i in range(len(self.plan.scopes)) if ("explore", i) in self._answers],
            [self._sum(machine) for machine in self.plan.machines],
            coverage,
            monotonic() - self._started,
        )

    # ---- what to do next

    def _plan_jobs(self) -> Iterator[tuple[tuple[str, int], Job]]:
        plan = self.plan
        for i, scope in enumerate(plan.scopes):
            seconds = None if plan.seconds is None else plan.seconds / 2 - self._elapsed
            if seconds is None or seconds > 0:
                yield ("explore", i), ("explore", {"scope": scope, "fault": plan.fault, "seconds": seconds})
        if plan.corpus is not None:
            for machine in plan.machines:
                yield (machine, -1), self._round(machine, -1, ROUND)
        if plan.engine == "atheris":
            yield from self._guided_rounds()
        else:
            yield from self._counted_rounds() if plan.seconds is None else self._timed_rounds(plan.seconds)

    def _guided_rounds(self) -> Iterator[tuple[tuple[str, int], Job]]:
        """One for each machine: it begins with all that is in the corpus, so that short ones would do nothing else."""
        for done, machine in enumerate(self.plan.machines):
            if self.plan.seconds is None:
                yield (machine, 0), self._round(machine, 0, self.plan.examples or 0)
            else:
                left = math.ceil((len(self.plan.machines) - done) / self.plan.jobs)
                seconds = max(1.0, (self.plan.seconds - self._elapsed) / left)
                yield (machine, 0), self._round(machine, 0, ENDLESS, seconds)

    def _counted_rounds(self) -> Iterator[tuple[tuple[str, int], Job]]:
        for machine in self.plan.machines:
            left, number = self.plan.examples or 0, 0
            while left > 0 and machine not in self._failed:
                yield (machine, number), self._round(machine, number, min(ROUND, left))
                left, number = left - ROUND, number + 1

    def _timed_rounds(self, seconds: float) -> Iterator[tuple[tuple[str, int], Job]]:
        """The machine that has had the least time is next."""
        issued = Counter[str]()
        while left := max(0.0, seconds - self._elapsed):
            spent = {machine: self._spent(machine) for machine in self.plan.machines if machine not in self._failed}
            if not spent:
                return
            machine = min(spent, key=lambda name: (spent[name][0], issued[name]))
            took, examples = spent[machine]
            rate = examples / took if took else ROUND / 4 / SECONDS_PER_ROUND
            n = max(10, min(5 * ROUND, round(rate * min(SECONDS_PER_ROUND, left))))
            yield (machine, issued[machine]), self._round(machine, issued[machine], n)
            issued[machine] += 1

    def _round(self, machine: str, number: int, examples: int, seconds: float | None = None) -> Job:
        plan = self.plan
        return "round", {
            "machine": machine,
            "engine": plan.engine,
            "seed": seed_of(plan, machine, number),
            "examples": examples,
            "seconds": seconds,
            "steps": plan.steps,
            "replay": number < 0,
            "corpus": self._corpus,
            "target": plan.target,
            "known": plan.known,
            "fault": plan.fault,
        }

    @property
    def _elapsed(self) -> float:
        return monotonic() - self._started

    def _spent(self, machine: str) -> tuple[float, int]:
        rounds = [answer for (name, _), answer in self._answers.items() if name == machine]
        return sum(answer["seconds"] for answer in rounds), sum(answer["examples"] for answer in rounds)

    # ---- workers

    def _work(self, data: Path) -> None:
        with Worker(self.plan, data) as worker:
            while (following := self._next()) is not None:
                (name, number), job = following
                self._record(
                    (name, number),
                    worker.ask(
                        job,
                        measured=name != "explore" and (number < MEASURED or number % MEASURED == 0),
                        on_progress=self._tell,
                    ),
                )

    def _next(self) -> tuple[tuple[str, int], Job] | None:
        with self._lock:
            return next(self._jobs, None)

    def _record(self, place: tuple[str, int], answer: dict[str, Any]) -> None:
        with self._lock:
            self._answers[place] = answer
            machine, number = place
            if answer.get("error"):
                self._failed[machine] = min(number, self._failed.get(machine, number))
            if machine == "explore":
                self.progress.explored[answer["scope"]] = answer["states"]
            else:
                self.progress.add_round(machine, answer)
        self._tell({})

    def _tell(self, told: dict[str, Any]) -> None:
        if "scope" in told:
            self.progress.explored[told["scope"]] = told["states"]
        if "branches" in told:
            self.progress.branches = max(told["branches"], self.progress.branches or 0.0)
        self.progress.seconds = self._elapsed
        self._on_progress(self.progress)

    # ---- the end

    def _sum(self, machine: str) -> MachineResult:
        last = self._failed.get(machine)
        total, states = MachineResult(machine), set[int]()
        for (name, number), answer in sorted(self._answers.items()):
            if name != machine or (last is not None and number > last):
                continue
            total.rounds += 1
            total.examples += answer["examples"]
            total.invalid += answer["invalid"]
            total.seconds += answer["seconds"]
            for counter in ("rules", "invariants", "events"):
                getattr(total, counter).update(answer[counter])
            states.update(answer["states"])
            total.growth.append((total.examples, len(states)))
            slowest = total.slowest + [(seconds, steps) for seconds, steps in answer["slowest"]]
            total.slowest = sorted(slowest, key=lambda slow: -slow[0])[:5]
            total.error, total.program = answer["error"], answer["program"]
        return total


@dataclass(slots=True)
class Progress:
    """What can be told while a campaign runs. `searching` are the seconds that rounds took, `branches` a share."""

    seconds: float = 0.0
    searching: float = 0.0
    branches: float | None = None
    examples: int = 0
    rules: int = 0
    explored: dict[str, int] = field(default_factory=dict)
    states: dict[str, set[int]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def add_round(self, machine: str, answer: dict[str, Any]) -> None:
        self.examples += answer["examples"]
        self.searching += answer["seconds"]
        self.rules += sum(answer["rules"].values())
        self.states.setdefault(machine, set()).update(answer["states"])
        if answer["error"]:
            self.failed.add(machine)
