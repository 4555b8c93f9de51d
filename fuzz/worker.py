"""One process of a campaign: `python -m kvproof.fuzz.worker`, which reads jobs and writes answers, a line of JSON each.

A process of its own, so that the code under test is measured from its first line on: coverage has to run before
anything of it is imported. An answer is {"progress": ...}, any number of times, then {"done": ...}, {"refused": ...} or
{"crash": ...}.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvproof.fuzz import measure

if TYPE_CHECKING:
    from coverage import Coverage

answers, sys.stdout = sys.stdout, sys.stderr  # whatever the code under test prints is no answer


def tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def instrumented(packages: Iterable[str]) -> AbstractContextManager[None]:
    """Modules of `packages` that are imported inside tell atheris which of their branches are taken."""
    atheris: Any = import_module("atheris")
    context: AbstractContextManager[None] = atheris.instrument_imports(include=list(packages))
    return context


def main() -> None:
    """The first line says what to measure, and what guides examples: {"packages", "machines", "data", "guides"}."""
    setup = json.loads(sys.stdin.readline())
    measured, look = None, None
    if setup["packages"]:
        measured = measure.started(setup["packages"], setup["data"])
        look = measure.Look(measured, setup["machines"])
    with instrumented(setup["guides"]) if setup["guides"] else nullcontext():
        serve(measured, look)
    if measured is not None:
        measured.save()


def serve(measured: Coverage | None, look: measure.Look | None) -> None:
    # Only now, since this imports what is measured.
    from kvproof.allocator import KvproofError
    from kvproof.fuzz.rounds import CheckJob, ExploreJob, RoundJob, run_check, run_explore, run_round

    is_running = True
    for line in sys.stdin:
        name, arguments, is_measured = json.loads(line)
        if measured is not None and is_measured != is_running:  # a second start would outlive the next stop
            measured.start() if is_measured else measured.stop()
            is_running = is_measured
        try:
            if name == "explore":
                done = run_explore(ExploreJob(**arguments), lambda progress: tell({"progress": progress}))
            elif name == "check":
                done = run_check(CheckJob(**arguments))
            else:
                done = run_round(RoundJob(**arguments))
        except KvproofError as error:
            tell({"refused": str(error)})
            continue
        except Exception:
            tell({"crash": traceback.format_exc()})
            continue
        if look is not None and is_measured and (branches := look.branches()) is not None:
            tell({"progress": {"branches": branches}})
        tell({"done": done})
    if measured is not None and is_running:
        measured.stop()


if __name__ == "__main__":
    main()
