"""What follows from the invariants in any one state: what the specification promises, and what the operations of
`BlockManager` rely on when they take one primitive after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import z3

from kvproof.fuzz.spec.proof_blocks import take
from kvproof.fuzz.spec.proof_state import Given, State
from kvproof.fuzz.spec.proof_steps import compute
from kvproof.fuzz.spec.proof_terms import (
    Block,
    Expr,
    Node,
    Place,
    Pos,
    Seq,
    chunk,
    is_root,
    is_slot,
    known,
    look_at,
    namespace,
    node_prefix,
    none,
    own,
    parent,
    prefix_namespace,
    reserved_block,
    root,
    tokens,
)


@dataclass(frozen=True)
class Lemma:
    subject: str
    claim: str
    statement: Callable[[State, Given], tuple[Expr, Expr]]  # what is given, and what follows


def _entry(s: State, g: Given) -> Expr:
    return s.held(Place.entry(g.q, g.i))


def _full(s: State, g: Given) -> Expr:
    return z3.And(_entry(s, g), g.i < s.computed(g.q).block)


def _at_rest(s: State) -> Expr:
    """Between operations: no hand holds anything, nothing is left to forget, to withdraw or to release."""
    p, n, b = z3.FreshConst(Place), z3.FreshConst(Node), z3.FreshConst(Block)
    retired = z3.And(Place.is_parked(p), Place.step(p) < s.oldest)
    return z3.And(
        z3.ForAll([p], z3.Not(z3.And(s.held(p), z3.Or(Place.is_hand(p), retired))), patterns=[s.held(p)]),
        z3.ForAll([n], z3.Not(s.dying(n)), patterns=[s.dying(n)]),
        z3.ForAll([b], z3.Not(s.orphan(b)), patterns=[s.orphan(b)]),
    )


# What the specification promises


def reads_its_own_prefix(s: State, g: Given) -> tuple[Expr, Expr]:
    block = s.block(g.q, g.i)
    computed = z3.And(_entry(s, g), is_slot(g.j), Pos(g.i, g.j).before(s.computed(g.q)))
    copied = z3.Not(s.pending(block))
    return z3.And(computed, copied), s.memory(block, g.j) == own(s.text(g.q), g.i, g.j)


def writes_where_nobody_reads(s: State, g: Given) -> tuple[Expr, Expr]:
    entry = Place.entry(g.q, g.i)
    given = z3.And(s.held(entry), s.is_to_be_written(g.q, g.i), s.held(g.place), s.named(g.place) == s.named(entry))
    return given, z3.And(g.place == entry, s.content(s.named(entry)) == none)


def stays_in_its_namespace(s: State, g: Given) -> tuple[Expr, Expr]:
    node = s.content(s.block(g.q, g.i))
    shared = z3.And(_entry(s, g), node != none)
    return shared, prefix_namespace(node_prefix(node)) == namespace(s.text(g.q))


def nothing_is_lost(s: State, g: Given) -> tuple[Expr, Expr]:
    """I11, for block b. A table of length 0 holds nothing by I7."""
    q, p = z3.FreshConst(Seq), z3.FreshConst(Place)
    released = z3.ForAll([q], s.length(q) == 0, patterns=[s.length(q)])
    nothing_else = z3.ForAll([p], z3.Implies(s.held(p), Place.is_entry(p)), patterns=[s.held(p)])
    free = s.on_empty(g.b) + s.on_cached(g.b) == z3.If(reserved_block(g.b), 0, 1)
    look = look_at(s.refs(g.b), s.holder(g.b, 0))
    return z3.And(released, nothing_else, look), z3.And(s.refs(g.b) == 0, free)


def what_is_used_is_not_free(s: State, g: Given) -> tuple[Expr, Expr]:
    look = look_at(s.refs(g.b), s.keeper(g.k, g.b))
    return z3.And(s.in_flight(g.k), s.used(g.k, g.b), look), z3.And(s.on_empty(g.b) == 0, s.on_cached(g.b) == 0)


def owners_at_rest(s: State, g: Given) -> tuple[Expr, Expr]:
    entry = z3.And(Place.at(g.place) >= 0, Place.at(g.place) < s.length(Place.seq(g.place)))
    parked = z3.And(Place.is_parked(g.place), s.in_flight(Place.step(g.place)))
    owner = z3.Or(z3.And(Place.is_entry(g.place), entry), Place.is_pinned(g.place), parked)
    return z3.And(_at_rest(s), s.held(g.place)), z3.And(owner, s.refs(s.named(g.place)) > 0)


def index_at_rest(s: State, g: Given) -> tuple[Expr, Expr]:
    here = s.content(g.b) == g.n
    return z3.And(_at_rest(s), g.n != none), z3.And(
        z3.Implies(here, z3.And(s.alive(g.n), s.carried(g.n, g.b) == 1)),
        z3.Implies(z3.Not(here), s.carried(g.n, g.b) == 0),
        z3.Implies(s.alive(g.n), s.content(s.carrier(g.n)) == g.n),
    )


def parents_at_rest(s: State, g: Given) -> tuple[Expr, Expr]:
    above = parent(g.n)
    found = z3.And(s.alive(above), s.content(s.carrier(above)) == above)
    return z3.And(_at_rest(s), s.alive(g.n)), z3.Or(is_root(above), found)


# What the operations rely on


def first_block_matches(s: State, g: Given) -> tuple[Expr, Expr]:
    """`PrefixCache.find` starts at the root of the sequence's namespace, and compares tokens."""
    text, zero = s.text(g.q), z3.IntVal(0)
    compared = z3.And(parent(g.n) == root(namespace(text)), tokens(g.n) == chunk(text, zero), known(text).block > 0)
    return compared, s.matches(g.n, g.q, zero)


