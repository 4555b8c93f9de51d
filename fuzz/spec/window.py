"""Model-checks allocator/spec/WindowKV.tla, the specification of sliding windows, with faults planted in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvproof.fuzz.spec.checks import Check
from kvproof.fuzz.spec.faults import Fault, fault_check
from kvproof.fuzz.spec.scopes import Graph
from kvproof.fuzz.spec.tlc import SPECIFICATION, Verdict, configuration, read_verdict, run_module, set_of

INVARIANTS = ("Present", "Reads", "Shape", "References", "NullUnused")
PROPERTIES = ("GivenBack",)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowScope:
    """`num_blocks` can be handed out, beside the null block. Tokens are `num_tokens` values.

    Blocks and sequences are symmetric here, and `graph` counts no state twice that differs in their names only.
    """

    name: str
    graph: Graph
    num_blocks: int
    block_size: int
    window: int
    num_seqs: int
    num_tokens: int
    max_length: int
    slow: bool = False

    def __str__(self) -> str:
        return self.name


SCOPES = (
    WindowScope(
        name="window of one block",
        graph=Graph(2005, 26550, 16),
        num_blocks=4,
        block_size=2,
        window=2,
        num_seqs=2,
        num_tokens=1,
        max_length=5,
    ),
    WindowScope(
        name="window across blocks",
        graph=Graph(3494, 50632, 17),
        num_blocks=4,
        block_size=2,
        window=3,
        num_seqs=2,
        num_tokens=1,
        max_length=6,
        slow=True,
    ),
    WindowScope(
        name="different tokens",
        graph=Graph(4889, 60890, 11),
        num_blocks=3,
        block_size=2,
        window=2,
        num_seqs=2,
        num_tokens=2,
        max_length=3,
    ),
    WindowScope(
        name="different tokens, alone",
        graph=Graph(10835, 226546, 10),
        num_blocks=3,
        block_size=2,
        window=3,
        num_seqs=1,
        num_tokens=2,
        max_length=4,
        slow=True,
    ),
)

FAULTS = (
    Fault(
        "window off by one",
        "Present",
        "window of one block",
        "Max(0, computed - Window + 1)",
        "Max(0, computed - Window + 2)",
    ),
    Fault(
        "cut to where the window has moved on",
        "Present",
        "window of one block",
        "        /\\ \\A e \\in Hidden(computed) + 1 .. BlocksFor(computed) : q.table[e] # Null\n",
        "",
    ),
    Fault(
        "hits out of sight are not compared",
        "Reads",
        "window of one block",
        "\\A e \\in 1..cached : content",
        "\\A e \\in Hidden(cached * BlockSize) + 1 .. cached : content",
    ),
    Fault(
        "shared tail written in place",
        "Reads",
        "different tokens",
        "copies == dirty /\\ refs[tail] > 1",
        "copies == FALSE",
    ),
    Fault(
        "entries cut off the table",
        "Shape",
        "window of one block",
        "[e \\in DOMAIN @ |-> IF e <= left THEN Null ELSE @[e]]",
        "SubSeq(@, left + 1, Len(@))",
    ),
    Fault(
        "reference kept",
        "References",
        "window of one block",
        "refs' = Count(Real(SubSeq(q.table, 1, left)), {})",
        "refs' = refs",
    ),
    Fault(
        "null block handed out",
        "NullUnused",
        "window of one block",
        "{b \\in Blocks \\ {Null} : refs[b] = 0}",
        "{b \\in Blocks : refs[b] = 0}",
    ),
    Fault(
        "null block shared by a fork",
        "NullUnused",
        "window of one block",
        "refs' = Count({}, Real(seq[s].table))",
        "refs' = Count({}, {seq[s].table[e] : e \\in DOMAIN seq[s].table})",
    ),
    Fault(
        "everything kept",
        "GivenBack",
        "window of one block",
        "Hidden(computed) == Max(0, computed - Window + 1) \\div BlockSize",
        "Hidden(computed) == 0",
    ),
)


def read_window_design() -> str:
    """The text of WindowKV.tla."""
    return (SPECIFICATION / "WindowKV.tla").read_text()


def check_window(
    scope: WindowScope,
    *,
    invariants: Iterable[str] = INVARIANTS,
    properties: Iterable[str] = PROPERTIES,
    design: str | None = None,
    timeout: float = 600.0,
) -> Verdict:
    """Visit every reachable state of `scope`.

    `design` replaces the text of WindowKV.tla. Raises `TLCUnavailable`, `TLCFailed`, or `TimeoutError` after `timeout`
    seconds.
    """
    texts = {"WindowKV.cfg": _window_config(scope, invariants, properties)}
    if design is not None:
        texts["WindowKV.tla"] = design
    return read_verdict(*run_module("WindowKV", texts, timeout=timeout, late=f"TLC has not finished scope {scope}"))


def find(fault: Fault) -> Verdict:
    """Check the faulty design for nothing but what the fault violates."""
    scope = next(scope for scope in SCOPES if scope.name == fault.scope)
    invariants = [name for name in INVARIANTS if name == fault.violates]
    properties = [name for name in PROPERTIES if name == fault.violates]
    design = fault.plant(read_window_design())
    return check_window(scope, invariants=invariants, properties=properties, design=design)


def checks(full: bool) -> Iterator[Check]:
    """A part of `python -m kvproof.fuzz.spec`."""
    for scope in SCOPES:
        if full or not scope.slow:
            verdict = check_window(scope)
            yield Check(
                what=f"{scope}: {verdict.graph.states:,} states, {verdict.graph.transitions:,} transitions",
                right=verdict == Verdict(scope.graph, None, ()),
                detail=f"{verdict.violated} is violated" if verdict.violated else f"recorded are {scope.graph}",
                states=verdict.graph.states,
                transitions=verdict.graph.transitions,
            )
    for fault in FAULTS if full else ():
        yield fault_check(str(fault), fault, find(fault))


def _window_config(scope: WindowScope, invariants: Iterable[str], properties: Iterable[str]) -> str:
    constants = {
        "Blocks": set_of(["null", *(f"b{i}" for i in range(scope.num_blocks))]),
        "Null": "null",
        "None": "None",
        "BlockSize": scope.block_size,
        "Window": scope.window,
        "Seqs": set_of(f"s{i}" for i in range(scope.num_seqs)),
        "Tokens": set_of(range(scope.num_tokens)),
        "MaxLen": scope.max_length,
    }
    return configuration(constants, invariants, properties, "SYMMETRY Symmetry", "VIEW View")
