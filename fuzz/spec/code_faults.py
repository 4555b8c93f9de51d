"""Where the explorer finds the faults that `kvproof.fuzz.planted` plants in the code.

A hunt names the scope at which a fault shows soonest. What is found is a violated invariant, or a graph that is not the
design's: that is all one can see of a fault which only loses hits, or evicts in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproof.allocator import BlockManager
from kvproof.fuzz.explore import HASHES, Exploration, explore
from kvproof.fuzz.planted import FAULTS, INDEX_FAULTS, POOL_FAULTS, Fault
from kvproof.fuzz.spec.scopes import scope_named
from kvproof.fuzz.world import World


@dataclass(frozen=True, slots=True)
class Hunt:
    """`fault` is sought at the scope named `scope`, with the hash function `hash`."""

    fault: Fault
    scope: str
    hash: str = "Perfect"

    def __str__(self) -> str:
        return self.fault.name

    @property
    def quick(self) -> bool:
        """Found by a violation within a fifth of a second; the others need up to the whole graph."""
        return self.fault.name not in _SLOW

    def run(self) -> Exploration:
        """What the explorer finds. It stops at the first violation, or when the graph has outgrown the design's."""
        scope = scope_named(self.scope)
        with self.fault.planted():
            return explore(scope, HASHES[self.hash], max_transitions=scope.graph.transitions + 1)

    def finds(self, found: Exploration) -> bool:
        """Whether the fault shows. A replacement that does not even run, or code that does not, is no find."""
        if found.violation is None:
            return found.graph != scope_named(self.scope).graph
        return not found.violation.startswith(("NameError", "AttributeError", "TypeError"))


MORE_FAULTS = (
    Fault(
        "truncated tokens stay computed",
        BlockManager,
        "truncate",
        "min(seq._num_computed, length), min(seq._num_reserved, length)",
        "seq._num_computed, min(seq._num_reserved, length)",
        "the KV of rejected drafts counts as the next tokens'",
    ),
    Fault(
        "own published tail is copied",
        BlockManager,
        "_reserve",
        "self.pool.refs(tail) > 1",
        "(self.pool.refs(tail) > 1 or self.pool.content(tail) is not None)",
        "the copy needs a block, which a sequence that is alone may not find",
    ),
    Fault(
        "copy order forgotten",
        BlockManager,
        "_reserve",
        "self._copies[fresh[0]] = self._copies.get(tail, tail)",
        "pass",
        "the block that replaces a shared one holds whatever was in it",
    ),
    Fault(
        "merged block forgets the step in flight",
        BlockManager,
        "_merge",
        "self._flights.drop(seq, (block,))",
        "self.pool.release(block)",
        "a duplicate is handed out while a running step reads it",
    ),
    Fault(
        "written before the copy is made",
        World,
        "actions",
        "if ordered.isdisjoint(seq.block_table[computed // size : -(-(computed + n) // size)]):",
        "if True:",
        "the caller's to make: a copy takes what was written after it was ordered",
    ),
)
"""Faults of the design without a counterpart in `kvproof.fuzz.planted`: nothing but this was needed to notice them."""

_FAULTS = {fault.name: fault for fault in (*FAULTS, *POOL_FAULTS, *INDEX_FAULTS, *MORE_FAULTS)}

