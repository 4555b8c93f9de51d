"""`kvproof replay`: what pools of several sizes would find in their prefix cache, from a trace of real requests."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvproof.allocator import EvictionPolicy, InvalidArgument, KvproofError
from kvproof.allocator.replay import ReplayResult, default_pool_sizes, replay
from kvproof.allocator.traces import SESSION_SPACING, Request, Trace, TraceError, read_trace
from kvproof.cli.chart import line_chart
from kvproof.cli.common import count, on_terminal

if TYPE_CHECKING:
    from rich.progress import Progress

POLICIES = "kvproof.eviction_policies"  # the entry-point group; `kvproof.backend.registry` would load torch

EXAMPLE = """\
example:
  kvproof replay conversation_trace.jsonl --num-blocks 1000 4000 16000 --plot hit_rate.svg

TRACE is a Mooncake trace (JSON lines) or the sessions of a kv-cache-tester trace, plain or gzipped. The hit rate is
the share of the prompts' blocks that were found in the cache. Only prompts are replayed, since no trace tells which
blocks of the next turn an output fills.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="replay a request trace through pools of several sizes: hit rate, evictions, time",
        description="Replay a trace of real requests through the block allocator, to see how large a pool pays.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="trace file")
    parser.add_argument(
        "--num-blocks", type=count, nargs="+", default=[], metavar="N",
        help="pool sizes to try (default: from the longest prompt to all distinct blocks, in powers of four)",
    )  # fmt: skip
    parser.add_argument("--policy", nargs="+", default=["lru"], metavar="NAME", help="eviction policies (default lru)")
    parser.add_argument(
        "--block-size", type=count, metavar="B", help="tokens in a block, divides the trace's own (the default)"
    )
    parser.add_argument(
        "--by-tokens", action="store_true",
        help="replay token by token: slower, and exact, as a prompt's partial last block is not cached",
    )  # fmt: skip
    parser.add_argument("--concurrency", type=count, default=1, metavar="N", help="requests held at once (default 1)")
    parser.add_argument("--limit", type=count, metavar="N", help="replay the first N requests only")
    parser.add_argument(
        "--spacing", type=float, default=SESSION_SPACING, metavar="SECONDS",
        help=f"between the starts of sessions (default {SESSION_SPACING:g})",
    )  # fmt: skip
    parser.add_argument("--plot", type=_svg, metavar="FILE.svg", help="draw hit rate over pool size")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _svg(text: str) -> Path:
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{text} must end in .svg")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    for name in args.policy:
        _new_policy(name)  # an unknown one is refused before minutes are spent
    with _progress() as bar:
        trace = _read(args, bar)
        results = _replay(args, trace, bar)
    if args.json:
        print(json.dumps(_report(args, trace, results), indent=2))
    else:
        _print_table(results)
    if args.plot is not None:
        _plot(args, results)
    return 0


def _new_policy(name: str) -> EvictionPolicy:
    known = {entry.name: entry for entry in entry_points(group=POLICIES)}
    if name not in known:
        raise InvalidArgument(f"unknown eviction policy {name!r}, known are: {', '.join(sorted(known)) or 'none'}")
    try:
        policy: EvictionPolicy = known[name].load()()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise KvproofError(f"eviction policy {name!r} can't be loaded: {reason}") from error
    return policy


def _read(args: argparse.Namespace, bar: Progress) -> Trace:
    """The whole trace in memory: every pool replays it, and a malformed line shows before the first does."""
    task = bar.add_task("reading", total=args.limit)
    trace = read_trace(args.trace, spacing=args.spacing)
    requests: list[Request] = []
    for request in islice(trace.requests, args.limit):
        requests.append(request)
        bar.advance(task)
    bar.remove_task(task)
    if not requests:
        raise TraceError(f"{args.trace}: there is no request in it")
    return Trace(trace.block_size, requests)


def _replay(args: argparse.Namespace, trace: Trace, bar: Progress) -> dict[str, list[ReplayResult]]:
    """The results of each policy, in the order of the pool sizes."""
    sizes = args.num_blocks or default_pool_sizes(trace, block_size=args.block_size, concurrency=args.concurrency)
    task = bar.add_task("", total=len(args.policy) * len(sizes) * len(list(trace.requests)))
    results: dict[str, list[ReplayResult]] = {}
    for name in args.policy:
        results[name] = []
        for num_blocks in sizes:
            bar.update(task, description=f"{name}, {num_blocks:,} blocks")
            result = replay(
                trace,
                num_blocks,
                block_size=args.block_size,
                policy=_new_policy(name),
                by_tokens=args.by_tokens,
                concurrency=args.concurrency,
                on_request=lambda: bar.advance(task),
            )
            results[name].append(result)
    return results


def _report(args: argparse.Namespace, trace: Trace, results: Mapping[str, list[ReplayResult]]) -> dict[str, Any]:
    return {
        "trace": str(args.trace),
        "trace_block_size": trace.block_size,
        "by_tokens": args.by_tokens,
        "concurrency": args.concurrency,
        "results": [
            {"policy": name, **asdict(result), "hit_rate": result.hit_rate, "hit_tokens": result.hit_tokens}
            for name, rows in results.items()
            for result in rows
        ],
    }


def _print_table(results: Mapping[str, list[ReplayResult]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("policy", box=None, header_style="bold", pad_edge=False)
    for column in ("blocks", "hit rate", "hit tokens", "evictions", "peak", "refused", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, rows in results.items():
        for result in rows:
            table.add_row(
                name,
                f"{result.num_blocks:,}",
                f"{result.hit_rate:.4f}",
                f"{result.hit_tokens:,}",
                f"{result.evictions:,}",
                f"{result.peak_blocks:,}",
                f"{result.refused:,}",
                f"{result.seconds:.2f}",
            )
    Console().print(table)


def _plot(args: argparse.Namespace, results: Mapping[str, list[ReplayResult]]) -> None:
    block_size = next(result.block_size for rows in results.values() for result in rows)
    svg = line_chart(
        {name: [(result.num_blocks, result.hit_rate) for result in rows] for name, rows in results.items()},
        title=f"Prefix-cache hit rate, {args.trace.name}",
        x_label=f"pool size in blocks of {block_size} tokens",
        y_label="prompt blocks found",
    )
    try:
        args.plot.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise KvproofError(f"can't write the plot: {error}") from None


def _progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
        **on_terminal(),
    )
