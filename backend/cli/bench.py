"""`kvproof bench`: the benchmarks with their peers, a report, and whether anything got worse."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvproof.allocator import InvalidArgument
from kvproof.cli.bench_compare import (
    THRESHOLD,
    Baseline,
    baseline_of,
    compare,
    read_baseline,
    stored_baseline,
)
from kvproof.cli.common import on_terminal, write_report

if TYPE_CHECKING:
    from kvproof.cli.bench_report import Report
    from kvproof.cli.bench_run import Run

EXAMPLE = """\
examples:
  kvproof bench --quick
  kvproof bench --peers --report before
  kvproof bench --peers --compare before/ratios.json

Run it in a checkout of kvproof. DIR may be any folder of pytest-benchmark tests. With --peers, other allocators and
engines take turns with ours where they are installed; without, only bare limits do. A benchmark that fails, or a ratio
that got worse by more than the threshold, gives exit code 1. What it is compared with is baseline.json in DIR, or
baseline-quick.json with --quick, where that is of a machine like this. docs/benchmarks.md tells how to read the report.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="run the benchmarks beside their peers, and write a report",
        description="Run the benchmarks, write a report with plots, and compare with an earlier run.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="benchmarks to run (default: tests/benchmarks of a checkout)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller ones, in under three minutes")
    parser.add_argument("--peers", action="store_true", help="measure peers in the same run")
    parser.add_argument(
        "--report", type=Path, default=Path("bench-report"), metavar="DIR",
        help="where index.html, report.md, benchmarks.json and ratios.json go (default bench-report)",
    )  # fmt: skip
    parser.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="the ratios.json of an earlier run (default: DIR's baseline)"
    )
    parser.add_argument(
        "--threshold", type=_share, default=THRESHOLD, metavar="X",
        help=f"how much worse a ratio may be than it was (default {THRESHOLD}: a quarter)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON")
    parser.set_defaults(run=run)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be more than 0")
    return value


_share.__name__ = "number"  # argparse names it when `text` is no number


def run(args: argparse.Namespace) -> int:
    from kvproof.cli.bench_figures import ratios_of
    from kvproof.cli.bench_report import Report, markdown_of, page_of
    from kvproof.cli.bench_run import JSON_FILE, folder_of

    for module in ("pytest", "pytest_benchmark"):
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    folder = folder_of(args.folder)
    baseline, why_none = _baseline(folder, args)
    measured = _measure(folder, args)
    command = shlex.join(["kvproof", *sys.argv[1:]]) if Path(sys.argv[0]).name == "kvproof" else "kvproof bench"
    ratios, comparison = ratios_of(measured.results), None
    if baseline is not None:
        comparison = compare(ratios, baseline, threshold=args.threshold)
        if suspects := {change.ratio.benchmark for change in comparison.regressed}:  # or the machine was busy
            measured.take(_measure(folder, args, only=suspects))
            ratios = ratios_of(measured.results)
            comparison = compare(ratios, baseline, threshold=args.threshold)
    report = Report(command, measured, ratios, comparison, why_none)
    write_report(
        args.report,
        {
            JSON_FILE: json.dumps(measured.results, indent=1) + "\n",
            "ratios.json": json.dumps(baseline_of(report.ratios, quick=args.quick), indent=1) + "\n",
            "report.md": markdown_of(report),
            "index.html": page_of(report),
        },
    )
    if args.json:
        print(json.dumps(_as_json(report), indent=1))
    else:
        _print(report, args.report)
    return 1 if report.failed else 0


def _baseline(folder: Path, args: argparse.Namespace) -> tuple[Baseline | None, str]:
    """The one that was named, or the folder's own; None, and why, where the folder has none that will do."""
    if args.compare is not None:
        return read_baseline(args.compare, quick=args.quick), ""
    stored = stored_baseline(folder, quick=args.quick)
    if not stored.exists():
        return None, f"not compared: there is no {stored}"
    try:
        return read_baseline(stored, quick=args.quick), ""
    except InvalidArgument as error:
        return None, f"not compared: {error}"


def _measure(folder: Path, args: argparse.Namespace, *, only: Collection[str] = ()) -> Run:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvproof.cli.bench_figures import named
    from kvproof.cli.bench_run import measure

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    write_report(args.report, {})
    with Progress(*columns, **on_terminal()) as bar:
        task = bar.add_task("collecting", total=None)

        def on_event(event: dict[str, Any]) -> None:
            if "total" in event:
                bar.update(task, total=event["total"])
            elif "running" in event:
                bar.update(task, description=named(event["running"]))
            else:
                bar.advance(task)

        return measure(folder, args.report, quick=args.quick, peers=args.peers, on_event=on_event, only=only)


def _as_json(report: Report) -> dict[str, Any]:
    from dataclasses import asdict

    comparison = report.comparison
    return {
        "seconds": round(report.run.seconds, 1),
        "ratios": [{**asdict(ratio), "met": ratio.met} for ratio in report.ratios],
        "regressed": None if comparison is None else [asdict(change) for change in comparison.regressed],
        "compared": report.compared,
        "failed": report.run.failed,
        "skipped": report.run.skipped,
    }


def _print(report: Report, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvproof.cli.bench_figures import absent_of, named
    from kvproof.cli.bench_report import table_of

    out = Console(highlight=False)
    head, rows = table_of(report)
    table = Table(*head, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row), style="red" if row[-1].endswith("REGRESSED") else None)
    if not out.is_terminal:  # a file has room for whole names
        out.width = max(out.width, out.measure(table, options=out.options.update(width=1_000)).maximum)
    out.print(table)
    for title, reasons in (("absent", absent_of(report.run.results)), ("failed", report.run.failed)):
        for name, reason in reasons.items():
            out.print(f"{title}: {named(name) if title == 'failed' else name}: {reason}", markup=False, soft_wrap=True)
    out.print(report.compared, markup=False, soft_wrap=True)
    out.print(f"{report.verdict}; report: {folder / 'index.html'}", markup=False, soft_wrap=True)
