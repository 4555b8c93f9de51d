"""The command that checks the specification, and that the code is what it specifies."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from kvproof.allocator import KvproofError
from kvproof.fuzz.spec.checks import Check, Part
from kvproof.fuzz.spec.parts import PARTS

SIZES = ("states", "transitions", "obligations")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    progress = sys.stderr if options.json else sys.stdout
    reports = []
    for part in PARTS:
        if part.name not in options.part if options.part else part.full_only and not options.full:
            continue
        progress.write(f"{part.name}: {part.about}\n")
        for check, seconds in _timed(part, options.full):
            reports.append({"part": part.name, **asdict(check), "seconds": round(seconds, 2)})
            verdict = f"  ok {check.what}" if check.right else f"  NOT AS IT SHOULD BE {check.what}: {check.detail}"
            progress.write(f"{verdict} ({seconds:.1f} s)\n")
            progress.flush()
    failed = sum(not report["right"] for report in reports)
    sums = {size: sum(report[size] for report in reports) for size in SIZES}
    gone_through = ", ".join(f"{number:,} {size}" for size, number in sums.items())
    progress.write(f"{len(reports)} checks, {failed} failed: {gone_through}\n")
    if options.json:
        json.dump({"right": not failed, **sums, "checks": reports}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    return 1 if failed else 0


def _timed(part: Part, full: bool) -> Iterator[tuple[Check, float]]:
    start = time.monotonic()
    try:
        for check in part.checks(full):
            yield check, time.monotonic() - start
            start = time.monotonic()
    except (KvproofError, TimeoutError, ValueError) as error:
        yield Check(what=part.name, right=False, detail=str(error)), time.monotonic() - start


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvproof.fuzz.spec",
        description="Check the specification in allocator/spec, and that the code is what it specifies. Prints a line "
        "per check and exits with 1 when one fails. Model checking needs Java.",
        epilog="example: python -m kvproof.fuzz.spec --part graph --full",
    )
    parser.add_argument("--full", action="store_true", help="every scope, hash function and planted fault (long)")
    parser.add_argument(
        "--part",
        action="append",
        choices=[part.name for part in PARTS],
        help="only this part; may be given more than once",
    )
    parser.add_argument("--json", action="store_true", help="write a report to standard output, progress to the other")
    return parser


if __name__ == "__main__":
    sys.exit(main())
