"""Reading public request traces: when each prompt arrived, and which blocks it shares with others.

Two formats, told apart by their first line, either of them plain or gzipped:

Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release/traces): a request a line, with `timestamp` (ms),
`input_length` and `hash_ids`, one for each 512-token block of the prompt, a partial last block included.

kv-cache-tester (github.com/callanjfox/kv-cache-tester, traces): a session a line, with `block_size` and `requests`,
each with `t` (s after the session's start), `in` and `hash_ids`, one for each *full* block. A subagent is an entry
with `requests` of its own, which count from its `t`. Ids are local to their session: two sessions share nothing.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NoReturn

from kvproof.allocator.errors import InvalidArgument
from kvproof.allocator.sequence import MAX_LENGTH

MOONCAKE_BLOCK_SIZE = 512
SESSION_SPACING = 60.0  # seconds

GZIP_MAGIC = b"\x1f\x8b"


class TraceError(InvalidArgument):
    """A trace that can't be replayed; the message names the file and, where there is one, the line."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of a trace.

    arrival       seconds after the trace's start
    input_length  tokens in the prompt, at least 1
    blocks        int32, the identities of its `ceil(input_length / block_size)` blocks, numbered from 0 up over the
                  whole trace; blocks are equal, and their prefixes too, when their identities are
    """

    arrival: float
    input_length: int
    blocks: array[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, with blocks of `block_size` tokens."""

    block_size: int
    requests: Iterable[Request]


def read_trace(path: str | Path, *, spacing: float = SESSION_SPACING) -> Trace:
    """Open a trace. Its requests can be iterated once, and are read from the file as that goes on.

    Sessions start `spacing` seconds after each other, in the order of the file, and their requests are interleaved by
    arrival; only the sessions under way are held in memory.

    Raises `TraceError` for what can't be read, now or while iterating, and `InvalidArgument` for the spacing.
    """
    if not 0 <= spacing < math.inf:
        raise InvalidArgument(f"spacing is {spacing}, must be a number of seconds from 0 up")
    records = _records(Path(path))
    first = next(records, None)
    if first is None:
        raise TraceError(f"{path}: there is no request in it")
    records = chain((first,), records)
    if "requests" in first.fields:
        block_size = first.integer("block_size")
        return Trace(block_size, _sessions(records, block_size, spacing))
    return Trace(MOONCAKE_BLOCK_SIZE, _mooncake(records))


class _Record:
    """A JSON object, and its place in the file for messages."""

    def __init__(self, place: str, fields: Any) -> None:
        self.place = place
        if not isinstance(fields, dict):
            self.fail(f"{str(fields)[:40]!r} is not a JSON object")
        self.fields = fields

    def fail(self, message: str) -> NoReturn:
        raise TraceError(f"{self.place}: {message}")

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields:
            self.fail(f"{name} is missing")
        return self.fields[name]

    def integer(self, name: str) -> int:
        value = self[name]
        if type(value) is not int or not 1 <= value <= MAX_LENGTH:
            self.fail(f"{name} is {value!r}, must be an integer from 1 to {MAX_LENGTH}")
        return value

    def time(self, name: str) -> float:
        value = self[name]
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            self.fail(f"{name} is {value!r}, must be a number from 0 up")
        return float(value)

    def entries(self, name: str) -> Iterator[_Record]:
        values = self[name]
        if not isinstance(values, list):
            self.fail(f"{name} is not a list")
        for number, fields in enumerate(values, 1):
            yield _Record(f"{self.place}: {name}[{number}]", fields)


class _Numbering:
    """Numbers the blocks of a trace, one scope of hash ids at a time."""

    def __init__(self, fresh: Callable[[], int]) -> None:
        self._fresh = fresh
        self._numbers = defaultdict[int, int](fresh)

    def blocks(self, record: _Record, input_length: int, block_size: int) -> array[int]:
        ids = record["hash_ids"]
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            record.fail("hash_ids is not a list of integers")
        num_full, num_blocks = input_length // block_size, -(-input_length // block_size)
        if not num_full <= len(ids) <= num_blocks:
            record.fail(
                f"{len(ids)} hash_ids, {input_length} tokens are {num_full} full blocks of {block_size} "
                f"and {num_blocks - num_full} partial"
            )
        blocks = array("i", map(self._numbers.__getitem__, ids))
        if len(ids) < num_blocks:
            blocks.append(self._fresh())  # without an id it is like no other
        return blocks


def _mooncake(records: Iterator[_Record]) -> Iterator[Request]:
    numbering = _Numbering(count().__next__)
    for record in records:
        arrival, length = record.time("timestamp") / 1000, record.integer("input_length")
        yield Request(arrival, length, numbering.blocks(record, length, MOONCAKE_BLOCK_SIZE))


def _sessions(records: Iterator[_Record], block_size: int, spacing: float) -> Iterator[Request]:
    fresh, order = count().__next__, count()
    pending: list[tuple[float, int, Request]] = []  # a heap by arrival, then by order in the file
    for number, record in enumerate(records):
        if record.integer("block_size") != block_size:
            record.fail(f"block_size is {record['block_size']}, but {block_size} in the first session")
        start = number * spacing
        while pending and pending[0][0] < start:
            yield heapq.heappop(pending)[2]
        for request in _session(record, start, block_size, _Numbering(fresh)):
            heapq.heappush(pending, (request.arrival, next(order), request))
    while pending:
        yield heapq.heappop(pending)[2]


def _session(record: _Record, start: float, block_size: int, numbering: _Numbering) -> Iterator[Request]:
    for entry in record.entries("requests"):
        arrival = start + entry.time("t")
        if "requests" in entry.fields:
            yield from _session(entry, arrival, block_size, numbering)
        else:
            length = entry.integer("in")
            yield Request(arrival, length, numbering.blocks(entry, length, block_size))


def _records(path: Path) -> Iterator[_Record]:
    try:
        with path.open("rb") as file:
            gzipped = file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
            lines: Iterable[bytes] = gzip.GzipFile(fileobj=file) if gzipped else file
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse(f"{path}:{number}", line)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"can't read the trace {path}: {error}") from None


def _parse(place: str, line: bytes) -> _Record:
    try:
        return _Record(place, json.loads(line))
    except json.JSONDecodeError as error:
        if b"ContextTokens" in line:
            raise TraceError(
                f"{place}: an Azure trace has lengths and no hash ids: which prompts share a prefix is unknown, "
                "and so is what a cache would find"
            ) from None
        raise TraceError(f"{place}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, an absurd number, absurd nesting
        raise TraceError(f"{place}: not JSON: {error}") from None
