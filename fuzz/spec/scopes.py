"""The scopes at which the specification is checked, and the size of the state graph at each.

A scope is small enough for every reachable state to be visited. Each switches on a few features; together they cover
all. The graphs were measured with TLC, and the code's own graph must be the same: see allocator/spec/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Graph(NamedTuple):
    """Everything reachable. `depth` is the number of levels of a breadth-first search, the initial state being one."""

    states: int
    transitions: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a pool has and its callers may do.

    Tokens are 0 to `num_tokens` - 1. A prompt has at most `max_prompt` of them and a sequence at most `max_length`.
    `ahead` slots may be reserved for tokens that are not known yet; `chunked` admissions also come with limit=1.
    """

    name: str
    covers: str
    graph: Graph
    num_blocks: int
    block_size: int
    max_prompt: int
    max_length: int
    num_seqs: int = 2
    num_tokens: int = 1
    num_namespaces: int = 1
    ahead: int = 0
    chunked: bool = False
    merge: bool = True
    forks: bool = False
    truncates: bool = False
    num_pins: int = 0
    max_flights: int = 0
    slow: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def limits(self) -> tuple[int, ...]:
        """The limits that admissions come with; `max_prompt` is as good as none."""
        return (1, self.max_prompt) if self.chunked else (self.max_prompt,)


SCOPES = (
    Scope(
        name="prefixes",
        covers="hits, publication, merged duplicates, eviction; different tokens for the hashes to mix up",
        graph=Graph(2794, 13496, 10),
        num_blocks=2,
        block_size=1,
        num_tokens=2,
        max_prompt=2,
        max_length=3,
    ),
    Scope(
        name="chunks",
        covers="prompts admitted and committed in pieces, slots ahead of the known tokens",
        graph=Graph(4566, 32376, 12),
        num_blocks=3,
        block_size=2,
        max_prompt=3,
        max_length=3,
        ahead=1,
        chunked=True,
    ),
    Scope(
        name="duplicates",
        covers="equal content kept in several blocks",
        graph=Graph(3444, 16440, 15),
        num_blocks=3,
        block_size=1,
        max_prompt=2,
        max_length=3,
        merge=False,
    ),
    Scope(
        name="namespaces",
        covers="equal tokens that may not be shared",
        graph=Graph(2814, 14400, 13),
        num_blocks=3,
        block_size=1,
        num_namespaces=2,
        max_prompt=2,
        max_length=2,
    ),
    Scope(
        name="orphans",
        covers="truncation into a published block whose descendants are cached",
        graph=Graph(1164, 9120, 23),
        num_blocks=3,
        block_size=2,
        num_seqs=1,
        max_prompt=5,
        max_length=6,
        truncates=True,
    ),
    Scope(
        name="rewrites",
        covers="truncation, then other tokens in the place of those that were cut",
        graph=Graph(3162, 15948, 15),
        num_blocks=3,
        block_size=1,
        num_seqs=1,
        num_tokens=2,
        max_prompt=2,
        max_length=3,
        truncates=True,
    ),
    Scope(
        name="copies",
        covers="forks, copy on write, withdrawal in place, copy orders that meet",
        graph=Graph(3822, 26784, 21),
        num_blocks=2,
        block_size=2,
        num_seqs=3,
        max_prompt=1,
        max_length=2,
        forks=True,
        truncates=True,
    ),
    Scope(
        name="pins",
        covers="pins, beside forks and truncation",
        graph=Graph(2808, 21078, 21),
        num_blocks=2,
        block_size=2,
        max_prompt=3,
        max_length=3,
        forks=True,
        truncates=True,
        num_pins=1,
    ),
    Scope(
        name="flights",
        covers="two steps in flight, with blocks parked by each",
        graph=Graph(2858, 12776, 21),
        num_blocks=2,
        block_size=1,
        max_prompt=2,
        max_length=2,
        max_flights=2,
    ),
    Scope(
        name="flights with forks",
        covers="merged and copied-away blocks parked by a step in flight",
        graph=Graph(5954, 33590, 18),
        num_blocks=2,
        block_size=2,
        max_prompt=2,
        max_length=3,
        forks=True,
        max_flights=1,
    ),
    Scope(
        name="long prefixes",
        covers="as prefixes, with a block more",
        graph=Graph(8130, 47088, 13),
        num_blocks=3,
        block_size=1,
        num_tokens=2,
        max_prompt=2,
        max_length=2,
        slow=True,
    ),
    Scope(
        name="forks",
        covers="forks and copy on write with blocks to spare",
        graph=Graph(11256, 62322, 30),
        num_blocks=3,
        block_size=2,
        max_prompt=2,
        max_length=3,
        forks=True,
        slow=True,
    ),
    Scope(
        name="everything",
        covers="all features at once, duplicates kept",
        graph=Graph(37478, 301924, 27),
        num_blocks=2,
        block_size=2,
        max_prompt=2,
        max_length=3,
        merge=False,
        forks=True,
        truncates=True,
        num_pins=1,
        max_flights=1,
        slow=True,
    ),
)


def scope_named(name: str) -> Scope:
    """Raises `KeyError` when there is none."""
    return {scope.name: scope for scope in SCOPES}[name]
