"""What a campaign found, as plain data and as text. The page with the plots is `kvproof.fuzz.page`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from platform import platform, python_version
from typing import TYPE_CHECKING, Any

from kvproof.fuzz.campaign import MEASURED, Result
from kvproof.fuzz.plan import Plan
from kvproof.fuzz.regression import Failure
from kvproof.fuzz.spec.scopes import scope_named

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = 1

Report = dict[str, Any]


def report_of(plan: Plan, result: Result, failures: Iterable[Failure], command: str) -> Report:
    """`found` is the same whenever the same plan is run on the same code; `timing` is not.

    Scopes that time did not suffice for are in `found` too, with no state reached.
    """
    explored = {answer["scope"]: answer for answer in result.explored}
    return {
        "schema": SCHEMA,
        "command": command,
        "plan": asdict(plan),
        "environment": {
            "python": python_version(),
            "platform": platform(),
            "packages": {name: _version(name) for name in ("kvproof", "hypothesis", "coverage", "atheris")},
        },
        "found": {
            "explorer": [_scope(name, explored.get(name)) for name in plan.scopes],
            "machines": [
                {
                    "machine": machine.machine,
                    "rounds": machine.rounds,
                    "examples": machine.examples,
                    "invalid": machine.invalid,
                    "states": machine.states,
                    "growth": machine.growth,
                    "rules": dict(machine.rules.most_common()),
                    "invariants": dict(machine.invariants.most_common()),
                    "events": dict(machine.events.most_common()),
                    "error": machine.error,
                }
                for machine in result.machines
            ],
            "failures": [asdict(failure) for failure in failures],
        },
        "coverage": result.coverage,
        "timing": {
            "seconds": round(result.seconds, 2),
            "explorer": {scope: round(answer["seconds"], 2) for scope, answer in explored.items()},
            "machines": {
                machine.machine: {
                    "seconds": round(machine.seconds, 2),
                    "examples_per_second": round(machine.examples / machine.seconds, 1) if machine.seconds else 0.0,
                    "slowest": [{"seconds": round(seconds, 4), "steps": steps} for seconds, steps in machine.slowest],
                }
                for machine in result.machines
            },
        },
    }


def _scope(name: str, answer: dict[str, Any] | None) -> dict[str, Any]:
    scope = scope_named(name)
    reached = answer or {"states": 0, "transitions": 0, "hash": None, "complete": False, "violation": None}
    return {
        "scope": name,
        "covers": scope.covers,
        "hash": reached["hash"],
        "states": reached["states"],
        "known_states": scope.graph.states,
        "transitions": reached["transitions"],
        "known_transitions": scope.graph.transitions,
        "complete": reached["complete"],
        "violation": reached["violation"],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def share(covered: int, total: int) -> str:
    return f"{covered / total:.1%}" if total else "none"


def coverage_note(report: Report) -> str:
    """What the coverage figures stand for, or why there are none."""
    if report["plan"]["target"] is not None:
        return "coverage is measured of kvproof's own code only"
    if report["plan"]["engine"] == "atheris":
        return "coverage was not measured: atheris changes the code for its own counters"
    if report["coverage"] is None:
        return "coverage was not measured, since the package coverage is not installed"
    rounds = f"in the first {MEASURED} rounds of each machine and in one of {MEASURED} after, not in the explorer"
    return f"measured {rounds}: at least this was covered"


def text_of(report: Report) -> Iterable[RenderableType]:
    """The report for a terminal."""
    from rich.table import Table
    from rich.text import Text

    def table(*columns: str) -> Table:
        made = Table(columns[0], box=None, header_style="bold", pad_edge=False)
        for column in columns[1:]:
            made.add_column(column, justify="right")
        return made

    found, timing = report["found"], report["timing"]
    if found["explorer"]:
        scopes = table("scope", "states", "of", "transitions", "of", "seconds", "")
        for row in found["explorer"]:
            scopes.add_row(
                row["scope"],
                f"{row['states']:,}", f"{row['known_states']:,}",
                f"{row['transitions']:,}", f"{row['known_transitions']:,}",
                f"{timing['explorer'].get(row['scope'], 0):.1f}",
                "VIOLATED" if row["violation"] else "all" if row["complete"] else "cut short",
            )  # fmt: skip
        yield scopes
        reached, known = (sum(row[key] for row in found["explorer"]) for key in ("states", "known_states"))
        yield Text(f"explorer: {reached:,} of {known:,} states ({share(reached, known)})\n")
    machines = table("machine", "examples", "invalid", "rules fired", "invariants checked", "states", "per second", "")
    for row in found["machines"]:
        machines.add_row(
            row["machine"],
            f"{row['examples']:,}", f"{row['invalid']:,}",
            f"{sum(row['rules'].values()):,}", f"{sum(row['invariants'].values()):,}",
            f"{row['states']:,}" if row["states"] else "not counted",
            f"{timing['machines'][row['machine']]['examples_per_second']:.0f}",
            "FAILED" if row["error"] else "",
        )  # fmt: skip
    yield machines
    for row in found["machines"]:
        yield Text(f"\n{row['machine']}: rules " + ", ".join(f"{name} {n:,}" for name, n in row["rules"].items()))
        if row["events"]:
            yield Text("  examples in which: " + ", ".join(f"{name} {n:,}" for name, n in row["events"].items()))
    yield Text()
    if report["coverage"]:
        total = report["coverage"]["total"]
        yield Text(
            f"code under test: {share(total['covered_lines'], total['lines'])} of {total['lines']:,} lines, "
            f"{share(total['covered_branches'], total['branches'])} of {total['branches']:,} branches"
        )
    yield Text(coverage_note(report), style="dim")
    for failure in found["failures"]:
        yield Text(f"\n{failure['found_by']}: {failure['error']}", style="bold red")
        yield Text("\n".join(f"    {step}" for step in failure["steps"]))
        yield Text(f"replay: {failure['replay']}" + ("" if failure["confirmed"] else " (did not fail when run alone)"))
