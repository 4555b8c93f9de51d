"""The allocator benchmarks' work as plain data, and the loop that drives any allocator through it.

Plain Python only: the same file runs in the tests and in the interpreter of a peer that has one of its own. A workload
goes through JSON to both, so that the lists of tokens lie in memory alike, as fresh as a tokenizer's.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypedDict

VOCABULARY = 128_000
TRACE_BLOCK_SIZE = 512


class Request(TypedDict):
    """Token ids. `output` has at least two: the prompt's computation samples one, and each decode step one more."""

    prompt: list[int]
    output: list[int]


class Workload(TypedDict):
    block_size: int
    num_blocks: int
    max_running: int
    requests: list[Request]


class Result(TypedDict):
    """What one pass over a workload took and found.

    seconds  by phase: "admission", "append", "release"
    counts   what each phase did: "requests", "tokens" appended, "steps" of all running sequences together, "blocks" of
             prompts
    hits     tokens of each request, in order, that were found in the prefix cache
    """

    seconds: dict[str, float]
    counts: dict[str, int]
    hits: list[int]


class Allocator(Protocol):
    """One side of a comparison: what an engine asks of its allocator, with nothing around it."""

    def admit(self, prompt: list[int], sampled: int) -> Any:
        """A sequence all of whose prompt has slots, is written and can be found, and whose first output is known."""

    def rows(self, running: Iterable[Any]) -> Sequence[Any]:
        """The running sequences in the order in which `step` wants their tokens. Not timed."""

    def step(self, rows: Sequence[Any], sampled: list[int]) -> None:
        """For each sequence: a slot for its newest token, which is then written, and one more token is known."""

    def release(self, seq: Any) -> None:
        """Give the sequence's blocks back."""

    def table(self, seq: Any) -> Sequence[int]:
        """The sequence's block table. Not timed."""

    def hit_tokens(self, seq: Any) -> int:
        """Tokens of the prompt that its admission found in the cache. Not timed."""


def conversation(path: Path, num_requests: int, *, num_blocks: int, block_size: int, max_running: int) -> Workload:
    """The first requests of a Mooncake trace: its lengths, and tokens that are equal where its hash ids are."""
    requests: list[Request] = []
    with path.open() as file:
        for number, record in enumerate(map(json.loads, islice(file, num_requests))):
            blocks = (_tokens(hash_id, TRACE_BLOCK_SIZE) for hash_id in record["hash_ids"])
            prompt = [token for block in blocks for token in block][: record["input_length"]]
            output = _tokens(f"output of {number}", max(2, record["output_length"]))
            requests.append({"prompt": prompt, "output": output})
    return _as_parsed(num_blocks, block_size, max_running, requests)


def unrelated(
    num_requests: int,
    prompt_tokens: tuple[int, int],
    output_tokens: int,
    *,
    num_blocks: int,
    block_size: int,
    max_running: int,
    seed: int = 0,
) -> Workload:
    """Requests that share nothing, with prompts of any length from `prompt_tokens[0]` to `prompt_tokens[1]`."""
    lengths = random.Random(seed)
    requests: list[Request] = [
        {
            "prompt": _tokens(f"{seed}: prompt of {number}", lengths.randint(*prompt_tokens)),
            "output": _tokens(f"{seed}: output of {number}", output_tokens),
        }
        for number in range(num_requests)
    ]
    return _as_parsed(num_blocks, block_size, max_running, requests)


def drive(allocator: Allocator, workload: Workload) -> Result:
    """Run all requests to their end, at most `max_running` at a time, decoding all that run together.

    The clock runs around an admission, around a step of all running sequences, and around a release. What existed
    before is frozen for the garbage collector, as engines do when they have started.
    """
    size = workload["block_size"]
    seconds = {"admission": 0.0, "append": 0.0, "release": 0.0}
    counts = {"requests": len(workload["requests"]), "tokens": 0, "steps": 0, "blocks": 0}
    hits: list[int] = []
    waiting = deque(workload["requests"])
    running: dict[Any, tuple[int, list[int]]] = {}  # tokens to write until the end, and output still to come, reversed
    gc.collect()
    gc.freeze()
    try:
        while waiting or running:
            while waiting and len(running) < workload["max_running"]:
                prompt, output = waiting[0]["prompt"], waiting.popleft()["output"]
                started = perf_counter()
                seq = allocator.admit(prompt, output[0])
                seconds["admission"] += perf_counter() - started
                hits.append(allocator.hit_tokens(seq))
                counts["blocks"] += -(-len(prompt) // size)
                running[seq] = len(prompt) + len(output) - 1, output[:0:-1]
            rows = allocator.rows(running)
            sampled = [running[seq][1].pop() for seq in rows]
            started = perf_counter()
            allocator.step(rows, sampled)
            seconds["append"] += perf_counter() - started
            counts["steps"] += 1
            counts["tokens"] += len(rows)
            for seq in rows:
                num_written, output = running[seq]
                if not output:
                    table = list(allocator.table(seq))
                    assert len(table) == len(set(table)) == -(-num_written // size), "a block table is incomplete"
                    del running[seq]
                    started = perf_counter()
                    allocator.release(seq)
                    seconds["release"] += perf_counter() - started
    finally:
        gc.unfreeze()
    return {"seconds": seconds, "counts": counts, "hits": hits}


def bytes_per_block(make: Callable[[], Allocator], workload: Workload) -> dict[str, float]:
    """Python memory of an allocator over its blocks: just made, and after a workload that has used all of them."""
    num_blocks = workload["num_blocks"]
    assert sum(len(request["prompt"]) // workload["block_size"] for request in workload["requests"]) > num_blocks
    gc.collect()
    tracemalloc.start()
    try:
        allocator = make()
        new = tracemalloc.get_traced_memory()[0]
        drive(allocator, workload)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    return {"new": new / num_blocks, "used": used / num_blocks}


def seconds_each(run: Callable[[], object], repeats: int = 5) -> float:
    """The median time of `run`."""
    times = []
    for _ in range(repeats):
        started = perf_counter()
        run()
        times.append(perf_counter() - started)
    return statistics.median(times)


def _tokens(seed: int | str, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=num_tokens)


def _as_parsed(num_blocks: int, block_size: int, max_running: int, requests: list[Request]) -> Workload:
    workload: Workload = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_running": max_running,
        "requests": requests,
    }
    parsed: Workload = json.loads(json.dumps(workload))
    return parsed
