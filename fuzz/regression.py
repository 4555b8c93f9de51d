"""Failures as files: a runnable pytest module for each, that needs nothing of the campaign that found it."""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvproof.fuzz.abstract import digest
from kvproof.fuzz.campaign import MachineResult, Result
from kvproof.fuzz.explore import HASHES, Explorer
from kvproof.fuzz.plan import Plan
from kvproof.fuzz.rounds import machine_of
from kvproof.fuzz.spec.scopes import Graph, scope_named
from kvproof.fuzz.watchdog import NeverEnds


@dataclass(frozen=True, slots=True)
class Failure:
    """`file` is a test that fails; `confirmed` says that it was seen to."""

    found_by: str
    error: str
    steps: list[str]
    file: str
    replay: str
    confirmed: bool


LONGEST = 120
"""Seconds after which a test that still runs is taken for one that never ends."""

RUN_PLAINLY = "import runpy, sys; [f() for n, f in runpy.run_path(sys.argv[1]).items() if n.startswith('test_')]"

MACHINE_TEST = '''\
"""Found by {command}

{error}
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

{imports}


@settings(max_examples=1, database=None, deadline=None)
@given(st.none())  # one example, always the same: rules may record events, which takes a running test
def test_{name}(_: None) -> None:
{program}
'''

EXPLORER_TEST = '''\
"""Found by {command}

{error}
"""

from __future__ import annotations

from kvproof.fuzz.regression import replay_actions


def test_{name}() -> None:
    replay_actions(
        scope={scope!r},
        hash={hash!r},
        actions=[
{actions}
        ],
    )
'''


def save_program(folder: Path, plan: Plan, found: MachineResult, command: str) -> Path:
    """Write the failing example of a machine."""
    machine = machine_of(found.machine, plan.target, plan.known)
    module = vars(sys.modules[machine.__module__])
    names = _names_in("\n".join(found.program)) - {machine.__name__}
    imports = sorted(f"from {module[name].__module__} import {name}" for name in names)
    if plan.target is None:
        imports.append(f"from {machine.__module__} import {machine.__name__}")
    else:
        imports.append("from kvproof.fuzz.adapters import machine_for")
        imports.append(f"\n{machine.__name__} = machine_for({plan.target!r}, known={plan.known!r})")
    name = f"{found.machine}_{digest((found.program, plan.target, plan.known)):016x}"
    text = MACHINE_TEST.format(
        command=command,
        error=_quoted(found.error or ""),
        imports="\n".join(imports),
        name=name,
        program="\n".join(f"    {line}" for line in found.program),
    )
    return _write(folder, name, text)


def save_trace(folder: Path, answer: dict[str, Any], command: str) -> Path:
    """Write what the explorer found; see `kvproof.fuzz.rounds.run_explore` for the answer."""
    name = f"explorer_{digest((answer['scope'], answer['trace'])):016x}"
    text = EXPLORER_TEST.format(
        command=command,
        error=_quoted(answer["violation"]),
        name=name,
        scope=answer["scope"],
        hash=answer["hash"],
        actions="\n".join(f"            {action}," for action in answer["trace"]),
    )
    return _write(folder, name, text)


def failures_of(plan: Plan, result: Result, folder: Path, command: str) -> list[Failure]:
    """One file in `folder` for each failure of a campaign, and whether its test was seen to fail."""
    failures = []
    for answer in result.explored:
        if answer["violation"]:
            file = save_trace(folder, answer, command)
            steps = [str(action) for action in answer["trace"]]
            failures.append(_failure(f"explorer, scope {answer['scope']}", answer["violation"], steps, file))
    for machine in result.machines:
        if machine.error:
            file = save_program(folder, plan, machine, command)
            failures.append(_failure(f"machine {machine.machine}", machine.error, machine.program, file))
    return failures


def _failure(found_by: str, error: str, steps: list[str], file: Path) -> Failure:
    failed = fails(file, endless=error.startswith(NeverEnds.__name__))
    return Failure(found_by, error, steps, str(file), f"python -m pytest {file}", failed)


def fails(file: Path, *, endless: bool = False) -> bool:
    """Whether the test in `file` fails when it is run alone: by pytest if that is installed, else as a function.

    `endless` is whether it fails by never ending.
    """
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    plain = ["-c", RUN_PLAINLY, str(file)]
    command = [sys.executable, *(plain if find_spec("pytest") is None else pytest)]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=LONGEST).returncode == 1
    except subprocess.TimeoutExpired:
        return endless


def replay_actions(scope: str, hash: str, actions: list[tuple[str, tuple[object, ...]]]) -> None:
    """Follow `actions` through the explorer's checks; without any, the whole graph must be the design's.

    Raises `Broken` with what is violated. An action that the code refuses ends the way, as it does in the search.
    """
    explorer = Explorer(scope_named(scope), HASHES[hash])
    if not actions:
        num_transitions = sum(1 for _ in explorer.edges())
        graph, expected = Graph(len(explorer.reached_by), num_transitions, explorer.depth), scope_named(scope).graph
        assert graph == expected, f"{graph}, the design has {expected}"
    explorer.follow(actions)


def _names_in(program: str) -> set[str]:
    """What `program` uses and does not define."""
    nodes = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)]
    stored = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    return {node.id for node in nodes} - stored - set(dir(builtins))


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"test_{name}.py"
    file.write_text(text, encoding="utf-8")
    return file
