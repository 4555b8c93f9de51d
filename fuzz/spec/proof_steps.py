"""The primitives of memory, copy orders, pins and steps in flight. See proof_state.Step."""

from __future__ import annotations

from dataclasses import replace

import z3

from kvproof.fuzz.spec.proof_state import NO, YES, Given, State, Step
from kvproof.fuzz.spec.proof_terms import Block, Expr, Place, Pos, choose, is_slot, known, none, own, put, size


def write(s: State, g: Given) -> Step:
    """The runner writes anything, right or wrong, to a slot that is reserved and not computed."""
    block, at = s.block(g.q, g.i), Pos(g.i, g.j)
    x = z3.FreshConst(Block, "x")
    guard = {
        "entry": z3.And(s.held(Place.entry(g.q, g.i)), is_slot(g.j)),
        "not computed": s.computed(g.q).upto(at),
        "reserved": at.before(s.reserved(g.q)),
        "no destination": z3.Not(s.pending(block)),
        "no source": z3.ForAll([x], z3.Implies(s.pending(x), s.source(x) != block)),
    }
    return Step(guard, replace(s, memory=put(s.memory, (block, g.j), g.value)))


def compute(s: State, g: Given) -> Step:
    """`commit` believes that the KV of one more token is written."""
    at = s.computed(g.q)
    block = s.block(g.q, at.block)
    following = choose(at.slot + 1 == size, Pos(at.block + 1, z3.IntVal(0)), Pos(at.block, at.slot + 1))
    guard = {
        "reserved": at.before(s.reserved(g.q)),
        "known": at.before(known(s.text(g.q))),
        "written": s.memory(block, at.slot) == own(s.text(g.q), at.block, at.slot),
        "no destination": z3.Not(s.pending(block)),
    }
    return Step(guard, replace(s, computed=put(s.computed, g.q, following)))


def order_copy(s: State, g: Given) -> Step:
    """`reserve` orders a copy of a shared tail to a block that it has just taken."""
    fresh, tail = s.named(g.hand), s.block(g.q, g.i)
    after = replace(s, pending=put(s.pending, fresh, YES), source=put(s.source, fresh, s.copied_from(tail)))
    guard = {"hand": s.is_full_hand(g.hand), "fresh": z3.And(s.refs(fresh) == 1, s.content(fresh) == none)}
    return Step(guard, after)


def carry_out_copies(s: State, g: Given) -> Step:
    """All at once: every source is read before any destination is written."""
    return Step({}, replace(s, memory=s.read, pending=lambda _: NO))


def pin(s: State, g: Given) -> Step:
    to = Place.pinned(g.receipt, g.k)
    return Step({"hand": s.is_full_hand(g.hand), "unused": z3.Not(s.held(to))}, s.moved(g.hand, to))


def launch(s: State, g: Given) -> Step:
    """A step begins; `entry_of` names a table entry for each block that it uses."""
    step = s.launched

    def uses(b: Expr) -> Expr:
        entry = g.entry_of(b)
        return z3.And(Place.is_entry(entry), s.held(entry), s.named(entry) == b, g.batch(Place.seq(entry)))

    after = replace(
        s,
        launched=step + 1,
        flight=lambda q: z3.If(g.batch(q), step, s.flight(q)),
        used=lambda f, b: z3.If(f == step, uses(b), s.used(f, b)),
        keeper=lambda f, b: z3.If(f == step, g.entry_of(b), s.keeper(f, b)),
    )
    return Step({}, after)


def retire(s: State, g: Given) -> Step:
    """The oldest step ends, and what is parked with it can be released."""
    return Step({"in flight": s.oldest < s.launched}, replace(s, oldest=s.oldest + 1))


def leave_flight(s: State, g: Given) -> Step:
    """The last thing that `release` does to a sequence."""
    return Step({"no blocks": s.length(g.q) == 0}, replace(s, flight=put(s.flight, g.q, z3.IntVal(-1))))


STEP_PRIMITIVES = (write, compute, order_copy, carry_out_copies, pin, launch, retire, leave_flight)
