"""The state of the allocator, and what a primitive transition is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import z3

from kvproof.fuzz.spec.proof_terms import (
    KV,
    Block,
    Bool,
    Expr,
    Fn,
    Int,
    Node,
    Place,
    Pos,
    Receipt,
    Seq,
    Text,
    choose,
    chunk,
    node_prefix,
    none,
    parent,
    prefix,
    put,
    reserved_block,
    tokens,
)

YES, NO = z3.BoolVal(True), z3.BoolVal(False)


@dataclass(frozen=True)
class State:
    """Every field is a function; a transition gives a new one. Fields called witnesses are the proof's own."""

    # pool
    refs: Fn  # Block -> Int
    content: Fn  # Block -> Node, or none
    on_empty: Fn  # Block -> Int: how often it stands on the list of empty blocks
    on_cached: Fn  # Block -> Int: how often the eviction policy has it
    # references
    held: Fn  # Place -> Bool: there is a reference in it
    named: Fn  # Place -> Block
    holder: Fn  # Block, Int -> Place: a block's references, counted from 0; a witness, and so is its inverse:
    rank: Fn  # Place -> Int
    # index
    alive: Fn  # Node -> Bool
    born: Fn  # Node -> Bool: identities that have been given out
    carried: Fn  # Node, Block -> Int: how often the block stands in the node's list
    carrier: Fn  # Node -> Block: one that carries it; a witness
    dying: Fn  # Node -> Bool: to be forgotten before the operation ends
    orphan: Fn  # Block -> Bool: to be withdrawn before the operation ends
    # sequences
    text: Fn  # Seq -> Text
    computed: Fn  # Seq -> Pos
    reserved: Fn  # Seq -> Pos
    length: Fn  # Seq -> Int: of the table
    gone: Fn  # Seq -> Int: leading entries that a window has left
    flight: Fn  # Seq -> Int: the step it was last launched in, or -1
    # memory and copy orders
    memory: Fn  # Block, Int -> KV
    pending: Fn  # Block -> Bool: an order with this destination is not carried out yet
    source: Fn  # Block -> Block
    # steps
    oldest: Expr  # Int: the oldest step in flight
    launched: Expr  # Int: how many have been
    used: Fn  # Int, Block -> Bool: the block stood in a table when the step was launched; for I14 only
    keeper: Fn  # Int, Block -> Place: the reference that keeps it; a witness

    def block(self, seq: Expr, i: Expr) -> Expr:
        return self.named(Place.entry(seq, i))

    def read(self, block: Expr, slot: Expr) -> Expr:
        """What a step finds, which is run after the copies that were ordered before it."""
        return self.memory(self.copied_from(block), slot)

    def is_to_be_written(self, seq: Expr, i: Expr) -> Expr:
        """Entry `i` has a slot that is reserved and not computed."""
        computed, start = self.computed(seq), Pos(i, z3.IntVal(0))
        behind = choose(start.before(computed), computed, start)
        return z3.And(computed.block <= i, i < self.length(seq), behind.before(self.reserved(seq)))

    def in_flight(self, step: Expr) -> Expr:
        return z3.And(self.oldest <= step, step < self.launched)

    def copied_from(self, block: Expr) -> Expr:
        """The block that has the content of `block`: not itself while it waits for its own copy."""
        return z3.If(self.pending(block), self.source(block), block)

    def with_reference(self, place: Expr, block: Expr, rank: Expr) -> State:
        """A reference to `block` in `place`."""
        return replace(
            self,
            held=put(self.held, place, YES),
            named=put(self.named, place, block),
            rank=put(self.rank, place, rank),
            holder=put(self.holder, (block, rank), place),
        )

    def moved(self, origin: Expr, to: Expr) -> State:
        """The reference in `origin` goes to the empty place `to`."""
        emptied = replace(self, held=put(self.held, origin, NO))
        return emptied.with_reference(to, self.named(origin), self.rank(origin))

    def is_empty_hand(self, place: Expr) -> Expr:
        return z3.And(Place.is_hand(place), z3.Not(self.held(place)))

    def is_full_hand(self, place: Expr) -> Expr:
        return z3.And(Place.is_hand(place), self.held(place))

    def is_loose(self, place: Expr) -> Expr:
        """Nobody counts on this reference any more."""
        retired = z3.And(Place.is_parked(place), Place.step(place) < self.oldest)
        return z3.Or(Place.is_hand(place), Place.is_pinned(place), retired)

    def matches(self, node: Expr, seq: Expr, i: Expr) -> Expr:
        """What the index compares to find `node` as block `i`: its parent is right by the lemmas "parent"."""
        text = self.text(seq)
        return z3.And(node_prefix(parent(node)) == prefix(text, i), tokens(node) == chunk(text, i))


