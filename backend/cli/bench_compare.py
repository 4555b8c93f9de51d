"""Whether anything got worse: the ratios of a run against those of an earlier one.

Absolute times are never compared. They change with the machine and with what else it does; a ratio, both sides of which
were measured in turns in one run, changes with the code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvproof.allocator import InvalidArgument
from kvproof.cli.bench_figures import Ratio

SCHEMA = 1
THRESHOLD = 0.25


@dataclass(frozen=True, slots=True)
class Change:
    """A ratio beside what it was: `worse` is 1 where nothing changed, 2 where it is twice as bad."""

    ratio: Ratio
    before: float
    worse: float
    regressed: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """`missing` are ratios of the baseline, as (benchmark, name), that this run has not measured."""

    baseline: str
    threshold: float
    changes: list[Change]
    missing: list[tuple[str, str]]

    @property
    def regressed(self) -> list[Change]:
        return [change for change in self.changes if change.regressed]

    def change(self, ratio: Ratio) -> Change | None:
        return next((change for change in self.changes if change.ratio == ratio), None)


def baseline_of(ratios: Iterable[Ratio], *, quick: bool) -> dict[str, Any]:
    """What is stored to be compared with later."""
    stored: dict[str, dict[str, float]] = {}
    for ratio in ratios:
        stored.setdefault(ratio.benchmark, {})[ratio.name] = ratio.value
    return {"schema": SCHEMA, "quick": quick, "ratios": stored}


def read_baseline(file: Path, *, quick: bool) -> dict[str, dict[str, float]]:
    """The stored ratios. Raises `InvalidArgument` unless they are of a run of the same sizes."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"can't read the baseline {file}: {error}") from None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA or "ratios" not in stored:
        raise InvalidArgument(f"{file} is no baseline: give the ratios.json that an earlier run has written")
    if stored["quick"] != quick:
        raise InvalidArgument(f"{file} is of a run with{'' if stored['quick'] else 'out'} --quick, whose sizes differ")
    ratios: dict[str, dict[str, float]] = stored["ratios"]
    return ratios


def compare(
    ratios: Iterable[Ratio], before: Mapping[str, Mapping[str, float]], *, baseline: str, threshold: float
) -> Comparison:
    """A ratio has regressed when it is more than `threshold` worse than it was; 0.25 is a quarter."""
    left = {(benchmark, name): value for benchmark, named in before.items() for name, value in named.items()}
    changes = []
    for ratio in ratios:
        was = left.pop((ratio.benchmark, ratio.name), None)
        if was is not None:
            worse = ratio.worse_than(was)
            changes.append(Change(ratio, was, worse, worse > 1 + threshold))
    return Comparison(baseline, threshold, changes, list(left))
