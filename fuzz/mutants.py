"""Mutation testing of allocator/: `python -m kvproof.fuzz.mutants [MODULE ...]`.

Each mutant runs in a fork of its own, and has to get past the unit tests, a machine, the explorer, and then machine and
tests with the compiled loops. One that does has to be listed in `EQUIVALENT` with the reason why nobody could tell it
from the original; those that are listed are not tried.

Nearly all mutants are changes in functions. They run in forks of one process that has imported everything and collected
the tests, where every function of the module gets the code of its namesake in the mutant. The few others, changes of
constants and classes, run in forks of a process that has not imported the allocator, and does it from the mutant.

Not mutmut: it runs a copy of the sources and does not follow a package that is mapped to another folder, as ours are.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from kvproof.fuzz.equivalent_mutants import EQUIVALENT
from kvproof.fuzz.mutate import Mutant, mutants

if TYPE_CHECKING:
    import pytest

NOT_MUTATED = ("__init__", "replay", "traces")
TESTS = (
    "snapshot", "stats", "boundaries", "shared_blocks", "policy", "batch", "sequence", "audit", "manager", "pool",
    "threads", "field_failures", "hashing", "index", "events", "compat", "exception_safety", "loops",
)  # fmt: skip
"""Quick ones first: most mutants are killed by them. A module's own tests come before all."""

OF_COMPILED_LOOPS = "test_loops.py"
MACHINE = {"pool": "pool", "policy": "pool", "index": "index", "compat": "compat"}
"""The machine for a module's mutants, where it is not the manager's."""

EXAMPLES = 100
SCOPES = ("orphans", "pins")
STAGES = ("unit tests", "machine", "explorer", "compiled loops")
TEST_SECONDS, STAGE_SECONDS = 10, 30
MEMORY = 4 << 30
"""Limits of a single test, of a whole stage and of the process: a mutant that takes more counts as killed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`killed_by` is one of `STAGES`, or "limits"; None for a survivor."""

    mutant: Mutant
    killed_by: str | None


class Judge:
    """A pytest plugin that runs the tests it has collected not once but on every mutant, each in a fork.

    Without `mutants` it runs them on the code as it is, and `noticed` is the number of the first stage that fails, from
    1, or 0.
    """

    def __init__(self, module: str, mutants: Sequence[Mutant] | None, crew: Crew) -> None:
        self._module, self._mutants, self._crew = module, mutants, crew
        self.noticed = 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if self._mutants is None:
            self.noticed = noticed_by(session, self._module)
        functions = [f for f in _functions() if f.__globals__.get("__package__") == "kvproof.allocator"]
        gc.freeze()  # what a fork looks through for garbage, it copies
        for mutant in self._mutants or ():
            self._crew.start(mutant, partial(self._try, session, mutant, functions))
        return True

    def _try(self, session: pytest.Session, mutant: Mutant, functions: Sequence[FunctionType]) -> int:
        put_in_place(mutant, functions)
        return noticed_by(session, mutant.module)


class Crew:
    """Up to `jobs` forks at a time, and the verdicts so far."""

    def __init__(self, jobs: int, on_verdict: Callable[[Verdict], object]) -> None:
        self._jobs, self._on_verdict = jobs, on_verdict
        self._running: dict[int, Mutant] = {}
        self.verdicts: list[Verdict] = []

    def start(self, mutant: Mutant, judge: Callable[[], int]) -> None:
        """Have `judge` give the number of the stage that notices the mutant, in a process of its own."""
        while len(self._running) >= self._jobs:
            self.wait()
        self._running[forked(judge)] = mutant

    def wait(self) -> None:
        """For one of the forks to end."""
        child, status = os.wait()
        self.verdicts.append(Verdict(self._running.pop(child), killed_by(status)))
        self._on_verdict(self.verdicts[-1])

    def finish(self) -> None:
        while self._running:
            self.wait()


