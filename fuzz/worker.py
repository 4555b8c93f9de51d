"""One process of a campaign: `python -m kvproof.fuzz.worker`, which reads jobs and writes answers, a line of JSON each.

A process of its own, so that the code under test is measured from its first line on: coverage has to run before
anything of it is imported. An answer is {"progress": ...}, any number of times, then {"done": ...}, {"refused": ...} or
{"crash": ...}.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from kvproof.fuzz import measure

answers, sys.stdout = sys.stdout, sys.stderr  # whatever the code under test prints is no answer


def tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """The first line says what to measure: {"packages": [...], "machines": [...], "data": file}."""
    setup = json.loads(sys.stdin.readline())
    measured, look, is_running = None, None, True
    if setup["packages"]:
        measured = measure.started(setup["packages"], setup["data"])
        look = measure.Look(measured, setup["machines"])
    # Only now, since this imports what is measured.
    from kvproof.allocator import KvproofError
    from kvproof.fuzz.rounds import CheckJob, ExploreJob, RoundJob, run_check, run_explore, run_round

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
    if measured is not None:
        if is_running:
            measured.stop()
        measured.save()


if __name__ == "__main__":
    main()