HUNTS = tuple(
    Hunt(_FAULTS[name], *where)
    for name, *where in (
        ("hash alone decides", "prefixes", "Parity"),
        ("parent not verified", "prefixes", "Parity"),
        ("tokens not verified", "prefixes", "Constant"),
        ("index outlives the block", "orphans"),
        ("orphans stay cached", "orphans"),
        ("published before it is written", "orphans"),
        ("namespaces share", "namespaces"),
        ("revived hits cost nothing", "prefixes"),
        ("exact fit refused", "orphans"),
        ("hit evicted for its successor", "prefixes"),
        ("nothing left to compute", "prefixes"),
        ("chain restarts after a hit", "rewrites"),
        ("one block at most per reserve", "orphans"),
        ("boundary by remainder", "prefixes"),
        ("refused reserve keeps its slots", "prefixes"),
        ("duplicate freed, table kept", "prefixes"),
        ("live duplicate lost", "duplicates"),
        ("head released before tail", "orphans"),
        ("second release accepted", "orphans"),
        ("release forgets a reference", "pins"),
        ("cached hit left on the free list", "orphans"),
        ("contentless blocks last", "orphans"),
        ("most recently used first", "orphans"),
        ("fork forgets the references", "pins"),
        ("fork with reserved slots", "pins"),
        ("shared tail written in place", "pins"),
        ("copy ordered the wrong way", "pins"),
        ("copy of a block that waits for its own", "copies"),
        ("copy appended", "pins"),
        ("copy keeps its source", "pins"),
        ("copy not counted", "pins"),
        ("published tail written in place", "orphans"),
        ("truncation loses the surplus", "orphans"),
        ("truncation keeps the hashes", "rewrites"),
        ("reserve adds up", "orphans"),
        ("pin holds nothing", "pins"),
        ("unpinned twice", "pins"),
        ("released in flight", "flights"),
        ("parked for good", "flights"),
        ("retired out of order", "flights"),
        ("the gap of a removed node is not closed", "prefixes", "Constant"),
        ("truncated tokens stay computed", "orphans"),
        ("own published tail is copied", "orphans"),
        ("copy order forgotten", "pins"),
        ("merged block forgets the step in flight", "flights"),
        ("written before the copy is made", "copies"),
    )
)

_SLOW = {
    "hit evicted for its successor",
    "copy of a block that waits for its own",
    "truncation keeps the hashes",
    "head released before tail",
    "contentless blocks last",
    "most recently used first",
}

UNREACHED = {
    "no scope declares a max_length or asks for lookahead": ("lifetime not declared", "lookahead past the longest"),
    "no scope appends a token that is none": ("extended by half",),
    "no scope has media": ("media ignored", "media without their place"),
    "no scope has a sliding window": ("window keeps everything", "window off by one", "window keeps the reference"),
    "no scope has a watermark": ("watermark ignored", "watermark blocks the only request"),
    "no scope resets the prefix cache": ("reset while in use", "reset tells of nothing", "reset counts as eviction"),
    "no scope reserves the null block": ("null block handed out",),
    "no scope evicts by FIFO": (
        "parents first among equals",
        "new content is as old as the block's last",
        "a hit makes a block young again",
    ),
    "no scope has a second thread": ("a second thread is let in",),
    "no scope takes snapshots": ("snapshot takes the copies",),
    "events are no part of a state": (
        "a duplicate is stored twice",
        "identity without its prefix",
        "identity without its namespace",
        "a run of events crosses another",
        "a removal is told with the first copy",
        "removed and stored in the wrong order",
        "orphans are not told of",
    ),
    "statistics are no part of a state": (
        "a preempted request counts twice",
        "hits counted at the question",
        "orphans not counted as evicted",
    ),
    "no state shows the numbers of nodes": ("uid reused",),
    "it only costs memory, no state shows it": ("namespaces kept for ever",),
    "the manager never makes the call that is guarded": tuple(fault.name for fault in POOL_FAULTS),
}
"""Planted faults that the explorer can't find at these scopes, by the reason. The state machines find all of them."""

COUNTERPARTS = {
    "merged block stays in the table": "duplicate freed, table kept",
    "pin counts nothing": "pin holds nothing",
    "freed under its other owner": "release forgets a reference",
    "hit left on the free list": "cached hit left on the free list",
    "index outlives the block": "index outlives the block",
    "second copy not findable": "live duplicate lost",
    "blocks taken before the hits are held": "hit evicted for its successor",
    "orphans stay cached": "orphans stay cached",
    "no copy on write": "shared tail written in place",
    "published tail written in place": "published tail written in place",
    "fork of reserved slots": "fork with reserved slots",
    "published before it is written": "published before it is written",
    "copy appended to the table": "copy appended",
    "truncated tokens stay computed": "truncated tokens stay computed",
    "namespaces share": "namespaces share",
    "parked blocks stay parked": "parked for good",
    "own published tail is copied": "own published tail is copied",
    "hash alone decides": "hash alone decides",
    "parent not verified": "parent not verified",
    "tokens not verified": "tokens not verified",
    "copy order forgotten": "copy order forgotten",
    "copy of a block whose own copy is not made yet": "copy of a block that waits for its own",
    "written before the copy is made": "written before the copy is made",
    "nothing left to compute": "nothing left to compute",
    "release ignores the step in flight": "released in flight",
    "merged block forgets the step in flight": "merged block forgets the step in flight",
}
"""The faults of the design, and what each is in the code."""