def forked(judge: Callable[[], int]) -> int:
    """The number of a process that ends with the number that `judge` gives."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            noticed = judge()
        except BaseException:  # a mutant may raise anything, when it is imported too
            noticed = 1
        os._exit(noticed)
    return child


def killed_by(status: int) -> str | None:
    code = os.waitstatus_to_exitcode(status)
    return None if code == 0 else "limits" if code < 0 else STAGES[code - 1]


def run(
    root: Path, modules: Iterable[str], jobs: int, on_verdict: Callable[[Verdict], object] = lambda verdict: None
) -> list[Verdict]:
    """Judge every mutant of the modules that is not listed as equivalent; those that are count as survivors.

    Raises `RuntimeError` if the code is noticed as it is: then everything would count as killed.
    """
    made = [m for module in modules for m in mutants(module, _file(root, module).read_text("utf-8"))]
    listed = [mutant for mutant in made if mutant.name in EQUIVALENT]
    tried = [mutant for mutant in made if mutant.name not in EQUIVALENT]
    crew = Crew(jobs, on_verdict)
    assert "kvproof.allocator" not in sys.modules, "the allocator has to be imported in the forks"
    _, status = os.waitpid(forked(partial(_import_and_judge, root, "", crew)), 0)
    if (stage := killed_by(status)) is not None:
        raise RuntimeError(f"the code fails without any mutant: {stage}")
    for mutant in tried:
        if not mutant.in_function:
            crew.start(mutant, partial(_import_and_judge, root, mutant.module, crew, mutant))
    crew.finish()
    run_tests(root, Judge("", [mutant for mutant in tried if mutant.in_function], crew))
    crew.finish()
    return crew.verdicts + [Verdict(mutant, None) for mutant in listed]


def _file(root: Path, module: str) -> Path:
    return root / "allocator" / f"{module}.py"


def _import_and_judge(root: Path, module: str, crew: Crew, mutant: Mutant | None = None) -> int:
    if mutant is not None:
        sys.meta_path.insert(0, _Finder(f"kvproof.allocator.{module}", _file(root, module), mutant))
    judge = Judge(module, None, crew)
    run_tests(root, judge)
    return judge.noticed


class _Finder:
    """Imports one module with a change."""

    def __init__(self, name: str, file: Path, mutant: Mutant) -> None:
        self._name, self._file, self._mutant = name, file, mutant

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        mutant = self._mutant

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                return mutant.change.compiled(self.path)

        return spec_from_file_location(name, self._file, loader=Loader(name, str(self._file)))


def put_in_place(mutant: Mutant, functions: Sequence[FunctionType]) -> None:
    """Give each of `functions` that is the mutated module's the code and the defaults that it has in the mutant."""
    name = f"kvproof.allocator.{mutant.module}"
    real, scratch = import_module(name), ModuleType(name)
    assert real.__file__ is not None
    compiled = set_compiled(None)  # importing a module may tell them of its classes
    sys.modules[name] = scratch  # dataclasses look for the module that they are made in
    exec(mutant.change.compiled(real.__file__), vars(scratch))
    sys.modules[name] = real
    set_compiled(compiled)
    changed = {_place(function): function for function in _functions() if function.__globals__ is vars(scratch)}
    for function in functions:
        if function.__globals__ is vars(real) and (namesake := changed.get(_place(function))) is not None:
            function.__code__ = namesake.__code__
            function.__defaults__, function.__kwdefaults__ = namesake.__defaults__, namesake.__kwdefaults__


def _functions() -> list[FunctionType]:
    return [thing for thing in gc.get_objects() if isinstance(thing, FunctionType)]


def _place(function: FunctionType) -> tuple[str, int]:
    return function.__qualname__, function.__code__.co_firstlineno


# ---- the stages


def run_tests(root: Path, plugin: object) -> None:
    """Collect the tests and let `plugin` run them. The machines' own tests have a stage for themselves."""
    import pytest

    files = [str(root / f"tests/unit/test_{name}.py") for name in TESTS]
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"  # for the tests' conftest: nothing is shrunk
    options = ["-o", "addopts=", "-p", "no:terminal", "-p", "no:cacheprovider", "--capture=no"]
    code = pytest.main([*options, "--import-mode=importlib", "-k", "not runTest", *files], plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"the tests can't be collected: {code!r}")


def noticed_by(session: pytest.Session, module: str) -> int:
    """The number of the first stage that fails, from 1; 0 when all pass."""
    compiled = set_compiled(None)
    tests = sorted(session.items, key=lambda item: item.path.name != f"test_{module}.py")
    plain = [test for test in tests if test.path.name != OF_COMPILED_LOOPS]
    again = [test for test in tests if "iterator" not in test.name]  # a parameter that has been used up

    def run_compiled() -> bool:
        set_compiled(compiled)
        return run_machine(module) and run_items(session, again)

    stages: tuple[Callable[[], bool], ...] = (
        partial(run_items, session, plain),
        partial(run_machine, module),
        run_explorer,
        run_compiled,
    )
    for number, passes in enumerate(stages, 1):
        try:
            limit(STAGE_SECONDS)
            passed = passes()
        except BaseException:
            passed = False
        if not passed:
            return number
    return 0


