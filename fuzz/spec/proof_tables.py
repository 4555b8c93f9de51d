"""The primitives of block tables. A table's references come from a hand, where `take` and `share` put them, and go back
to one or to a step's parked list. See proof_state.Step."""

from __future__ import annotations

from dataclasses import replace

import z3

from kvproof.fuzz.spec.proof_state import NO, Given, State, Step
from kvproof.fuzz.spec.proof_terms import Expr, Int, Place, Pos, choose, earlier, is_slot, known, none, own, put, size


def append_hit(s: State, g: Given) -> Step:
    """`admit` puts a found block behind the other found ones."""
    end, next_end = _ends(s, g)
    guard = {
        "hand": s.is_full_hand(g.hand),
        "end": z3.And(s.computed(g.q).is_(end), s.reserved(g.q).is_(end)),
        "known": next_end.upto(known(s.text(g.q))),
        "found": z3.And(s.content(s.named(g.hand)) == g.n, g.n != none),
        "matches": s.matches(g.n, g.q, end.block),
    }
    return Step(guard, _append(s, g, computed=next_end, reserved=next_end))


def append_fresh(s: State, g: Given) -> Step:
    """`admit` and `reserve` put a taken block behind, and reserve up to somewhere in it."""
    (end, next_end), block = _ends(s, g), s.named(g.hand)
    target = choose(g.target_slot == size, next_end, Pos(end.block, g.target_slot))
    guard = {
        "hand": s.is_full_hand(g.hand),
        "fresh": z3.And(s.refs(block) == 1, s.content(block) == none),
        "full": s.reserved(g.q).is_(end),
        "target": z3.And(g.target_slot > 0, g.target_slot <= size),
    }
    return Step(guard, _append(s, g, computed=s.computed(g.q), reserved=target))


def append_forked(s: State, g: Given) -> Step:
    """`fork` puts what the parent `other` has at the same place behind the child's table."""
    end, next_end = _ends(s, g)
    covered = earlier(next_end, s.computed(g.other))
    guard = {
        "hand": s.is_full_hand(g.hand),
        "end": z3.And(s.computed(g.q).is_(end), s.reserved(g.q).is_(end), g.q != g.other),
        "same block": z3.And(s.named(g.hand) == s.block(g.other, end.block), s.held(Place.entry(g.other, end.block))),
        "same text": s.text(g.q) == s.text(g.other),
        "all computed": s.computed(g.other).is_(s.reserved(g.other)),
    }
    return Step(guard, _append(s, g, computed=covered, reserved=covered))


def append_null(s: State, g: Given) -> Step:
    """`fork` of a sequence whose window has left the entry that comes next."""
    end, next_end = _ends(s, g)
    after = replace(
        s,
        length=put(s.length, g.q, next_end.block),
        gone=put(s.gone, g.q, next_end.block),
        computed=put(s.computed, g.q, next_end),
        reserved=put(s.reserved, g.q, next_end),
    )
    guard = {
        "end": z3.And(s.computed(g.q).is_(end), s.reserved(g.q).is_(end), s.gone(g.q) == end.block),
        "known": next_end.upto(known(s.text(g.q))),
    }
    return Step(guard, after)


def extend(s: State, g: Given) -> Step:
    """`reserve` reserves more of the block that the table ends with."""
    last = s.length(g.q) - 1
    block = s.block(g.q, last)
    target = choose(g.target_slot == size, Pos(last + 1, z3.IntVal(0)), Pos(last, g.target_slot))
    all_computed = s.computed(g.q).is_(s.reserved(g.q))
    guard = {
        "target": z3.And(g.target_slot <= size, s.reserved(g.q).before(target), s.reserved(g.q).block == last),
        "private": z3.Implies(all_computed, s.refs(block) == 1),
        "withdrawn": z3.Implies(all_computed, s.content(block) == none),
    }
    return Step(guard, replace(s, reserved=put(s.reserved, g.q, target)))


def merge(s: State, g: Given) -> Step:
    """`commit` puts a found block in the place of a duplicate."""
    entry = Place.entry(g.q, g.i)
    guard = {
        "hand": s.is_full_hand(g.hand),
        "parking place": _can_drop(s, g),
        "entry": z3.And(s.held(entry), g.i < s.computed(g.q).block),
        "found": z3.And(s.content(s.named(g.hand)) == g.n, g.n != none),
        "matches": s.matches(g.n, g.q, g.i),
    }
    return Step(guard, _exchange(s, g, entry))


