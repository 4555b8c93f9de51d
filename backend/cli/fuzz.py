"""`kvproof fuzz`: look for failures, exhaustively at small scopes and at random beyond."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvproof.allocator import InvalidArgument
from kvproof.cli.common import count, on_terminal, write_report
from kvproof.fuzz.targets import EXPLORED, FOREIGN, MACHINES, TARGETS

if TYPE_CHECKING:
    from kvproof.fuzz.campaign import Progress
    from kvproof.fuzz.plan import Plan

EXAMPLE = """\
examples:
  kvproof fuzz --time 60s
  kvproof fuzz manager --examples 1000 --seed 7
  kvproof fuzz allocator --target my_engine.kv:BlockManager
  kvproof fuzz attention --backend my_backend
  kvproof fuzz --planted all

The targets allocator, manager and all begin with the explorer, which visits every state that the block manager can
reach at small scopes. A failure is shrunk and written as a test into DIR/regressions; the exit code is 1. With
--examples, the same seed finds the same. docs/fuzzing.md tells how to read the report.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "fuzz",
        help="look for failures in the allocator, in attention backends, or in allocators of your own",
        description="Fuzz the project's code, or yours, with state machines; or the fuzzer, with planted faults.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what", nargs="?", default="allocator", choices=tuple(TARGETS), help="what to fuzz (default allocator)"
    )
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--time", type=_seconds, metavar="T", help="how long, as 90, 60s, 10m or 1h (default 60s)")
    limit.add_argument("--examples", type=count, metavar="N", help="random examples for each machine")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random examples (default 0)")
    parser.add_argument(
        "--engine", choices=("hypothesis", "atheris"), default="hypothesis",
        help="what draws random examples; atheris is guided by coverage (default hypothesis)",
    )  # fmt: skip
    parser.add_argument("--jobs", type=count, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument(
        "--explore", choices=("quick", "all", "none"), default="quick", help="the scopes to explore (default quick)"
    )
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="keep failing examples here, and try them first")
    parser.add_argument(
        "--report", type=Path, default=Path("fuzz-report"), metavar="DIR",
        help="where report.json, index.html and regressions/ go (default fuzz-report)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    foreign = parser.add_argument_group("code of others")
    foreign.add_argument("--target", metavar="MODULE:CLASS", help="the allocator to fuzz (see kvproof.fuzz.protocol)")
    foreign.add_argument("--known", nargs="+", default=[], metavar="CHECK", help="checks that --target may fail")
    foreign.add_argument("--backend", metavar="NAME", help="the attention backend to hold to every conformance check")
    planted = parser.add_argument_group("planted faults")
    planted.add_argument("--planted", metavar="NAME", help="break our own code by this fault, or by each of all")
    planted.add_argument("--seeds", type=count, metavar="N", help="how often --planted is found at random from N seeds")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    try:
        value = float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: say 90, 60s, 10m or 1h") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be more than 0")
    return value


def run(args: argparse.Namespace) -> int:
    _require(args.engine)
    if args.seeds is not None:
        return _rates(args)
    if args.planted is not None:
        return _hunt(args)
    if args.backend is not None:
        return _attention(args)
    return _campaign(args)


def _campaign(args: argparse.Namespace) -> int:
    from rich.console import Console

    from kvproof.fuzz.campaign import Campaign
    from kvproof.fuzz.page import page_of
    from kvproof.fuzz.regression import failures_of
    from kvproof.fuzz.report import report_of, text_of

    plan = _plan(args)
    command = shlex.join(["kvproof", *sys.argv[1:]]) if Path(sys.argv[0]).name == "kvproof" else f"kvproof {args.what}"
    with _Line(plan) as line:
        result = Campaign(plan, line.show).run()
    report = report_of(plan, result, failures_of(plan, result, args.report / "regressions", command), command)
    write_report(args.report, {"report.json": json.dumps(report, indent=1) + "\n", "index.html": page_of(report)})
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        out = Console(highlight=False)
        for part in text_of(report):
            out.print(part)
        out.print(f"\nreport: {args.report / 'index.html'}")
    return 1 if result.failed else 0