def set_compiled(loops: ModuleType | None) -> ModuleType | None:
    """Use these compiled loops, or none. Returns those that were used before."""
    module: Any = import_module("kvproof.allocator.loops")
    before: ModuleType | None = module.compiled
    module.compiled = loops
    return before


def limit(seconds: float) -> None:
    """End the process after so many seconds of its time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def run_items(session: pytest.Session, items: Sequence[pytest.Item]) -> bool:
    for item, following in pairwise([*items, None]):
        assert item is not None
        limit(TEST_SECONDS)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return False
    return True


def run_machine(module: str) -> bool:
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    from kvproof.fuzz.targets import MACHINES, load

    configured = settings(
        max_examples=EXAMPLES,
        stateful_step_count=50,
        phases=(Phase.generate,),
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType] - its metaclass confuses it
    )
    run_state_machine_as_test(load(MACHINES[MACHINE.get(module, "manager")].path), settings=configured)
    return True


def run_explorer() -> bool:
    from kvproof.fuzz.explore import Exploration, explore
    from kvproof.fuzz.spec.scopes import scope_named

    scopes = [scope_named(name) for name in SCOPES]
    return all(
        explore(scope, max_transitions=scope.graph.transitions + 1) == Exploration(scope.graph) for scope in scopes
    )


# ---- the command


def page_of(verdicts: Sequence[Verdict], seconds: float, jobs: int) -> str:
    """The result file, Markdown."""
    lines = [
        "# Mutants of allocator/",
        "",
        f"Written by `python -m kvproof.fuzz.mutants --jobs {jobs}`, which took {seconds:.0f} seconds. A mutant is one",
        "small change, and killed by what notices it first: the unit tests of the allocator,",
        f"{EXAMPLES} examples of a machine, the explorer (scopes {', '.join(SCOPES)}), or machine and tests once more",
        "with the compiled loops; or by taking too much time or memory. Survivors with a reason are listed",
        "as equivalent, and were not tried. The C code of the compiled loops is not mutated.",
        "",
        f"| module | mutants | {' | '.join(STAGES)} | limits | survive |",
        "| --- | --- |" + " --- |" * (len(STAGES) + 2),
    ]
    for module in sorted({verdict.mutant.module for verdict in verdicts}):
        by = [verdict.killed_by for verdict in verdicts if verdict.mutant.module == module]
        counts = [len(by), *map(by.count, (*STAGES, "limits", None))]
        lines.append(f"| {module} | {' | '.join(map(str, counts))} |")
    by = [verdict.killed_by for verdict in verdicts]
    lines.append(f"| all | {' | '.join(map(str, [len(by), *map(by.count, (*STAGES, 'limits', None))]))} |")
    survived = [verdict.mutant for verdict in verdicts if verdict.killed_by is None]
    survivors = sorted(survived, key=lambda mutant: (mutant.module, mutant.line))
    if survivors:
        lines += ["", "| survivor | line | why it is equivalent |", "| --- | --- | --- |"]
    for mutant in survivors:
        reason = EQUIVALENT.get(mutant.name, "**not explained**")
        lines.append(f"| `{mutant.name}` | {mutant.line} | {reason} |".replace("||", "\\|\\|"))
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a mutant survives that is not listed as equivalent."""
    root = Path(__file__).resolve().parents[1]
    known = [file.stem for file in sorted((root / "allocator").glob("*.py")) if file.stem not in NOT_MUTATED]
    parser = argparse.ArgumentParser(prog="python -m kvproof.fuzz.mutants", description="Mutation testing.")
    parser.add_argument("modules", nargs="*", choices=[*known, []], metavar="MODULE", help=f"of {', '.join(known)}")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the result file here")
    args = parser.parse_args(argv)
    num_judged = 0

    def tell(verdict: Verdict) -> None:
        nonlocal num_judged
        num_judged += 1
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{num_judged} mutants, in {verdict.mutant.module}\x1b[K")

    started = time.monotonic()
    verdicts = run(root, args.modules or known, args.jobs, tell)
    page = page_of(verdicts, time.monotonic() - started, args.jobs)
    sys.stdout.write(page)
    if args.report is not None:
        args.report.write_text(page, encoding="utf-8")
    return 1 if any(v.killed_by is None and v.mutant.name not in EQUIVALENT for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
