"""Whether anything got worse: the ratios of a run against those of an earlier one, its baseline.

Absolute times are never compared. They change with the machine and with what else it does; a ratio, both sides of which
were measured in turns in one run, changes with the code. It does change with the processor too: one that multiplies
faster than it reads shows other ratios than one that doesn't. So only runs of like machines are compared.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvproof.allocator import InvalidArgument
from kvproof.cli.bench_figures import Ratio, versions
from kvproof.cli.bench_machine import in_words, this_machine

SCHEMA = 2
THRESHOLD = 0.25


@dataclass(frozen=True, slots=True)
class Baseline:
    """The ratios of an earlier run, by benchmark and name, and the packages that it had."""

    file: Path
    versions: dict[str, str]
    ratios: dict[str, dict[str, float]]


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

    baseline: Baseline
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
    return {"schema": SCHEMA, "quick": quick, "machine": this_machine(), "versions": versions(), "ratios": stored}


def stored_baseline(folder: Path, *, quick: bool) -> Path:
    """Where the baseline of a folder of benchmarks, or of one of its files, lies if it has one."""
    return (folder if folder.is_dir() else folder.parent) / f"baseline{'-quick' if quick else ''}.json"


def _is_object(value: Any, of: Callable[[Any], bool] = lambda _: True) -> bool:
    return isinstance(value, dict) and all(map(of, value.values()))


def _is_ratio(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "quick": ("true or false", lambda value: isinstance(value, bool)),
    "machine": ("an object", _is_object),
    "versions": ("an object of strings", lambda value: _is_object(value, lambda one: isinstance(one, str))),
    "ratios": (
        "an object of objects of numbers above 0",
        lambda value: _is_object(value, lambda one: _is_object(one, _is_ratio)),
    ),
}
"""What each field of a baseline must be, in words and as a check."""


def read_baseline(file: Path, *, quick: bool) -> Baseline:
    """Raises `InvalidArgument` unless it is a whole one, of a run of the same sizes on a machine like this."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"can't read the baseline {file}: {error}") from None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        raise InvalidArgument(f"{file} is no baseline: give the ratios.json that an earlier run has written")
    for field, (form, has_form) in FORMS.items():
        if not has_form(value := stored.get(field)):
            raise InvalidArgument(f"{file} is damaged: {field!r} must be {form}, it is {reprlib.repr(value)}")
    if stored["quick"] != quick:
        raise InvalidArgument(f"{file} is of a run with{'' if stored['quick'] else 'out'} --quick, whose sizes differ")
    if stored["machine"] != this_machine():
        raise InvalidArgument(f"{file} is of another machine: {_differences(stored['machine'], this_machine())}")
    return Baseline(file, stored["versions"], stored["ratios"])


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What two machines don't have in common."""

    def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
        return in_words({name: value for name, value in one.items() if other.get(name) != value}) or "no more"

    return f"it has {apart(theirs, ours)}, this one {apart(ours, theirs)}"


def compare(ratios: Iterable[Ratio], baseline: Baseline, *, threshold: float) -> Comparison:
    """A ratio has regressed when it is more than `threshold` worse than it was; 0.25 is a quarter."""
    left = {(benchmark, name): value for benchmark, named in baseline.ratios.items() for name, value in named.items()}
    changes = []
    for ratio in ratios:
        was = left.pop((ratio.benchmark, ratio.name), None)
        if was is not None:
            worse = ratio.worse_than(was)
            changes.append(Change(ratio, was, worse, worse > 1 + threshold))
    return Comparison(baseline, threshold, changes, list(left))
