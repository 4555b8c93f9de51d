"""The invariants that every primitive keeps, and what follows from them between operations.

The names are those of docs/specification.md. I8, I10 and I12 are not here: they are about calls and about the future.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import z3

from kvproof.fuzz.spec.proof_state import State
from kvproof.fuzz.spec.proof_terms import (
    Block,
    Expr,
    Int,
    Node,
    Place,
    Pos,
    Seq,
    is_root,
    is_slot,
    known,
    look_at,
    node_kv,
    none,
    own,
    parent,
    reserved_block,
    size,
    tokens,
)


@dataclass(frozen=True)
class Clause:
    """`body(state, *values)` for all values of the sorts. As a hypothesis it is used for the values that appear in an
    instance of `trigger(state, *values)`: z3 needs to be told where to look."""

    invariant: str
    sorts: tuple[Any, ...]
    body: Callable[..., Expr]
    trigger: Callable[..., list[Expr]]

    def holds(self, state: State) -> Expr:
        values = self._values()
        return z3.ForAll(values, self.body(state, *values), patterns=[z3.MultiPattern(*self.trigger(state, *values))])

    def fails(self, state: State, before: State) -> Expr:
        """For some values: free constants say the same and leave z3 less to find. It looks at the same before."""
        values = self._values()
        return z3.And(z3.Not(self.body(state, *values)), look_at(*self.trigger(before, *values)))

    def _values(self) -> list[Expr]:
        return [z3.FreshConst(sort) for sort in self.sorts]


CLAUSES: list[Clause] = []


def clause(invariant: str, *sorts: Any, trigger: Callable[..., list[Expr]]) -> Callable[[Callable[..., Expr]], None]:
    return lambda body: CLAUSES.append(Clause(invariant, sorts, body, trigger))


# I1: a block's references are the places that hold one: `holder` counts them, without gap or repetition.


@clause("I1", Place, trigger=lambda s, p: [s.held(p)])
def _(s: State, p: Expr) -> Expr:
    rank, b = s.rank(p), s.named(p)
    return z3.Implies(s.held(p), z3.And(rank >= 0, rank < s.refs(b), s.holder(b, rank) == p))


@clause("I1", Block, Int, trigger=lambda s, b, k: [s.holder(b, k)])
def _(s: State, b: Expr, k: Expr) -> Expr:
    p = s.holder(b, k)
    return z3.Implies(z3.And(k >= 0, k < s.refs(b)), z3.And(s.held(p), s.named(p) == b, s.rank(p) == k))


# I2: both lists are sets, and are exactly the unreferenced blocks, by content.


@clause("I2", Block, trigger=lambda s, b: [s.refs(b)])
def _(s: State, b: Expr) -> Expr:
    free = z3.And(s.refs(b) == 0, z3.Not(reserved_block(b)))
    return z3.And(
        s.refs(b) >= 0,
        s.on_empty(b) == z3.If(z3.And(free, s.content(b) == none), 1, 0),
        s.on_cached(b) == z3.If(z3.And(free, s.content(b) != none), 1, 0),
        z3.Implies(reserved_block(b), z3.And(s.refs(b) == 0, s.content(b) == none)),
    )


# I3: pool and index agree, a live identity is the only one of its kind, and no identity is given out twice.


@clause("I3", Block, trigger=lambda s, b: [s.content(b)])
def _(s: State, b: Expr) -> Expr:
    n = s.content(b)
    return z3.And(
        z3.Implies(n != none, z3.And(s.born(n), z3.Not(is_root(n)))),
        s.orphan(b) == z3.And(n != none, z3.Not(s.alive(n))),
    )


@clause("I3", Node, Block, trigger=lambda s, n, b: [s.carried(n, b)])
def _(s: State, n: Expr, b: Expr) -> Expr:
    return s.carried(n, b) == z3.If(z3.And(s.alive(n), s.content(b) == n), 1, 0)


@clause("I3", Node, trigger=lambda s, n: [s.alive(n)])
def _(s: State, n: Expr) -> Expr:
    carried = s.content(s.carrier(n)) == n
    return z3.Implies(s.alive(n), z3.And(s.born(n), n != none, z3.Not(is_root(n)), z3.Or(carried, s.dying(n))))


@clause("I3", Node, Node, trigger=lambda s, n, m: [s.alive(n), s.alive(m)])
def _(s: State, n: Expr, m: Expr) -> Expr:
    same = z3.And(parent(n) == parent(m), tokens(n) == tokens(m))
    return z3.Implies(z3.And(s.alive(n), s.alive(m), same), n == m)


# I4: a live node's parent is live, or its own end is on the list.


@clause("I4", Node, trigger=lambda s, n: [s.alive(n)])
def _(s: State, n: Expr) -> Expr:
    return z3.Implies(s.alive(n), z3.Or(is_root(parent(n)), s.alive(parent(n)), s.dying(n)))


@clause("I4", Node, trigger=lambda s, n: [s.dying(n)])
def _(s: State, n: Expr) -> Expr:
    return z3.Implies(s.dying(n), s.alive(n))


# I5: a slot that will be written lies in a block with one reference and no content.


@clause("I5", Seq, Int, trigger=lambda s, q, i: [s.held(Place.entry(q, i))])
def _(s: State, q: Expr, i: Expr) -> Expr:
    b = s.block(q, i)
    return z3.Implies(s.is_to_be_written(q, i), z3.And(s.refs(b) == 1, s.content(b) == none))


# I6: every slot of a block with content holds what the content says.


@clause("I6", Block, Int, trigger=lambda s, b, j: [s.content(b), is_slot(j)])
def _(s: State, b: Expr, j: Expr) -> Expr:
    n = s.content(b)
    return z3.Implies(z3.And(n != none, is_slot(j)), s.memory(b, j) == node_kv(n, j))


# I7: a table covers its sequence: the entries from `gone` to `length` hold a reference, no others do.


@clause("I7", Seq, trigger=lambda s, q: [s.length(q)])
def _(s: State, q: Expr) -> Expr:
    computed, reserved = s.computed(q), s.reserved(q)
    in_block = [z3.And(p.block >= 0, p.slot >= 0, p.slot < size) for p in (computed, reserved)]
    ordered = z3.And(computed.upto(reserved), computed.upto(known(s.text(q))))
    covered = z3.And(s.length(q) == reserved.blocks(), s.gone(q) >= 0, s.gone(q) <= computed.block)
    return z3.And(*in_block, ordered, covered)


@clause("I7", Seq, Int, trigger=lambda s, q, i: [Place.entry(q, i)])
def _(s: State, q: Expr, i: Expr) -> Expr:
    return s.held(Place.entry(q, i)) == z3.And(s.gone(q) <= i, i < s.length(q))


# I13: a computed position reads as the sequence's own text up to there. With it, about copy orders: a block that waits
# for its copy has no content and is nobody's full block.


@clause("I13", Seq, Int, Int, trigger=lambda s, q, i, j: [s.held(Place.entry(q, i)), is_slot(j)])
def _(s: State, q: Expr, i: Expr, j: Expr) -> Expr:
    computed = z3.And(s.held(Place.entry(q, i)), is_slot(j), Pos(i, j).before(s.computed(q)))
    return z3.Implies(computed, s.read(s.block(q, i), j) == own(s.text(q), i, j))


@clause("copies", Block, trigger=lambda s, b: [s.pending(b)])
def _(s: State, b: Expr) -> Expr:
    return z3.Implies(s.pending(b), s.content(b) == none)


@clause("copies", Seq, Int, trigger=lambda s, q, i: [s.held(Place.entry(q, i))])
def _(s: State, q: Expr, i: Expr) -> Expr:
    full = z3.And(s.held(Place.entry(q, i)), i < s.computed(q).block)
    return z3.Implies(full, z3.Not(s.pending(s.block(q, i))))


# I14: what stood in a table when a step was launched keeps a reference until the step has retired.


@clause("I14", Int, Block, trigger=lambda s, f, b: [s.keeper(f, b)])
def _(s: State, f: Expr, b: Expr) -> Expr:
    p = s.keeper(f, b)
    entry = z3.And(Place.is_entry(p), s.flight(Place.seq(p)) >= f)
    parked = z3.And(Place.is_parked(p), Place.step(p) >= f)
    return z3.Implies(z3.And(s.in_flight(f), s.used(f, b)), z3.And(s.held(p), s.named(p) == b, z3.Or(entry, parked)))


@clause("I14", Seq, trigger=lambda s, q: [s.flight(q)])
def _(s: State, q: Expr) -> Expr:
    return z3.And(s.flight(q) < s.launched, s.oldest >= 0, s.oldest <= s.launched)


@clause("I14", Place, trigger=lambda s, p: [s.held(p)])
def _(s: State, p: Expr) -> Expr:
    return z3.Implies(z3.And(s.held(p), Place.is_parked(p)), Place.step(p) < s.launched)


INVARIANTS = tuple(dict.fromkeys(clause.invariant for clause in CLAUSES))


def holds(state: State) -> list[Expr]:
    return [clause.holds(state) for clause in CLAUSES]


def fails(state: State, before: State, invariant: str) -> Expr:
    return z3.Or(*(clause.fails(state, before) for clause in CLAUSES if clause.invariant == invariant))
