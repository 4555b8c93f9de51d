"""A campaign's report as one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from kvproof.fuzz import plots
from kvproof.fuzz.html import details, heading, note, page, table
from kvproof.fuzz.report import Report, coverage_note, share


def page_of(report: Report) -> str:
    """The whole page."""
    return page("kvproof fuzz", _sections(report))


def _sections(report: Report) -> Iterator[str]:
    found, environment = report["found"], report["environment"]
    failures = found["failures"]
    verdict = f"{len(failures)} failure{'s' * (len(failures) != 1)}" if failures else "no failure"
    yield heading(f"kvproof fuzz: {verdict}", failed=bool(failures))
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    yield f"<p><code>{escape(report['command'])}</code>, {report['timing']['seconds']} s</p>"
    yield note(f"Python {environment['python']}, {packages}, {environment['platform']}")
    for failure in failures:
        yield f'<h2 class="failed">{escape(failure["found_by"])}</h2>'
        yield f"<p>{escape(failure['error'])}</p><pre>{escape(chr(10).join(failure['steps']))}</pre>"
        seen = "" if failure["confirmed"] else " (did not fail when run alone)"
        yield f"<p>Replay: <code>{escape(failure['replay'])}</code>{seen}</p>"
    if found["explorer"]:
        yield from _explorer(found["explorer"])
    yield from _machines(report)
    yield from _coverage(report)


def _explorer(scopes: list[dict[str, Any]]) -> Iterator[str]:
    yield "<h2>Explorer: states reached at each scope</h2>"
    yield plots.bars([(row["scope"], row["states"], row["known_states"]) for row in scopes])
    complete = sum(row["complete"] for row in scopes)
    yield note(
        f"{complete} of {len(scopes)} scopes visited in full: every reachable state, every invariant in each, and the "
        "same number of states and transitions as the design that the model checker has checked."
    )


def _machines(report: Report) -> Iterator[str]:
    machines, timing = report["found"]["machines"], report["timing"]["machines"]
    yield "<h2>Machines: random examples</h2>"
    yield table(
        ("machine", "examples", "invalid", "rules fired", "invariants checked", "distinct states", "per second"),
        [
            (
                row["machine"], f"{row['examples']:,}", f"{row['invalid']:,}", f"{sum(row['rules'].values()):,}",
                f"{sum(row['invariants'].values()):,}", f"{row['states']:,}",
                timing[row["machine"]]["examples_per_second"],
            )
            for row in machines
        ],
    )  # fmt: skip
    yield "<h3>Distinct abstract states over examples</h3>"
    yield plots.lines({row["machine"]: row["growth"] for row in machines}, "examples", "states")
    yield note("A curve that has gone flat says that more of the same will not find much more.")
    for row in machines:
        yield f"<h3>{escape(row['machine'])}</h3><p>Rules fired</p>{plots.counts(row['rules'])}"
        if row["invariants"]:
            yield f"<p>Invariants checked</p>{plots.counts(row['invariants'])}"
        if row["events"]:
            yield f"<p>Examples in which it happened</p>{plots.counts(row['events'])}"
        if slowest := timing[row["machine"]]["slowest"]:
            text = "\n".join(slowest[0]["steps"])
            yield details(f"slowest example, {slowest[0]['seconds']} s", text)


def _coverage(report: Report) -> Iterator[str]:
    yield "<h2>Coverage of the code under test</h2>"
    if (coverage := report["coverage"]) is not None:
        total = coverage["total"]
        yield (
            f"<p>{share(total['covered_branches'], total['branches'])} of branches, "
            f"{share(total['covered_lines'], total['lines'])} of lines. Branches, file by file:</p>"
        )
        yield plots.bars([(name, f["covered_branches"], f["branches"]) for name, f in coverage["files"].items()])
        missing = "\n".join(f"{name}: {', '.join(map(str, at))}" for name, at in coverage["missing_lines"].items())
        yield details("lines not reached", missing)
    yield note(coverage_note(report))
