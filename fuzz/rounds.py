"""The two things a campaign is made of: one exploration of a scope, one round of random examples.

Both are functions from plain data to plain data, so that they can run in another process.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any
from unittest import SkipTest

from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.reporting import with_reporter
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test
from hypothesis.statistics import collector

from kvproof.fuzz.abstract import abstraction
from kvproof.fuzz.counting import Tally, counted
from kvproof.fuzz.explore import HASHES, explore
from kvproof.fuzz.spec.scopes import Graph, scope_named
from kvproof.fuzz.targets import MACHINES, load

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ExploreJob:
    """Visit every state of a scope, within `seconds` if given."""

    scope: str
    hash: str = "Perfect"
    fault: str | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RoundJob:
    """`examples` random examples of up to `steps` rules of a machine.

    machine   its name in `kvproof.fuzz.targets`
    engine    what draws them: "hypothesis", or "atheris", which ends after `seconds` if that is sooner
    target    "module:Class" of the foreign code that the machine is to drive
    known     the checks of a foreign target that are left out
    replay    run what is saved in the corpus instead of drawing anything
    fault     planted in our own code meanwhile
    """

    machine: str
    engine: str = "hypothesis"
    seed: int = 0
    examples: int = 100
    seconds: float | None = None
    steps: int = 30
    shrink: bool = True
    replay: bool = False
    corpus: str | None = None
    target: str | None = None
    known: Sequence[str] = ()
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class CheckJob:
    """Look for a planted fault of an attention backend."""

    fault: str
    examples: int
    seed: int


@dataclass(slots=True)
class Round:
    """What a round did. `program` is the shrunk failing example, a line for each call."""

    examples: int
    invalid: int
    rules: dict[str, int]
    invariants: dict[str, int]
    events: dict[str, int]
    states: list[int]
    seconds: float
    slowest: list[tuple[float, list[str]]]
    error: str | None = None
    program: list[str] = field(default_factory=list)


class OutOfTime(Exception):
    """Ends an exploration."""


def planted(name: str | None) -> AbstractContextManager[None]:
    from kvproof.fuzz.catalogue import fault_named  # it names every machine's faults, attention's too

    return nullcontext() if name is None else fault_named(name).fault.planted()


def run_explore(job: ExploreJob, on_progress: Callable[[Answer], object]) -> Answer:
    scope, started = scope_named(job.scope), monotonic()
    reached = Graph(1, 0, 1)

    def tell(graph: Graph) -> None:
        nonlocal reached
        reached = graph
        on_progress({"scope": job.scope, "states": graph.states})
        if job.seconds is not None and monotonic() - started > job.seconds:
            raise OutOfTime

    answer: Answer = {"scope": job.scope, "hash": job.hash, "known": scope.graph._asdict(), "complete": False}
    violation, trace = None, list[str]()
    try:
        with planted(job.fault):
            found = explore(scope, HASHES[job.hash], max_transitions=scope.graph.transitions + 1, on_progress=tell)
        reached, violation = found.graph, found.violation
        trace = [repr(tuple(action)) for action in found.trace]
        if violation is None and reached != scope.graph:
            violation = f"not the design's graph: {tuple(reached)}, the design has {tuple(scope.graph)}"
        answer["complete"] = violation is None
    except OutOfTime:
        pass
    reached_so_far = {**reached._asdict(), "violation": violation, "trace": trace}
    return {**answer, **reached_so_far, "seconds": monotonic() - started}


def run_round(job: RoundJob) -> Answer:
    started = perf_counter()
    tally = Tally()
    corpus = Path(job.corpus, job.machine) if job.corpus else None  # Hypothesis takes all machines for one test
    search = (Phase.reuse,) if job.replay else (Phase.generate,)
    configured = settings(
        max_examples=job.examples,
        stateful_step_count=job.steps,
        phases=(*search, Phase.shrink) if job.shrink else search,
        database=DirectoryBasedExampleDatabase(corpus / "examples") if corpus else None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType] - its metaclass confuses it
    )
    machine = machine_of(job.machine, job.target, tuple(job.known))
    test: Any = get_state_machine_test(counted(machine, tally, abstraction(job.machine, machine)), settings=configured)
    test._hypothesis_internal_use_seed = job.seed  # what @seed does, which would also take the database away
    if job.engine == "atheris" and not job.replay:
        from kvproof.fuzz.guided import run_guided

        return run_guided(job, test, tally)  # pyright: ignore[reportArgumentType] - by folder, it sees this class twice
    collecting: Any = collector  # typed as if it could only hold None
    statistics: list[Any] = []
    error: Exception | None = None
    with planted(job.fault), with_reporter(lambda text: None), collecting.with_value(statistics.append):
        try:
            test()
        except SkipTest:
            pass  # nothing is saved in the corpus
        except Exception as raised:
            error = raised
    cases = [case for phases in statistics for case in _phase(phases, "reuse" if job.replay else "generate")]
    events = Counter(
        event
        for case in cases
        for event in case["events"]
        if not event.startswith("Retried draw")  # Hypothesis's own
    )
    done = Round(
        examples=len(cases),
        invalid=sum(case["status"] in ("invalid", "overrun") for case in cases),
        rules=dict(tally.rules),
        invariants=dict(tally.invariants),
        events=dict(events),
        states=list(tally.states),
        seconds=perf_counter() - started,
        slowest=tally.slowest,
    )
    if error is not None:
        done.error = told(error)
        done.program = program_of(error)
    return asdict(done)


def _phase(phases: Any, name: str) -> list[Any]:
    return list(phases.get(f"{name}-phase", {}).get("test-cases", ()))


def run_check(job: CheckJob) -> Answer:
    """The conformance check that is there for an attention backend's fault, on the backend that has it."""
    from kvproof.fuzz.catalogue import fault_named
    from kvproof.fuzz.conformance.attention import checks
    from kvproof.fuzz.conformance.report import Effort

    fault: Any = fault_named(job.fault).fault
    name = fault.noticed_by.__name__.replace("_", " ")
    (check,) = (check for check in checks(fault.backend) if check.name == name)
    with fault.planted(), with_reporter(lambda text: None):
        result = check.run(Effort(job.examples, job.seed, shrink=False))
    error = None if result.error is None else told(result.error)
    return {"examples": result.examples, "seconds": result.seconds, "error": error}


def machine_of(name: str, target: str | None, known: tuple[str, ...]) -> type[RuleBasedStateMachine]:
    """The machine called `name`, or the one that drives the foreign `target`."""
    if target is not None:
        from kvproof.fuzz.adapters import machine_for

        return machine_for(target, known)
    machine: type[RuleBasedStateMachine] = load(MACHINES[name].path)
    return machine


def told(error: BaseException) -> str:
    """One line: what was raised, and for an assertion that says nothing, which it was."""
    message = " ".join(str(error).split())
    if not message and (frames := traceback.extract_tb(error.__traceback__)):
        message = frames[-1].line or ""
    return f"{type(error).__name__}: {message}"


def program_of(error: BaseException) -> list[str]:
    """The lines of the failing example that Hypothesis has noted on `error`."""
    lines = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
    return [line for line in lines if line.startswith("state")]