def any_state() -> State:
    f: Callable[..., Fn] = z3.Function

    def position(name: str) -> Fn:
        blocks, slots = f(f"{name}_blocks", Seq, Int), f(f"{name}_slots", Seq, Int)
        return lambda seq: Pos(blocks(seq), slots(seq))

    return State(
        refs=f("refs", Block, Int),
        content=f("content", Block, Node),
        on_empty=f("on_empty", Block, Int),
        on_cached=f("on_cached", Block, Int),
        held=f("held", Place, Bool),
        named=f("named", Place, Block),
        holder=f("holder", Block, Int, Place),
        rank=f("rank", Place, Int),
        alive=f("alive", Node, Bool),
        born=f("born", Node, Bool),
        carried=f("carried", Node, Block, Int),
        carrier=f("carrier", Node, Block),
        dying=f("dying", Node, Bool),
        orphan=f("orphan", Block, Bool),
        text=f("text", Seq, Text),
        computed=position("computed"),
        reserved=position("reserved"),
        length=f("length", Seq, Int),
        gone=f("gone", Seq, Int),
        flight=f("flight", Seq, Int),
        memory=f("memory", Block, Int, KV),
        pending=f("pending", Block, Bool),
        source=f("source", Block, Block),
        oldest=z3.Int("oldest"),
        launched=z3.Int("launched"),
        used=f("used", Int, Block, Bool),
        keeper=f("keeper", Int, Block, Place),
    )


def initial_state() -> State:
    """A new manager: nothing referenced, nothing findable, memory as it comes."""
    no, zero = z3.BoolVal(False), z3.IntVal(0)
    nothing, start = lambda *_: no, lambda *_: Pos(zero, zero)
    at_zero = lambda *_: zero  # noqa: E731
    return replace(
        any_state(),
        refs=at_zero,
        content=lambda _: none,
        on_empty=lambda b: z3.If(reserved_block(b), 0, 1),
        on_cached=at_zero,
        held=nothing,
        alive=nothing,
        born=lambda n: n == none,
        carried=at_zero,
        dying=nothing,
        orphan=nothing,
        computed=start,
        reserved=start,
        length=at_zero,
        gone=at_zero,
        flight=lambda _: z3.IntVal(-1),
        pending=nothing,
        oldest=zero,
        launched=zero,
    )


@dataclass(frozen=True)
class Given:
    """The parameters of a primitive. Each uses those that it needs; all stand for anything that the guard allows."""

    b: Expr
    b2: Expr  # another carrier of b's content
    q: Expr
    other: Expr  # q's parent in a fork
    n: Expr
    i: Expr  # of a table's entries
    j: Expr  # of a block's slots
    k: Expr  # of a pin's or a step's places
    target_slot: Expr  # how many slots of the last block to reserve
    place: Expr
    hand: Expr
    text: Expr
    value: Expr  # what is written
    receipt: Expr
    batch: Fn  # Seq -> Bool: what a step runs
    entry_of: Fn  # Block -> Place: where it uses a block


def anything() -> Given:
    sorts = dict.fromkeys(("b", "b2"), Block) | dict.fromkeys(("q", "other"), Seq) | {"n": Node}
    sorts |= dict.fromkeys(("i", "j", "k", "target_slot"), Int) | dict.fromkeys(("place", "hand"), Place)
    sorts |= {"text": Text, "value": KV, "receipt": Receipt}
    return Given(
        **{name: z3.FreshConst(sort, name) for name, sort in sorts.items()},
        batch=z3.FreshFunction(Seq, Bool),
        entry_of=z3.FreshFunction(Block, Place),
    )


@dataclass(frozen=True)
class Step:
    """What must hold before a primitive, in named parts, and the state after it."""

    guard: dict[str, Expr]
    after: State


Primitive = Callable[[State, Given], Step]
