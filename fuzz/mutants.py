"""Mutation testing of allocator/: `python -m kvproof.fuzz.mutants [MODULE ...]`.

Each mutant runs in a process forked from one that has imported the test tools and nothing of the allocator. There the
mutated module takes the place of the real one, in memory, and has to get past the unit tests and the explorer. A mutant
that does has to be listed in `EQUIVALENT` with the reason why nobody could tell it from the original.

Not mutmut, which runs a copy of the sources and neither follows a package that is mapped to another folder, as ours
are, nor leaves functions whose source the planted faults could still be applied to.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType

from kvproof.fuzz.equivalent_mutants import EQUIVALENT
from kvproof.fuzz.mutate import Mutant, mutants

NOT_MUTATED = ("__init__", "replay", "traces")
SCOPES = ("orphans", "pins")
CPU_SECONDS = 40
MEMORY = 4 << 30
"""Limits of the process that tries a mutant: one that loops for ever, or takes all there is, counts as killed."""

FOREIGN = re.compile(r"kvproof\.(attention|backend|cli|fuzz)|import torch|transformers")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`killed_by` names the stage, or "limits"; None for a survivor."""

    mutant: Mutant
    killed_by: str | None


class _Finder:
    """Imports one module from a changed syntax tree, and leaves its source where `inspect` looks for it."""

    def __init__(self, name: str, file: Path, mutant: Mutant) -> None:
        self._name, self._file, self._mutant = name, file, mutant

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        mutant = self._mutant

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                return compile(mutant.tree, self.path, "exec")

        return spec_from_file_location(name, self._file, loader=Loader(name, str(self._file)))


Stages = dict[str, Callable[[], bool]]


def start(mutant: Mutant, file: Path, stages: Stages) -> int:
    """The number of a process that runs the stages on `mutant`, and ends with the number of the first that notices."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os._exit(_noticed_by(mutant, file, list(stages.values())))
    return child


def verdict_on(mutant: Mutant, status: int, stages: Stages) -> Verdict:
    code = os.waitstatus_to_exitcode(status)
    return Verdict(mutant, None if code == 0 else "limits" if code < 0 else list(stages)[code - 1])


def _noticed_by(mutant: Mutant, file: Path, stages: Iterable[Callable[[], bool]]) -> int:
    """The number of the first stage that fails, from 1; 0 when all pass."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    sys.meta_path.insert(0, _Finder(f"kvproof.allocator.{mutant.module}", file, mutant))
    for number, passes in enumerate(stages, 1):
        try:
            passed = passes()
        except BaseException:  # a mutant may raise anything, SystemExit included
            passed = False
        if not passed:
            return number
    return 0


def unit_tests(root: Path, module: str) -> list[str]:
    """The unit tests of the allocator that need nothing else, the module's own first."""
    files = [file for file in sorted(root.glob("tests/unit/test_*.py")) if not FOREIGN.search(file.read_text("utf-8"))]
    return [str(file) for file in sorted(files, key=lambda file: file.name != f"test_{module}.py")]


def run_tests(files: Sequence[str]) -> bool:
    import pytest

    return pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *files]) == 0


def run_explorer() -> bool:
    from kvproof.fuzz.explore import Exploration, explore
    from kvproof.fuzz.spec.scopes import scope_named

    for name in SCOPES:
        scope = scope_named(name)
        if explore(scope, max_transitions=scope.graph.transitions + 1) != Exploration(scope.graph):
            return False
    return True


def run(root: Path, modules: Iterable[str], jobs: int) -> Iterator[Verdict]:
    """Judge every mutant of the modules; the verdicts come as they are reached."""
    import hypothesis.stateful
    import pytest

    assert hypothesis.stateful  # both imported before the forks, which need not do it then
    assert pytest
    assert "kvproof.allocator" not in sys.modules, "the allocator has to be imported in the forks"
    running: dict[int, tuple[Mutant, Stages]] = {}
    for module in modules:
        file, tests = root / "allocator" / f"{module}.py", unit_tests(root, module)
        stages: Stages = {"unit tests": partial(run_tests, tests), "explorer": run_explorer}
        for mutant in mutants(module, file.read_text("utf-8")):
            running[start(mutant, file, stages)] = mutant, stages
            if len(running) == jobs:
                yield _next(running)
    while running:
        yield _next(running)


def _next(running: dict[int, tuple[Mutant, Stages]]) -> Verdict:
    """Waits for one of `running` to end, and takes it out."""
    child, status = os.wait()
    mutant, stages = running.pop(child)
    return verdict_on(mutant, status, stages)


def page_of(verdicts: Sequence[Verdict]) -> str:
    """The result file, Markdown."""
    lines = [
        "# Mutants of allocator/",
        "",
        "Written by `python -m kvproof.fuzz.mutants`. A mutant is one small change, and killed when the unit tests of",
        f"the allocator or the explorer (scopes {', '.join(SCOPES)}) notice it, or when it takes {CPU_SECONDS} s.",
        "",
        "| module | mutants | by unit tests | by the explorer | limits | survive |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for module in dict.fromkeys(verdict.mutant.module for verdict in verdicts):
        by = Counter(verdict.killed_by for verdict in verdicts if verdict.mutant.module == module)
        lines.append(
            f"| {module} | {by.total()} | {by['unit tests']} | {by['explorer']} | {by['limits']} | {by[None]} |"
        )
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
    verdicts = []
    for verdict in run(root, args.modules or known, args.jobs):
        verdicts.append(verdict)
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{len(verdicts)} mutants, in {verdict.mutant.module}\x1b[K")
    page = page_of(verdicts)
    sys.stdout.write(page)
    if args.report is not None:
        args.report.write_text(page, encoding="utf-8")
    return 1 if any(v.killed_by is None and v.mutant.name not in EQUIVALENT for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