def next_block_matches(s: State, g: Given) -> tuple[Expr, Expr]:
    """... and goes on from the node found before, comparing identity and tokens."""
    text, before = s.text(g.q), parent(g.n)
    found = z3.And(s.matches(before, g.q, g.i), z3.Not(is_root(before)), g.i >= 0, g.i < known(text).block)
    return z3.And(found, tokens(g.n) == chunk(text, g.i + 1)), s.matches(g.n, g.q, g.i + 1)


def table_matches(s: State, g: Given) -> tuple[Expr, Expr]:
    """`PrefixCache.publish` goes on from the node of the block before in the table."""
    node = s.content(s.block(g.q, g.i))
    return z3.And(_full(s, g), node != none), s.matches(node, g.q, g.i)


def taken_is_fresh(s: State, g: Given) -> tuple[Expr, Expr]:
    step = take(s, g)
    unowned = z3.Implies(s.held(g.place), s.named(g.place) != g.b)
    fresh = z3.And(step.after.refs(g.b) == 1, step.after.content(g.b) == none)
    return z3.And(*step.guard.values(), look_at(s.refs(g.b))), z3.And(unowned, fresh, z3.Not(reserved_block(g.b)))


def filled_is_active(s: State, g: Given) -> tuple[Expr, Expr]:
    """A block that `commit` has just filled can be published."""
    step = compute(s, g)
    block = s.block(g.q, s.computed(g.q).block)
    return z3.And(*step.guard.values()), z3.And(s.content(block) == none, s.refs(block) == 1)


def all_computed_can_be_shared(s: State, g: Given) -> tuple[Expr, Expr]:
    """`fork` refuses while slots are reserved that are not computed."""
    return s.computed(g.q).is_(s.reserved(g.q)), z3.Not(s.is_to_be_written(g.q, g.i))


def full_can_be_shared(s: State, g: Given) -> tuple[Expr, Expr]:
    """`pin` takes full computed blocks only."""
    return _full(s, g), z3.Not(s.is_to_be_written(g.q, g.i))


LEMMAS = (
    Lemma("promise", "I13: a computed position reads its own prefix", reads_its_own_prefix),
    Lemma("promise", "I5: a slot is written where nobody reads", writes_where_nobody_reads),
    Lemma("promise", "I9: a table stays in its namespace", stays_in_its_namespace),
    Lemma("promise", "I11: all released, all free", nothing_is_lost),
    Lemma("promise", "I14: what a step uses is not free", what_is_used_is_not_free),
    Lemma("promise", "I1 at rest: every reference has an owner", owners_at_rest),
    Lemma("promise", "I3 at rest: pool and index agree", index_at_rest),
    Lemma("promise", "I4 at rest: parents are findable", parents_at_rest),
    Lemma("admit, commit", "the first block found matches", first_block_matches),
    Lemma("admit, commit", "the next block found matches", next_block_matches),
    Lemma("commit", "the block before in the table matches", table_matches),
    Lemma("commit", "a block just filled can be published", filled_is_active),
    Lemma("admit, reserve", "a block just taken is fresh", taken_is_fresh),
    Lemma("fork", "what is all computed can be shared", all_computed_can_be_shared),
    Lemma("pin", "a full computed block can be shared", full_can_be_shared),
)
