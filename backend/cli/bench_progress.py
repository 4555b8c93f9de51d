"""The pytest plugin by which `kvproof bench` follows its run: a line of JSON for each event, to a pipe it was given.

It also leaves out what was not asked for.
"""

from __future__ import annotations

import json
import os
from typing import Any

PIPE, ONLY = "KVPROOF_BENCH_PIPE", "KVPROOF_BENCH_ONLY"
"""The pipe's number, and the benchmarks to run as a list in JSON, empty for all of them."""


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if only := json.loads(os.environ[ONLY]):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in only])
        items[:] = [item for item in items if item.nodeid in only]


def pytest_collection_finish(session: Any) -> None:
    _tell(total=len(session.items))


def pytest_collectreport(report: Any) -> None:
    if not report.passed:
        _tell(done=report.nodeid, outcome=report.outcome, reason=_reason(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell(running=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or not report.passed:
        _tell(done=report.nodeid, outcome=report.outcome, reason=_reason(report))


def _reason(report: Any) -> str:
    """Why it was skipped, or the first line of what went wrong: pytest marks those with an E."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    lines = report.longreprtext.splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1] if lines else "")


def _tell(**event: Any) -> None:
    os.write(int(os.environ[PIPE]), (json.dumps(event) + "\n").encode())
