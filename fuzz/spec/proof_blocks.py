"""The primitives of blocks: what `BlockPool` and `PrefixIndex` do to the state. See proof_state.Step."""

from __future__ import annotations

from dataclasses import replace

import z3

from kvproof.fuzz.spec.proof_state import NO, YES, Given, State, Step
from kvproof.fuzz.spec.proof_terms import Block, Expr, Node, Place, is_root, none, parent, put, tokens

# BlockPool


def take(s: State, g: Given) -> Step:
    """An empty block; `withdraw` has made it empty if it had to be evicted."""
    after = replace(
        s.with_reference(g.hand, g.b, z3.IntVal(0)),
        on_empty=put(s.on_empty, g.b, s.on_empty(g.b) - 1),
        refs=put(s.refs, g.b, z3.IntVal(1)),
    )
    return Step({"empty": s.on_empty(g.b) >= 1, "hand": s.is_empty_hand(g.hand)}, after)


def share(s: State, g: Given) -> Step:
    entry = Place.entry(g.q, g.i)
    computed = z3.And(s.held(entry), s.named(entry) == g.b, z3.Not(s.is_to_be_written(g.q, g.i)))
    after = replace(
        s.with_reference(g.hand, g.b, s.refs(g.b)),
        on_cached=put(s.on_cached, g.b, s.on_cached(g.b) - z3.If(s.refs(g.b) == 0, 1, 0)),
        refs=put(s.refs, g.b, s.refs(g.b) + 1),
    )
    return Step({"readable": z3.Or(s.content(g.b) != none, computed), "hand": s.is_empty_hand(g.hand)}, after)


def release(s: State, g: Given) -> Step:
    block = s.named(g.place)
    last = s.refs(block) - 1
    moved, rank = s.holder(block, last), s.rank(g.place)  # the last reference takes the rank of the one that goes
    findable = s.content(block) != none
    after = replace(
        s,
        refs=put(s.refs, block, last),
        on_empty=put(s.on_empty, block, s.on_empty(block) + z3.If(z3.And(last == 0, z3.Not(findable)), 1, 0)),
        on_cached=put(s.on_cached, block, s.on_cached(block) + z3.If(z3.And(last == 0, findable), 1, 0)),
        held=put(s.held, g.place, NO),
        holder=put(s.holder, (block, rank), moved),
        rank=put(s.rank, moved, rank),
    )
    return Step({"held": s.held(g.place), "loose": s.is_loose(g.place)}, after)


# PrefixIndex, with the pool's half of each step


def publish(s: State, g: Given) -> Step:
    """A full block becomes findable by a new identity."""
    block = s.block(g.q, g.i)
    m = z3.FreshConst(Node, "m")
    found = z3.And(s.alive(m), parent(m) == parent(g.n), tokens(m) == tokens(g.n))
    after = replace(
        s,
        content=put(s.content, block, g.n),
        alive=put(s.alive, g.n, YES),
        born=put(s.born, g.n, YES),
        carried=put(s.carried, (g.n, block), s.carried(g.n, block) + 1),
        carrier=put(s.carrier, g.n, block),
    )
    guard = {
        "entry": s.held(Place.entry(g.q, g.i)),
        "full": g.i < s.computed(g.q).block,
        "active": s.content(block) == none,
        "not found": z3.ForAll([m], z3.Not(found)),
        "new": z3.And(z3.Not(s.born(g.n)), z3.Not(is_root(g.n)), g.n != none),
        "parent": z3.Or(is_root(parent(g.n)), s.alive(parent(g.n))),
        "matches": s.matches(g.n, g.q, g.i),
    }
    return Step(guard, after)


def publish_duplicate(s: State, g: Given) -> Step:
    """A full block becomes findable by an identity that another block carries."""
    block = s.block(g.q, g.i)
    carried = put(s.carried, (g.n, block), s.carried(g.n, block) + 1)
    guard = {
        "entry": s.held(Place.entry(g.q, g.i)),
        "full": g.i < s.computed(g.q).block,
        "active": s.content(block) == none,
        "found": s.alive(g.n),
        "matches": s.matches(g.n, g.q, g.i),
    }
    return Step(guard, replace(s, content=put(s.content, block, g.n), carried=carried))


def withdraw(s: State, g: Given) -> Step:
    """A block loses its content: it is evicted, or about to be written. `b2` is another carrier, if there is one."""
    node = s.content(g.b)
    left = z3.And(g.b2 != g.b, s.carried(node, g.b2) > 0)
    m = z3.FreshConst(Block, "m")
    none_left = z3.ForAll([m], z3.Implies(m != g.b, s.carried(node, m) == 0))
    after = replace(
        _lose_content(s, g.b),
        carried=put(s.carried, (node, g.b), s.carried(node, g.b) - 1),
        carrier=put(s.carrier, node, g.b2),
        dying=put(s.dying, node, z3.Or(s.dying(node), z3.Not(left))),
    )
    guard = {"published": z3.And(node != none, z3.Not(s.orphan(g.b))), "carriers": z3.Or(left, none_left)}
    return Step(guard, after)


def forget(s: State, g: Given) -> Step:
    """`PrefixIndex.remove` takes a node off its list: its children follow, its blocks are left as orphans."""
    after = replace(
        s,
        alive=put(s.alive, g.n, NO),
        dying=lambda m: z3.And(m != g.n, z3.Or(s.dying(m), z3.And(s.alive(m), parent(m) == g.n))),
        orphan=lambda b: z3.Or(s.orphan(b), s.carried(g.n, b) > 0),
        carried=lambda m, b: z3.If(m == g.n, 0, s.carried(m, b)),
    )
    return Step({"dying": s.dying(g.n)}, after)


def withdraw_orphan(s: State, g: Given) -> Step:
    return Step({"orphan": s.orphan(g.b)}, replace(_lose_content(s, g.b), orphan=put(s.orphan, g.b, NO)))


BLOCK_PRIMITIVES = (take, share, release, publish, publish_duplicate, withdraw, forget, withdraw_orphan)


def _lose_content(s: State, block: Expr) -> State:
    """`BlockPool.withdraw`, and `_evict`, which is the same for an unreferenced block."""
    unreferenced = z3.If(s.refs(block) == 0, 1, 0)
    return replace(
        s,
        content=put(s.content, block, none),
        on_cached=put(s.on_cached, block, s.on_cached(block) - unreferenced),
        on_empty=put(s.on_empty, block, s.on_empty(block) + unreferenced),
    )
