"""Compares the design's graph with the code's, state by state and edge by edge, as sets.

Equal numbers of states and transitions could hide two graphs of the same size; equal sets can't. TLC writes the
design's graph down, and every state of it is read into the terms of `kvproof.fuzz.canonical`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvproof.allocator import HashBlock, xxh3_chained
from kvproof.fuzz.canonical import Prefix, SequenceState, State
from kvproof.fuzz.explore import Explorer
from kvproof.fuzz.spec.scopes import Scope
from kvproof.fuzz.spec.tlc import TLCFailed, dump

LabelledEdge = tuple[State, str, State]
"""Two states, and the name of the action that leads from the first to the second. TLC doesn't tell its arguments."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many states and edges both graphs have, and those that only one has."""

    num_states: int
    num_edges: int
    states_in_design_only: frozenset[State]
    states_in_code_only: frozenset[State]
    edges_in_design_only: frozenset[LabelledEdge]
    edges_in_code_only: frozenset[LabelledEdge]

    @property
    def equal(self) -> bool:
        return not (
            self.states_in_design_only
            or self.states_in_code_only
            or self.edges_in_design_only
            or self.edges_in_code_only
        )


def compare(scope: Scope, hash_block: HashBlock = xxh3_chained, *, timeout: float = 3600.0) -> Comparison:
    """Both graphs of `scope` in full. Raises as `tlc.check` does, and `Broken` when the code violates an invariant."""
    # States are numbered, so that an edge is a small thing.
    numbers: dict[State, int] = {}

    def number(state: State) -> int:
        return numbers.setdefault(state, len(numbers))

    states, edges = read_dump(dump(scope, timeout=timeout))
    design = {(number(states[source]), name, number(states[target])) for source, name, target in edges}
    explorer = Explorer(scope, hash_block)
    code = {(number(edge.source), edge.action.name, number(edge.target)) for edge in explorer.edges()}
    by_number = list(numbers)

    def spelt_out(edges: set[tuple[int, str, int]]) -> frozenset[LabelledEdge]:
        return frozenset((by_number[source], name, by_number[target]) for source, name, target in edges)

    in_design, in_code = set(states.values()), explorer.reached_by.keys()
    return Comparison(
        len(in_design & in_code),
        len(design & code),
        frozenset(in_design - in_code),
        frozenset(in_code - in_design),
        spelt_out(design - code),
        spelt_out(code - design),
    )


_STATE = re.compile(r'^(-?\d+) \[label="((?:[^"\\]|\\.)*)"')
_EDGE = re.compile(r'^(-?\d+) -> (-?\d+) \[label="(\w+)"')


def read_dump(dot: str) -> tuple[dict[str, State], set[tuple[str, str, str]]]:
    """The states by TLC's name for them, and the edges as (name, action, name). Raises `TLCFailed` for other text."""
    states: dict[str, State] = {}
    edges: set[tuple[str, str, str]] = set()
    for line in dot.splitlines():
        if found := _EDGE.match(line):
            edges.add((found[1], found[3], found[2]))
        elif found := _STATE.match(line):
            states[found[1]] = _state(found[2].replace("\\\\", "\\").replace("\\n", "\n"))
    if not states:
        raise TLCFailed("TLC's dump of the graph has no state in it")
    return states, edges


def _state(label: str) -> State:
    variables = dict(re.findall(r"^/\\ (\w+) = ((?:.|\n(?!/\\))*)", label, re.M))
    seqs, pool, pins, copies = (_value(variables[name]) for name in ("seq", "pool", "pins", "copies"))
    return State(
        tuple(_sequence_state(seqs[name]) for name in sorted(seqs)),
        tuple(refs for _, refs in sorted(_function(pool["refs"]).items())),
        pool["free"][::-1],
        pool["lru"],
        frozenset((_prefix(node), blocks) for node, blocks in _function(pool["index"]).items()),
        pool["flights"],
        tuple(blocks for _, blocks in sorted(_function(pins).items())),
        tuple(sorted(_function(copies).items())),
    )


def _sequence_state(seq: Any) -> SequenceState | None:
    if seq == "None":
        return None
    return SequenceState(seq["ns"], seq["tokens"], seq["computed"], seq["reserved"], seq["table"], seq["step"])


def _prefix(node: Any) -> Prefix:
    if isinstance(node, str):
        return node, ()
    namespace, tokens = _prefix(node[0])
    return namespace, tokens + node[1]


def _function(value: Any) -> dict[Any, Any]:
    """TLC writes a function from 1..n as the sequence that it is."""
    return value if isinstance(value, dict) else dict(enumerate(value, 1))


_TOKEN = re.compile(r"<<|>>|\|->|:>|@@|[][(),]|\w+")


@lru_cache(maxsize=1 << 16)  # the same pools and sequences come up over and over
def _value(text: str) -> Any:
    """A value as TLC writes it: numbers and names, sequences as tuples, records and functions as dictionaries."""
    return _parse(_TOKEN.findall(text)[::-1])


_CLOSING = {"<<": ">>", "[": "]", "(": ")"}


def _parse(tokens: list[str]) -> Any:
    """The value that the tokens begin with, which are taken from the end of the list."""
    first = tokens.pop()
    if first in _CLOSING:
        items = list(_items(tokens, _CLOSING[first]))
        return tuple(value for value, _ in items) if first == "<<" else dict(items)
    return int(first) if first.isdigit() else first


def _items(tokens: list[str], closing: str) -> Iterator[tuple[Any, Any]]:
    """What stands between brackets: keys and values, or elements and None."""
    while tokens[-1] != closing:
        key, value = _parse(tokens), None
        if tokens[-1] in ("|->", ":>"):
            tokens.pop()
            value = _parse(tokens)
        yield key, value
        if tokens[-1] in (",", "@@"):
            tokens.pop()
    tokens.pop()
