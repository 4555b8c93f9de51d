"""Faults to plant in the primitives: each leaves exactly those obligations unproved that are there for it.

A fault is a wrong primitive in the place of the right one. Most are the right one without a part of its guard: the code
would do the same without the check that stands for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import z3

from kvproof.fuzz.spec.proof import PRIMITIVES, prove_primitive
from kvproof.fuzz.spec.proof_state import Given, Primitive, State, Step


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    primitive: str
    wrong: Callable[[Primitive], Primitive]
    breaks: frozenset[str]

    def __str__(self) -> str:
        return self.name


def broken_by(fault: Fault) -> set[str]:
    """The invariants that can't be proved of the wrong primitive."""
    wrong = fault.wrong(PRIMITIVES[fault.primitive])
    return {obligation.claim for obligation in prove_primitive(fault.primitive, wrong) if not obligation.proved}


def without(part: str) -> Callable[[Primitive], Primitive]:
    """The primitive, happening also where a part of its guard does not hold."""

    def plant(right: Primitive) -> Primitive:
        def wrong(s: State, g: Given) -> Step:
            step = right(s, g)
            del step.guard[part]
            return step

        return wrong

    return plant


def unchanged(*names: str) -> Callable[[Primitive], Primitive]:
    """The primitive, forgetting to change some fields."""
    return after(lambda before, step, given: {name: getattr(before, name) for name in names})


def after(changes: Callable[[State, Step, Given], dict[str, Any]]) -> Callable[[Primitive], Primitive]:
    """The primitive, with other values for some fields of the state after it."""

    def plant(right: Primitive) -> Primitive:
        def wrong(s: State, g: Given) -> Step:
            step = right(s, g)
            return replace(step, after=replace(step.after, **changes(s, step, g)))

        return wrong

    return plant


def _dies_alone(before: State, step: Step, g: Given) -> dict[str, Any]:
    return {"dying": lambda m: z3.And(m != g.n, before.dying(m))}


def _not_parked(right: Primitive) -> Primitive:
    """The sequence lets go as if it were in no step."""
    return lambda s, g: replace(
        step := right(replace(s, flight=lambda q: z3.IntVal(-1)), g), after=replace(step.after, flight=s.flight)
    )


def _not_shared(right: Primitive) -> Primitive:
    """The new block comes from a hand that holds no reference to it."""

    def wrong(s: State, g: Given) -> Step:
        step = right(s, g)
        return replace(step, guard=step.guard | {"hand": s.is_empty_hand(g.hand)})

    return wrong


def _copy_of_a_copy(right: Primitive) -> Primitive:
    """The order names the tail itself, whose own copy is still to come."""

    def wrong(s: State, g: Given) -> Step:
        step = right(s, g)
        fresh = s.named(g.hand)
        ordered = z3.And(s.pending(fresh), s.source(fresh) == s.block(g.q, g.i))
        return replace(step, guard=step.guard | {"ordered": ordered})

    return wrong


def _kept_in_the_hand(before: State, step: Step, g: Given) -> dict[str, Any]:
    return {"held": lambda p: z3.Or(before.held(p), step.after.held(p))}


def _fault(name: str, primitive: str, wrong: Callable[[Primitive], Primitive], *breaks: str) -> Fault:
    return Fault(name, primitive, wrong, frozenset(breaks))


FAULTS = (
    _fault("a hit stays on the free list", "share", unchanged("on_cached"), "I2"),
    _fault("a released block is never free", "release", unchanged("on_empty"), "I2"),
    _fault("sharing counts nothing", "share", unchanged("refs"), "I1", "I2"),
    _fault("a free block is shared, or one that is being written", "share", without("readable"), "I2", "I5"),
    _fault("a pin given up twice", "release", without("held"), "I1", "I2", "I5"),
    _fault("a table's block is released under it", "release", without("loose"), "I5", "I7", "I14"),
    _fault("a pin holds what the hand holds", "pin", after(_kept_in_the_hand), "I1"),
    _fault("content published twice", "publish", without("not found"), "I3"),
    _fault("an identity used again", "publish", without("new"), "I3"),
    _fault("published below a dead parent", "publish", without("parent"), "I4"),
    _fault("published before it is written", "publish", without("full"), "I5", "I6", "copies"),
    _fault("published as another prefix", "publish", without("matches"), "I6"),
    _fault("a duplicate of something else", "publish_duplicate", without("matches"), "I6"),
    _fault("an evicted block keeps its content", "withdraw", unchanged("content"), "I2", "I3"),
    _fault("the index outlives the block", "withdraw", unchanged("carried", "dying"), "I3"),
    _fault("children outlive their parent", "forget", after(_dies_alone), "I4"),
    _fault("orphans stay published", "forget", unchanged("orphan"), "I3"),
    _fault("a withdrawn block keeps its content", "withdraw_orphan", unchanged("content"), "I2", "I3"),
    _fault("a hit on another prefix", "append_hit", without("matches"), "I13"),
    _fault("a block with content as a fresh one", "append_fresh", without("fresh"), "I5"),
    _fault("written without a copy", "extend", without("private"), "I5"),
    _fault("a published tail is written in place", "extend", without("withdrawn"), "I5"),
    _fault("slots nobody asked blocks for", "append_fresh", without("target"), "I7"),
    _fault("merged without a reference", "merge", _not_shared, "I1"),
    _fault("merged into another prefix", "merge", without("matches"), "I13"),
    _fault("a copy of what is not there yet", "replace_by_copy", _copy_of_a_copy, "I13"),
    _fault("a copy that was not ordered", "replace_by_copy", without("ordered"), "I13"),
    _fault("orders forgotten", "carry_out_copies", unchanged("memory"), "I13"),
    _fault("a computed slot is written again", "write", without("not computed"), "I6", "I13"),
    _fault("written before it is copied away", "write", without("no source"), "I13"),
    _fault("computed before it is written", "compute", without("written"), "I13"),
    _fault("computed before it is copied to", "compute", without("no destination"), "I13", "copies"),
    _fault("computed tokens change", "set_text", without("computed stays"), "I13"),
    _fault("a step's block is handed out", "drop_last", _not_parked, "I14"),
    _fault("a merge ignores the step in flight", "merge", _not_parked, "I14"),
    _fault("a window moves past what is not computed", "drop_first", without("entry"), "I1", "I7"),
    _fault("a sequence leaves its step with its blocks", "leave_flight", without("no blocks"), "I14"),
)
