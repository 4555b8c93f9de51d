"""What the inductive proof talks about, and what never changes: the block size, tokens, prefixes and nodes.

Blocks, sequences, nodes and tokens are sorts without a size: what is proved holds for any number of them. Positions are
pairs (block, slot), so that the block size can stay a symbol without any multiplication.

A *place* holds one reference to one block: an entry of a table, a pin, an entry of a step's parked list, or a *hand*,
which is a local variable of the operation that is running.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import z3

Expr = Any  # z3 is untyped where it matters: every operator of an expression returns an expression
Fn = Callable[..., Any]

Int, Bool = z3.IntSort(), z3.BoolSort()
Block, Seq, Node, Text, Prefix, Chunk, Namespace, KV, Receipt = map(
    z3.DeclareSort, ("Block", "Seq", "Node", "Text", "Prefix", "Chunk", "Namespace", "KV", "Receipt")
)
_place = z3.Datatype("Place")
_place.declare("entry", ("seq", Seq), ("at", Int))
_place.declare("pinned", ("receipt", Receipt), ("nth", Int))
_place.declare("parked", ("step", Int), ("number", Int))
_place.declare("hand", ("finger", Int))
Place = _place.create()


class Pos(NamedTuple):
    """A number of tokens, as whole blocks and the slots of one more, or the position behind that many."""

    block: Expr
    slot: Expr

    def before(self, other: Pos) -> Expr:
        return z3.Or(self.block < other.block, z3.And(self.block == other.block, self.slot < other.slot))

    def upto(self, other: Pos) -> Expr:
        return z3.Not(other.before(self))

    def is_(self, other: Pos) -> Expr:
        return z3.And(self.block == other.block, self.slot == other.slot)

    def blocks(self) -> Expr:
        """How many blocks that many tokens need."""
        return self.block + z3.If(self.slot > 0, 1, 0)


def choose(condition: Expr, yes: Any, no: Any) -> Any:
    if isinstance(yes, Pos):
        return Pos(*(z3.If(condition, a, b) for a, b in zip(yes, no, strict=True)))
    return z3.If(condition, yes, no)


def put(f: Fn, key: Expr | tuple[Expr, ...], value: Any) -> Fn:
    """`f`, but with `value` at `key`."""
    keys = key if isinstance(key, tuple) else (key,)
    return lambda *args: choose(z3.And(*(a == k for a, k in zip(args, keys, strict=True))), value, f(*args))


def look_at(*terms: Expr) -> Expr:
    """True. z3 uses a hypothesis for the terms that it has seen, and this shows it some."""
    return z3.And(*(z3.Function(f"seen_{term.sort()}", term.sort(), Bool)(term) for term in terms))


def earlier(a: Pos, b: Pos) -> Pos:
    first: Pos = choose(a.before(b), a, b)
    return first


size: Expr = z3.Int("block_size")
is_slot = z3.Function("is_slot", Int, Bool)
reserved_block = z3.Function("reserved_block", Block, Bool)  # the null block: it takes no part

kv = z3.Function("kv", Prefix, Chunk, Int, KV)  # of slot j of a block with these tokens after that prefix
_kv_prefix, _kv_chunk = z3.Function("kv_prefix", KV, Prefix), z3.Function("kv_chunk", KV, Chunk)
kv_namespace = z3.Function("kv_namespace", KV, Namespace)
extend_prefix = z3.Function("extend_prefix", Prefix, Chunk, Prefix)
prefix_namespace = z3.Function("prefix_namespace", Prefix, Namespace)
empty_prefix = z3.Function("empty_prefix", Namespace, Prefix)

# A text is the tokens of a sequence at one time, its namespace included.
_known_blocks, _known_slots = z3.Function("known_blocks", Text, Int), z3.Function("known_slots", Text, Int)
namespace = z3.Function("namespace", Text, Namespace)
prefix = z3.Function("prefix", Text, Int, Prefix)  # the first i blocks
chunk = z3.Function("chunk", Text, Int, Chunk)  # the tokens of block i
own = z3.Function("own", Text, Int, Int, KV)  # what the KV of a position is computed from: the text up to there

none = z3.Const("none", Node)
is_root, parent = z3.Function("is_root", Node, Bool), z3.Function("parent", Node, Node)
tokens, node_prefix = z3.Function("tokens", Node, Chunk), z3.Function("node_prefix", Node, Prefix)
root = z3.Function("root", Namespace, Node)


def known(text: Expr) -> Pos:
    return Pos(_known_blocks(text), _known_slots(text))


def node_kv(node: Expr, slot: Expr) -> Expr:
    """What slot `slot` of a block must hold to be published as `node`."""
    return kv(node_prefix(parent(node)), tokens(node), slot)


def axioms() -> list[Expr]:
    last: Expr = z3.Int("last_slot")
    p, c, t, n, x = (z3.Const(*v) for v in (("p", Prefix), ("c", Chunk), ("t", Text), ("n", Node), ("x", Namespace)))
    i, j = z3.Ints("i j")
    return [
        size >= 1,
        last == size - 1,
        z3.ForAll([j], is_slot(j) == z3.And(j >= 0, j < size), patterns=[is_slot(j)]),
        is_slot(0),
        is_slot(last),
        # KV reveals its history: its namespace anywhere, its whole prefix in a block's last slot.
        z3.ForAll([p, c, j], kv_namespace(kv(p, c, j)) == prefix_namespace(p), patterns=[kv(p, c, j)]),
        z3.ForAll(
            [p, c],
            z3.And(_kv_prefix(kv(p, c, last)) == p, _kv_chunk(kv(p, c, last)) == c),
            patterns=[kv(p, c, last)],
        ),
        z3.ForAll([p, c], prefix_namespace(extend_prefix(p, c)) == prefix_namespace(p), patterns=[extend_prefix(p, c)]),
        z3.ForAll([x], prefix_namespace(empty_prefix(x)) == x, patterns=[empty_prefix(x)]),
        z3.ForAll(
            [t],
            z3.And(
                known(t).block >= 0,
                known(t).slot >= 0,
                known(t).slot < size,
                prefix(t, 0) == empty_prefix(namespace(t)),
            ),
            patterns=[known(t).block],
        ),
        z3.ForAll(
            [t, i],
            z3.Implies(
                z3.And(i >= 0, i < known(t).block), prefix(t, i + 1) == extend_prefix(prefix(t, i), chunk(t, i))
            ),
            patterns=[chunk(t, i)],
        ),
        z3.ForAll(
            [t, i, j],
            z3.Implies(
                z3.And(i >= 0, is_slot(j), Pos(i, j).before(known(t))),
                z3.And(
                    kv_namespace(own(t, i, j)) == namespace(t),
                    z3.Implies(i < known(t).block, own(t, i, j) == kv(prefix(t, i), chunk(t, i), j)),
                ),
            ),
            patterns=[own(t, i, j)],
        ),
        z3.Not(is_root(none)),
        z3.ForAll(
            [n],
            z3.Implies(z3.Not(is_root(n)), node_prefix(n) == extend_prefix(node_prefix(parent(n)), tokens(n))),
            patterns=[tokens(n)],
        ),
        z3.ForAll([x], z3.And(is_root(root(x)), node_prefix(root(x)) == empty_prefix(x)), patterns=[root(x)]),
    ]
