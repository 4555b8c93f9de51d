"""Line and branch coverage, by the package `coverage`. Imports nothing of the code that is measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvproof.fuzz.targets import code_under_test

if TYPE_CHECKING:
    from coverage import Coverage

PATIENCE = 5.0
"""Seconds between two looks at the figures: each takes a good part of one."""


def started(packages: Iterable[str], data: str) -> Coverage:
    from coverage import Coverage

    measured = Coverage(data_file=data, branch=True, source_pkgs=list(packages), config_file=False)
    measured.start()
    return measured


class Look:
    """The share of branches covered so far, now and then."""

    def __init__(self, measured: Coverage, machines: Iterable[str]) -> None:
        self._measured, self._machines = measured, tuple(machines)
        self._last = monotonic()

    def branches(self) -> float | None:
        """None when the last look was not long ago."""
        if monotonic() - self._last < PATIENCE:
            return None
        total = _figures(self._measured, self._machines)["total"]
        self._last = monotonic()
        return float(total["covered_branches"] / max(1, total["branches"]))


def combined(folder: Path, machines: Iterable[str]) -> dict[str, Any]:
    """Lines and branches of each file of the code under test, from the data files in `folder` together."""
    from coverage import Coverage

    measured = Coverage(data_file=str(folder / "combined"), branch=True, config_file=False)
    measured.combine(map(str, folder.glob("coverage.*")))
    return _figures(measured, tuple(machines))


def _figures(measured: Coverage, machines: tuple[str, ...]) -> dict[str, Any]:
    include, omit = code_under_test(machines)
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", suffix=".json") as file:
        measured.json_report(outfile=file.name, include=include, omit=omit)
        report = json.load(file)
    files = {_shown(name): _counts(told["summary"]) for name, told in report["files"].items()}
    missing = {_shown(name): told["missing_lines"] for name, told in report["files"].items() if told["missing_lines"]}
    return {"total": _counts(report["totals"]), "files": dict(sorted(files.items())), "missing_lines": missing}


def _counts(summary: dict[str, Any]) -> dict[str, int]:
    return {
        "lines": summary["num_statements"],
        "covered_lines": summary["covered_lines"],
        "branches": summary["num_branches"],
        "covered_branches": summary["covered_branches"],
    }


def _shown(name: str) -> str:
    return "/".join(Path(name).parts[-2:])