def _plan(args: argparse.Namespace) -> Plan:
    from kvproof.fuzz.plan import Plan
    from kvproof.fuzz.spec.scopes import SCOPES

    if args.known and args.target is None:
        raise InvalidArgument("--known needs --target")
    machines = (FOREIGN,) if args.target is not None else TARGETS[args.what]
    if any(name in MACHINES and MACHINES[name].needs_torch for name in machines):
        _require("torch")
    explored = args.explore != "none" and args.target is None and args.what in EXPLORED
    scopes = [scope for scope in SCOPES if explored and (args.explore == "all" or not scope.slow)]
    measures = args.target is None and args.engine == "hypothesis" and find_spec("coverage") is not None
    return Plan(
        machines=machines,
        scopes=tuple(scope.name for scope in sorted(scopes, key=lambda scope: scope.graph.transitions)),
        examples=args.examples,
        seconds=None if args.examples else args.time or 60.0,
        seed=args.seed,
        engine=args.engine,
        jobs=args.jobs,
        corpus=str(args.corpus) if args.corpus else None,
        packages=tuple(sorted({MACHINES[name].package for name in machines})) if measures else (),
        target=args.target,
        known=tuple(args.known),
    )


def _require(module: str) -> None:
    """Say that it is missing before any worker does."""
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


class _Line:
    """One line on a terminal that says how far the campaign is."""

    def __init__(self, plan: Plan) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn

        self._bar = Progress(SpinnerColumn(), TextColumn("{task.description}"), **on_terminal())
        self._task = self._bar.add_task("starting", total=None)
        self._limit = "" if plan.seconds is None else f"/{plan.seconds:.0f}"

    def __enter__(self) -> _Line:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, progress: Progress) -> None:
        explored, states = sum(progress.explored.values()), sum(map(len, progress.states.values()))
        rate = progress.examples / progress.searching if progress.searching else 0.0
        parts = [f"{progress.seconds:.0f}{self._limit} s", f"{explored:,} states explored"]
        parts.append(f"{progress.examples:,} examples, {rate:.0f}/s, {progress.rules:,} rules, {states:,} states")
        if progress.branches is not None:
            parts.append(f"{progress.branches:.0%} of branches")
        if progress.failed:
            parts.append(f"failed: {', '.join(sorted(progress.failed))}")
        self._bar.update(self._task, description=" · ".join(parts))


def _hunt(args: argparse.Namespace) -> int:
    from rich.console import Console

    from kvproof.fuzz.hunt import hunt, table_of

    faults = _faults(args.planted)
    finds = hunt(faults, seed=args.seed, examples=args.examples or 3000, jobs=args.jobs, engine=args.engine)
    found = list(_shown(finds, len(faults)))
    missed = [find for find in found if not find.found]
    if args.json:
        print(json.dumps([find.as_json() for find in found], indent=1))
    else:
        Console().print(table_of(found))
        print(f"{len(found) - len(missed)} of {len(found)} planted faults found")
    return 1 if missed else 0


def _rates(args: argparse.Namespace) -> int:
    from kvproof.fuzz.detection import page_of, rates

    if args.planted is None:
        raise InvalidArgument("--seeds needs --planted")
    faults, examples = _faults(args.planted), args.examples or 3000
    found = rates(faults, seeds=args.seeds, examples=examples, jobs=args.jobs, engine=args.engine)
    rated = list(_shown(found, len(faults)))
    page = page_of(rated, planted=args.planted, seeds=args.seeds, examples=examples)
    write_report(args.report, {"detection.md": page})
    print(json.dumps([rate.as_json() for rate in rated], indent=1) if args.json else page)
    return 0 if all(rate.suffices for rate in rated) else 1


def _faults(name: str) -> list[str]:
    from kvproof.fuzz.catalogue import catalogue, fault_named

    return list(catalogue()) if name == "all" else [fault_named(name).fault.name]


def _shown(finds: Iterator[Any], total: int) -> Iterator[Any]:
    """The same finds, each of which has a `fault`, with a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("faults"))
    with Progress(*columns, **on_terminal()) as bar:
        task = bar.add_task("", total=total)
        for find in finds:
            bar.update(task, advance=1, description=find.fault)
            yield find


def _attention(args: argparse.Namespace) -> int:
    """A backend of anybody's, by the conformance kit."""
    from kvproof.fuzz.conformance import check_attention_backend

    if args.what != "attention":
        raise InvalidArgument("--backend needs the target attention")
    if args.time is not None:
        raise InvalidArgument("attention backends are checked by --examples, not by --time")
    report = check_attention_backend(args.backend, examples=args.examples or 100, seed=args.seed)
    if args.json:
        rows = [
            {
                "check": result.name,
                "examples": result.examples,
                "seconds": round(result.seconds, 2),
                "error": None if result.error is None else str(result),
            }
            for result in report.results
        ]
        print(json.dumps({"backend": report.target, "passed": report.passed, "checks": rows}, indent=1))
    else:
        print(report)
    return 0 if report.passed else 1
