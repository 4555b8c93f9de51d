"""What a benchmark run found, as a Markdown table and as one HTML page with plots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby

from kvproof.cli import bench_plots as plots
from kvproof.cli.bench_compare import Comparison
from kvproof.cli.bench_figures import Ratio, absent_of, charts_of, named, notes_of, shown, versions
from kvproof.cli.bench_machine import in_words, this_machine
from kvproof.cli.bench_run import Run
from kvproof.fuzz import html

HEAD = ("benchmark", "ratio", "measured", "aim", "met")
TIMES = ("benchmark", "what is timed", "median", "spread (IQR)", "rounds")
TIMED = (
    "Absolute times, of this machine at that moment. Where several sides took turns, of ours or of the whole contest."
)
MEANINGS = {
    "times ": "how many times as fast as X we were, or as small or as good where X says so; more is better",
    "over ": "how many times as long as X we took, a bare limit or a smaller size of the same work; less is better",
}


@dataclass(frozen=True, slots=True)
class Report:
    """All that the two forms show. `comparison` is there when the run was compared with an earlier one; `why_none` says
    why it was not."""

    command: str
    run: Run
    ratios: list[Ratio]
    comparison: Comparison | None
    why_none: str

    @property
    def failed(self) -> bool:
        return bool(self.run.failed or (self.comparison and self.comparison.regressed))

    @property
    def verdict(self) -> str:
        met = [ratio.met for ratio in self.ratios if ratio.met is not None]
        parts = [counted(len(self.run.results["benchmarks"]), "benchmark"), counted(len(self.ratios), "ratio")]
        if met:
            parts.append(f"{sum(met)} of {len(met)} aims met")
        if self.comparison is not None:
            parts.append(f"{len(self.comparison.regressed)} of {len(self.comparison.changes)} compared have regressed")
        if self.run.failed:
            parts.append(f"{len(self.run.failed)} failed")
        return ", ".join(parts)

    @property
    def compared(self) -> str:
        """What the comparison came to, or why there was none, in a line."""
        one = self.comparison
        if one is None:
            return self.why_none
        moved = {name: was for name, was in one.baseline.versions.items() if versions().get(name) != was}
        again = (
            f"; {counted(self.run.again, 'benchmark')} {'was' if self.run.again == 1 else 'were'} measured once more"
        )
        return (
            f"compared with {one.baseline.file}{f', of {listed(moved)}' if moved else ''}: {len(one.regressed)} of "
            f"{len(one.changes)} ratios are more than {one.threshold:.0%} worse, {len(one.missing)} were not measured "
            f"now{again if self.run.again else ''}"
        )

    @property
    def origin(self) -> str:
        """When, of what and on what."""
        results = self.run.results
        when, commit = results["datetime"][:16].replace("T", " "), results["commit_info"]
        of = ""
        if len(commit["id"]) >= 40:  # it is a word where there is no repository
            of = f", commit {commit['id'][:10]}{' and changes' if commit['dirty'] else ''}"
        return (
            f"{when} UTC{of}, took {self.run.seconds:.0f} s. Machine: {in_words(this_machine())}. "
            f"Versions: {listed(versions())}."
        )


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(packages: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in packages.items())


def table_of(report: Report) -> tuple[list[str], list[list[str]]]:
    """The ratios as text, for any table."""
    compared = report.comparison is not None
    return [*HEAD, *(("before", "times as bad") if compared else ())], [
        [
            named(ratio.benchmark),
            ratio.name,
            shown(ratio.value),
            "" if ratio.aim is None else f"{'>=' if ratio.more_is_better else '<='} {ratio.aim:g}",
            {None: "", True: "yes", False: "no"}[ratio.met],
            *_beside_before(report, ratio),
        ]
        for ratio in report.ratios
    ]


def _beside_before(report: Report, ratio: Ratio) -> list[str]:
    if report.comparison is None:
        return []
    change = report.comparison.change(ratio)
    if change is None:
        return ["new", ""]
    return [shown(change.before), f"{change.worse:.2f}{' REGRESSED' if change.regressed else ''}"]


def markdown_of(report: Report) -> str:
    return "\n".join(_markdown(report)) + "\n"


def _markdown(report: Report) -> Iterator[str]:
    def rows(head: list[str], lines: Iterable[list[str]]) -> Iterator[str]:
        yield f"| {' | '.join(head)} |"
        yield f"| {' | '.join('---' for _ in head)} |"
        for line in lines:
            yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |"

    yield f"# kvproof bench: {report.verdict}\n"
    yield f"`{report.command}`, {report.origin}\n"
    yield f"{report.compared}\n"
    yield f"*times X*: {MEANINGS['times ']}. *over X*: {MEANINGS['over ']}. docs/benchmarks.md says what each X is.\n"
    yield from rows(*table_of(report))
    yield f"\n## Times\n\n{TIMED}\n"
    yield from rows([*TIMES], _times(report))
    for title, reasons in _unmeasured(report):
        yield f"\n## {title}\n"
        yield from (f"- {name}: {reason}" for name, reason in reasons.items())


def _times(report: Report) -> Iterator[list[str]]:
    for benchmark in report.run.results["benchmarks"]:
        stats = benchmark["stats"]
        spread = seconds(stats["iqr"]) if stats["rounds"] > 1 else ""
        name, what = named(benchmark["fullname"]), benchmark["group"] or ""
        yield [name, what, seconds(stats["median"]), spread, str(stats["rounds"])]


def seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _unmeasured(report: Report) -> Iterator[tuple[str, dict[str, str]]]:
    run = report.run
    missing: dict[str, list[str]] = {}
    for benchmark, ratio in report.comparison.missing if report.comparison else ():
        missing.setdefault(named(benchmark), []).append(ratio)
    sections = {
        "Failed": {named(test): reason for test, reason in run.failed.items()},
        "Peers that were absent": absent_of(run.results),
        "Skipped": {named(test): reason for test, reason in run.skipped.items()},
        "In the baseline, and not measured now": {name: ", ".join(ratios) for name, ratios in missing.items()},
    }
    yield from ((title, reasons) for title, reasons in sections.items() if reasons)


def page_of(report: Report) -> str:
    return html.page("kvproof bench", _sections(report))


def _sections(report: Report) -> Iterator[str]:
    yield html.heading(f"kvproof bench: {report.verdict}", failed=report.failed)
    yield f"<p><code>{escape(report.command)}</code></p>{html.note(report.origin)}"
    yield f"<p>{escape(report.compared)}</p>"
    for title, kind in (("Beside peers", "times "), ("Beside limits", "over ")):
        if chosen := [ratio for ratio in report.ratios if ratio.name.startswith(kind)]:
            told = f"{kind}X: {MEANINGS[kind]}. Bars begin at 1, green is the better side; the black mark is the aim."
            yield f"<h2>{title}</h2>{html.note(told)}"
            for name, group in groupby(sorted(chosen, key=lambda ratio: ratio.against), lambda ratio: ratio.against):
                yield f"<h3>{escape(name)}</h3>{plots.ratios(list(group))}"
    for title, drawn in charts_of(report.run.results).items():
        yield f"<h2>{escape(title)}</h2>{plots.curves(drawn)}"
    yield f"<h2>All ratios</h2>{html.table(*table_of(report))}"
    yield f"<h2>Times</h2>{html.note(TIMED)}{html.table(TIMES, _times(report))}"
    for title, reasons in _unmeasured(report):
        yield f"<h2>{title}</h2>{html.table(('', 'reason'), reasons.items())}"
    yield "<h2>What each measured</h2>"
    for benchmark in report.run.results["benchmarks"]:
        yield html.details(named(benchmark["fullname"]), json.dumps(notes_of(benchmark["extra_info"]), indent=1))
