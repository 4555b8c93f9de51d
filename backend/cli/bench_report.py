"""What a benchmark run found, as a Markdown table and as one HTML page with plots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from kvproof.cli import bench_plots as plots
from kvproof.cli.bench_compare import Comparison
from kvproof.cli.bench_figures import Ratio, absent_of, charts_of, named, notes_of, ratios_of, versions
from kvproof.cli.bench_run import Run
from kvproof.fuzz import html

HEAD = ("benchmark", "ratio", "measured", "aim", "met")


@dataclass(frozen=True, slots=True)
class Report:
    """All that the two forms show. `comparison` is there when the run was compared with an earlier one."""

    command: str
    run: Run
    ratios: list[Ratio]
    comparison: Comparison | None

    @property
    def failed(self) -> bool:
        return bool(self.run.failed or (self.comparison and self.comparison.regressed))

    @property
    def verdict(self) -> str:
        parts = [f"{len(self.run.results['benchmarks'])} benchmarks, {len(self.ratios)} ratios"]
        if self.comparison is not None:
            parts.append(f"{len(self.comparison.regressed)} of {len(self.comparison.changes)} compared have regressed")
        if self.run.failed:
            parts.append(f"{len(self.run.failed)} failed")
        return ", ".join(parts)


def report_of(command: str, run: Run, comparison: Comparison | None) -> Report:
    return Report(command, run, ratios_of(run.results), comparison)


def machine_of(results: dict[str, Any]) -> str:
    """The machine in general terms: its name is nobody's business."""
    machine = results["machine_info"]
    cpu = machine["cpu"]
    return (
        f"{cpu.get('brand_raw', machine['machine'])}, {cpu.get('count', '?')} cores, {machine['system']}, "
        f"Python {machine['python_version']}"
    )


def packages() -> str:
    return ", ".join(f"{package} {version}" for package, version in versions().items())


def table_of(report: Report) -> tuple[list[str], list[list[str]]]:
    """The ratios as text, for any table."""
    compared = report.comparison is not None
    return [*HEAD, *(("before", "times as bad") if compared else ())], [
        [
            named(ratio.benchmark),
            ratio.name,
            f"{ratio.value:.3g}",
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
    return [f"{change.before:.3g}", f"{change.worse:.2f}{' REGRESSED' if change.regressed else ''}"]


def markdown_of(report: Report) -> str:
    return "\n".join(_markdown(report)) + "\n"


def _markdown(report: Report) -> Iterator[str]:
    def rows(head: list[str], lines: Iterable[list[str]]) -> Iterator[str]:
        yield f"| {' | '.join(head)} |"
        yield f"| {' | '.join('---' for _ in head)} |"
        for line in lines:
            yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |"

    yield f"# kvproof bench: {report.verdict}\n"
    yield f"`{report.command}`, {report.run.seconds:.0f} s. {machine_of(report.run.results)}. {packages()}.\n"
    yield "*times X*: so many times as fast as X, more is better. *over X*: takes so many times as long, less is.\n"
    yield from rows(*table_of(report))
    yield "\n## Times\n"
    yield from rows(["benchmark", "median", "spread (IQR)", "rounds"], _times(report))
    for title, reasons in _unmeasured(report):
        yield f"\n## {title}\n"
        yield from (f"- {name}: {reason}" for name, reason in reasons.items())


def _times(report: Report) -> Iterator[list[str]]:
    for benchmark in report.run.results["benchmarks"]:
        stats = benchmark["stats"]
        yield [named(benchmark["fullname"]), seconds(stats["median"]), seconds(stats["iqr"]), str(stats["rounds"])]


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
    yield f"<p><code>{escape(report.command)}</code>, {report.run.seconds:.0f} s</p>"
    yield html.note(f"{machine_of(report.run.results)}; {packages()}")
    if report.comparison is not None:
        yield f"<p>{escape(compared(report.comparison))}</p>"
    for title, kind, meaning in (
        ("Beside peers", "times ", "how many times as fast as the peer, measured in turns in this run: more is better"),
        ("Beside limits", "over ", "how many times as long as a bare limit, or as a smaller size: less is better"),
    ):
        if chosen := [ratio for ratio in report.ratios if ratio.name.startswith(kind)]:
            yield f"<h2>{title}</h2>{html.note(f'{meaning}. The black mark is the aim.')}"
            for name, group in groupby(sorted(chosen, key=lambda ratio: ratio.against), lambda ratio: ratio.against):
                yield f"<h3>{escape(name)}</h3>{plots.ratios(list(group))}"
    for title, drawn in charts_of(report.run.results).items():
        yield f"<h2>{escape(title)}</h2>{plots.curves(drawn)}"
    yield f"<h2>All ratios</h2>{html.table(*table_of(report))}"
    yield f"<h2>Times</h2>{html.table(('benchmark', 'median', 'spread (IQR)', 'rounds'), _times(report))}"
    for title, reasons in _unmeasured(report):
        yield f"<h2>{title}</h2>{html.table(('', 'reason'), reasons.items())}"
    yield "<h2>What each measured</h2>"
    for benchmark in report.run.results["benchmarks"]:
        yield html.details(named(benchmark["fullname"]), json.dumps(notes_of(benchmark["extra_info"]), indent=1))


def compared(comparison: Comparison) -> str:
    """What the comparison came to, in a line."""
    return (
        f"compared with {comparison.baseline}: {len(comparison.regressed)} of {len(comparison.changes)} ratios are "
        f"more than {comparison.threshold:.0%} worse, {len(comparison.missing)} were not measured now"
    )
