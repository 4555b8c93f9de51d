"""The guards are no empty promises: runs from the initial state in which every primitive is taken at least once.

z3 finds a block size, tokens and KV for which every guard along a run holds. So each primitive is possible in a state
that can be reached, and the axioms have a model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import z3

from kvproof.fuzz.spec.proof_state import Primitive, State, anything, initial_state
from kvproof.fuzz.spec.proof_terms import (
    Block,
    Chunk,
    Expr,
    Namespace,
    Node,
    Place,
    Prefix,
    Seq,
    Text,
    prefix,
    reserved_block,
    size,
)

B0, B1, B2 = BLOCKS = z3.Consts("B0 B1 B2", Block)
A, B = SEQS = z3.Consts("A B", Seq)
N1, N2 = NODES = z3.Consts("N1 N2", Node)
TEXT = z3.Const("T", Text)
HAND = Place.hand(0)


@dataclass(frozen=True)
class Run:
    name: str
    block_size: int
    steps: tuple[tuple[str, dict[str, Any]], ...]


def _computed(q: Expr, i: int, b: Expr) -> tuple[tuple[str, dict[str, Any]], ...]:
    """A block of one slot, taken, written and computed."""
    return (
        ("take", {"b": b, "hand": HAND}),
        ("append_fresh", {"q": q, "hand": HAND, "target_slot": z3.IntVal(1)}),
        ("write", {"q": q, "i": z3.IntVal(i), "j": z3.IntVal(0)}),
        ("compute", {"q": q}),
    )


def _dropped(q: Expr) -> tuple[tuple[str, dict[str, Any]], ...]:
    return (("drop_last", {"q": q, "hand": HAND}), ("release", {"place": HAND}))


FIRST = z3.IntVal(0)
RUNS = (
    Run(
        "a merge, a hit and an eviction",
        1,
        (
            ("set_text", {"q": A, "text": TEXT}),
            *_computed(A, 0, B0),
            ("publish", {"q": A, "i": FIRST, "n": N1}),
            ("set_text", {"q": B, "text": TEXT}),
            *_computed(B, 0, B1),
            ("share", {"b": B0, "hand": HAND}),
            ("merge", {"q": B, "i": FIRST, "n": N1, "hand": HAND}),
            ("release", {"place": HAND}),
            *_dropped(A),
            *_dropped(B),
            ("share", {"b": B0, "hand": HAND}),
            ("append_hit", {"q": B, "n": N1, "hand": HAND}),
            *_dropped(B),
            ("withdraw", {"b": B0}),
            ("forget", {"n": N1}),
            ("take", {"b": B0, "hand": HAND}),
        ),
    ),
    Run(
        "a duplicate and an orphan",
        1,
        (
            ("set_text", {"q": A, "text": TEXT}),
            *_computed(A, 0, B0),
            ("publish", {"q": A, "i": FIRST, "n": N1}),
            *_computed(A, 1, B1),
            ("publish", {"q": A, "i": z3.IntVal(1), "n": N2}),
            ("set_text", {"q": B, "text": TEXT}),
            *_computed(B, 0, B2),
            ("publish_duplicate", {"q": B, "i": FIRST, "n": N1}),
            ("withdraw", {"b": B0, "b2": B2}),
            ("withdraw", {"b": B2}),
            ("forget", {"n": N1}),
            ("forget", {"n": N2}),
            ("withdraw_orphan", {"b": B1}),
        ),
    ),
    Run(
        "a fork and its copy",
        2,
        (
            ("set_text", {"q": A, "text": TEXT}),
            *_computed(A, 0, B0),
            ("set_text", {"q": B, "text": TEXT}),
            ("share", {"b": B0, "q": A, "i": FIRST, "hand": HAND}),
            ("append_forked", {"q": B, "other": A, "hand": HAND}),
            ("take", {"b": B1, "hand": HAND}),
            ("order_copy", {"q": B, "i": FIRST, "hand": HAND}),
            ("replace_by_copy", {"q": B, "i": FIRST, "hand": HAND}),
            ("release", {"place": HAND}),
            ("extend", {"q": B, "target_slot": z3.IntVal(2)}),
            ("carry_out_copies", {}),
            ("write", {"q": B, "i": FIRST, "j": z3.IntVal(1)}),
            ("shorten", {"q": B, "target_slot": z3.IntVal(1)}),
        ),
    ),
    Run(
        "a window, a step in flight and a pin",
        1,
        (
            ("set_text", {"q": A, "text": TEXT}),
            *_computed(A, 0, B0),
            ("share", {"b": B0, "q": A, "i": FIRST, "hand": HAND}),
            ("pin", {"hand": HAND}),
            ("launch", {}),
            ("drop_first", {"q": A, "k": FIRST, "hand": HAND}),
            ("retire", {}),
            ("release", {"place": Place.parked(0, 0)}),
            ("set_text", {"q": B, "text": TEXT}),
            ("append_null", {"q": B}),
            ("drop_last_null", {"q": A}),
            ("leave_flight", {"q": A}),
        ),
    ),
)


def enough() -> list[Expr]:
    """So many things of each kind are enough, which lets z3 build a model: one namespace, one token, three prefixes."""
    sizes = {Namespace: 1, Chunk: 1, Prefix: 3, Text: 1}
    return [
        *(_at_most(count, sort) for sort, count in sizes.items()),
        z3.Distinct(*(prefix(TEXT, i) for i in range(3))),
    ]


def _at_most(count: int, sort: Expr) -> Expr:
    x, things = z3.FreshConst(sort), [z3.FreshConst(sort) for _ in range(count)]
    return z3.ForAll([x], z3.Or(*(x == thing for thing in things)))


def guards(run: Run, primitives: dict[str, Primitive]) -> list[Expr]:
    """What must hold for the run to be possible."""
    state = initial_state()
    conditions = [size == run.block_size, *(z3.Distinct(*values) for values in (BLOCKS, SEQS, NODES))]
    conditions += [z3.Not(reserved_block(b)) for b in BLOCKS]
    for name, given in run.steps:
        step = primitives[name](state, replace(anything(), **given))
        conditions += step.guard.values()
        state = _remembering(step.after)
    return conditions


def _remembering(state: State) -> State:
    """The same state, asked no question twice: each asks the state before several."""
    return replace(state, **{f.name: _remember(getattr(state, f.name)) for f in fields(state)})


def _remember(f: Any) -> Any:
    if not callable(f) or isinstance(f, z3.AstRef):
        return f
    answers: dict[tuple[int, ...], Any] = {}

    def asked(*args: Expr) -> Any:
        key = tuple(arg.get_id() for arg in args)
        if key not in answers:
            answers[key] = (f(*args), args)  # an id is good as long as its term lives
        return answers[key][0]

    return asked
