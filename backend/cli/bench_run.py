"""Running a folder of benchmarks: pytest with pytest-benchmark, in a process of its own, followed event by event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from kvproof.allocator import InvalidArgument, KvproofError
from kvproof.cli.bench_progress import ONLY, PIPE

JSON_FILE, LOG_FILE = "benchmarks.json", "pytest.log"
QUICK, PEERS = "KVPROOF_BENCH_QUICK", "KVPROOF_BENCH_PEERS"
"""Set to 1 or 0 for the benchmarks, which read them when they are collected."""


class BenchmarksFailed(KvproofError, RuntimeError):
    """No benchmark has been measured."""


@dataclass(slots=True)
class Run:
    """What a run measured, as pytest-benchmark's JSON, and what it did not, with the reason, by test."""

    results: dict[str, Any] = field(default_factory=lambda: {"benchmarks": []})
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    again: int = 0
    """How many benchmarks were measured once more."""

    def take(self, later: Run) -> None:
        """Have a later run's measurements of some of the same benchmarks instead of one's own, but for failed ones."""
        measured = {benchmark["fullname"]: benchmark for benchmark in later.results["benchmarks"]}
        taken = {name: benchmark for name, benchmark in measured.items() if name not in later.failed}
        benchmarks = self.results["benchmarks"]
        self.results["benchmarks"] = [taken.get(benchmark["fullname"], benchmark) for benchmark in benchmarks]
        self.failed |= later.failed
        self.seconds += later.seconds
        self.again += len(taken)


def folder_of(named: Path | None) -> Path:
    """The folder to run: the one that was named, or tests/benchmarks of the checkout. Raises `InvalidArgument`."""
    if named is not None:
        if not named.exists():
            raise InvalidArgument(f"there is no {named}")
        return named
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (root / "tests" / "benchmarks" / "test_allocator.py").exists():
            return root / "tests" / "benchmarks"
    raise InvalidArgument(
        "the benchmarks are not installed, they are in the source: run this in a checkout of kvproof, after make dev, "
        "or name a folder of your own benchmarks"
    )


def measure(
    folder: Path,
    output: Path,
    *,
    quick: bool,
    peers: bool,
    on_event: Callable[[dict[str, Any]], object],
    only: Collection[str] = (),
) -> Run:
    """Run all benchmarks under `folder`, or `only` those. The JSON and the log lie in `output` afterwards.

    `on_event` is told {"total": n}, then {"running": test} and {"done": test, "outcome": ..., "reason": ...} for each.
    Raises `BenchmarksFailed` when nothing was measured; `only` some benchmarks have failed then.
    """
    started, run = monotonic(), Run()
    json_file, log_file = output / JSON_FILE, output / LOG_FILE
    json_file.unlink(missing_ok=True)
    read, write = os.pipe()
    command = [
        sys.executable, "-m", "pytest", str(folder), "-p", "kvproof.cli.bench_progress", "-p", "no:cacheprovider", "-s",
        "--benchmark-only", "--benchmark-columns=median,iqr,rounds", f"--benchmark-json={json_file}",
    ]  # fmt: skip
    environment = os.environ | {
        PIPE: str(write), ONLY: json.dumps([*only]), QUICK: str(int(quick)), PEERS: str(int(peers))
    }  # fmt: skip
    with (
        log_file.open("ab" if only else "wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(write,), env=environment
        ) as process,
    ):
        os.close(write)
        with os.fdopen(read, encoding="utf-8") as events:
            for line in events:
                event = json.loads(line)
                if event.get("outcome") == "failed":
                    run.failed[event["done"]] = event["reason"]
                elif event.get("outcome") == "skipped":
                    run.skipped[event["done"]] = event["reason"]
                on_event(event)
    run.seconds = monotonic() - started
    if json_file.exists() and json_file.stat().st_size:
        run.results = json.loads(json_file.read_text(encoding="utf-8"))
        return run
    why = f"pytest ended with {process.returncode} and measured nothing"
    if not only:
        raise BenchmarksFailed(f"{next(iter(run.failed.values()), why)} (see {log_file})")
    run.failed = dict.fromkeys(only, f"{why} (see {log_file})") | run.failed
    return run