def replace_by_copy(s: State, g: Given) -> Step:
    """`reserve` puts the destination of an order in the place of a shared tail."""
    entry = Place.entry(g.q, g.i)
    fresh, tail = s.named(g.hand), s.named(entry)
    guard = {
        "hand": s.is_full_hand(g.hand),
        "parking place": _can_drop(s, g),
        "tail": z3.And(s.held(entry), g.i == s.computed(g.q).block, s.computed(g.q).is_(s.reserved(g.q))),
        "fresh": z3.And(s.refs(fresh) == 1, s.content(fresh) == none),
        "ordered": z3.And(s.pending(fresh), s.source(fresh) == s.copied_from(tail)),
    }
    return Step(guard, _exchange(s, g, entry))


def drop_last(s: State, g: Given) -> Step:
    """`truncate` and `release` cut a block off the table."""
    last = s.length(g.q) - 1
    entry = Place.entry(g.q, last)
    guard = {"hand": s.is_empty_hand(g.hand), "parking place": _can_drop(s, g), "entry": s.held(entry)}
    return Step(guard, replace(_cut(_drop(s, g, entry), g, Pos(last, z3.IntVal(0))), length=put(s.length, g.q, last)))


def drop_last_null(s: State, g: Given) -> Step:
    """The same when a window has left that entry."""
    last = s.length(g.q) - 1
    after = replace(_cut(s, g, Pos(last, z3.IntVal(0))), length=put(s.length, g.q, last), gone=put(s.gone, g.q, last))
    return Step({"null": z3.And(s.length(g.q) > 0, s.gone(g.q) == s.length(g.q))}, after)


def drop_first(s: State, g: Given) -> Step:
    """A window leaves a block behind: the entry names the null block from now on."""
    first = s.gone(g.q)
    entry = Place.entry(g.q, first)
    guard = {
        "hand": s.is_empty_hand(g.hand),
        "parking place": _can_drop(s, g),
        "entry": z3.And(s.held(entry), first < s.computed(g.q).block),
    }
    return Step(guard, replace(_drop(s, g, entry), gone=put(s.gone, g.q, first + 1)))


def shorten(s: State, g: Given) -> Step:
    """`truncate` gives up reserved slots of the block that the table then ends with."""
    last = s.length(g.q) - 1
    target = Pos(last, g.target_slot)
    guard = {
        "target": z3.And(g.target_slot > 0, g.target_slot < size, target.before(s.reserved(g.q))),
        "entry": s.held(Place.entry(g.q, last)),
    }
    return Step(guard, _cut(s, g, target))


def set_text(s: State, g: Given) -> Step:
    """Tokens are appended, or forgotten after `truncate` has cut; a child of `fork` gets its parent's."""
    x, y = z3.FreshConst(Int, "x"), z3.FreshConst(Int, "y")
    same = z3.Implies(
        z3.And(is_slot(y), Pos(x, y).before(s.computed(g.q))), own(s.text(g.q), x, y) == own(g.text, x, y)
    )
    guard = {
        "computed stays": z3.ForAll([x, y], same),
        "known": s.computed(g.q).upto(known(g.text)),
    }
    return Step(guard, replace(s, text=put(s.text, g.q, g.text)))


TABLE_PRIMITIVES = (
    append_hit,
    append_fresh,
    append_forked,
    append_null,
    extend,
    merge,
    replace_by_copy,
    drop_last,
    drop_last_null,
    drop_first,
    shorten,
    set_text,
)


def _ends(s: State, g: Given) -> tuple[Pos, Pos]:
    """The end of the table, before and after a block more."""
    return Pos(s.length(g.q), z3.IntVal(0)), Pos(s.length(g.q) + 1, z3.IntVal(0))


def _append(s: State, g: Given, *, computed: Pos, reserved: Pos) -> State:
    return replace(
        s.moved(g.hand, Place.entry(g.q, s.length(g.q))),
        length=put(s.length, g.q, s.length(g.q) + 1),
        computed=put(s.computed, g.q, computed),
        reserved=put(s.reserved, g.q, reserved),
    )


def _can_drop(s: State, g: Given) -> Expr:
    return z3.Not(s.held(Place.parked(s.flight(g.q), g.k)))


def _drop(s: State, g: Given, entry: Expr) -> State:
    """`Flights.drop`: the entry's reference is parked with the sequence's step or, without one, comes to the hand."""
    step = s.flight(g.q)
    to = z3.If(s.in_flight(step), Place.parked(step, g.k), g.hand)
    return replace(s.moved(entry, to), keeper=lambda f, b: z3.If(s.keeper(f, b) == entry, to, s.keeper(f, b)))


def _exchange(s: State, g: Given, entry: Expr) -> State:
    """The hand's reference goes to the entry, whose own is dropped."""
    block, rank = s.named(g.hand), s.rank(g.hand)
    dropped = _drop(replace(s, held=put(s.held, g.hand, NO)), g, entry)
    return dropped.with_reference(entry, block, rank)


def _cut(s: State, g: Given, end: Pos) -> State:
    return replace(s, reserved=put(s.reserved, g.q, end), computed=put(s.computed, g.q, earlier(s.computed(g.q), end)))
