"""Faults to plant in the design, each found by the invariant that is there for it.

An invariant that nothing violates proves nothing. A fault is one replacement in the text of PagedKV.tla; TLC must find
it within seconds when it checks no invariant but the one named.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproof.fuzz.spec.checks import Check
from kvproof.fuzz.spec.scopes import scope_named
from kvproof.fuzz.spec.tlc import INVARIANTS, PROPERTIES, Verdict, check, read_design


@dataclass(frozen=True, slots=True)
class Fault:
    """`old` becomes `new` in the design. At the scope named `scope`, with the hash function `hash`, this `violates`."""

    name: str
    violates: str
    scope: str
    old: str
    new: str
    hash: str = "Perfect"

    def __str__(self) -> str:
        return self.name

    def plant(self, design: str) -> str:
        """The faulty text. Raises `ValueError` unless there is exactly one place for the fault."""
        if (count := design.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {count} times in the design")
        return design.replace(self.old, self.new)


def find(fault: Fault) -> Verdict:
    """Check the faulty design for nothing but what the fault violates."""
    invariants = [name for name in INVARIANTS if name == fault.violates]
    properties = [name for name in PROPERTIES if name == fault.violates]
    design = fault.plant(read_design())
    return check(scope_named(fault.scope), hash=fault.hash, invariants=invariants, properties=properties, design=design)


def fault_check(subject: str, fault: Fault, found: Verdict) -> Check:
    """Whether TLC `found` in the faulty design what the fault violates."""
    return Check(
        what=f"{subject}: {found.violated} violated in {len(found.trace) - 1} steps",
        right=found.violated == fault.violates,
        detail=f"{fault.violates} is what it should violate",
        states=found.graph.states,
        transitions=found.graph.transitions,
    )


FAULTS = (
    Fault(
        "merged block stays in the table",
        "I1",
        "prefixes",
        "[q EXCEPT !.table[i] = keeper], i + 1",
        "q, i + 1",
    ),
    Fault(
        "pin counts nothing",
        "I1",
        "pins",
        "pool' = Share(pool, full)",
        "pool' = pool",
    ),
    Fault(
        "freed under its other owner",
        "I2",
        "prefixes",
        'IF p.refs[b] > 1 THEN "none" ELSE IF p.content[b] = None',
        "IF p.content[b] = None",
    ),
    Fault(
        "hit left on the free list",
        "I2",
        "prefixes",
        "!.lru = Without(@, Range(blocks))]",
        "!.lru = @]",
    ),
    Fault(
        "index outlives the block",
        "I3",
        "prefixes",
        "THEN Withdraw(p, Head(p.lru)) ELSE p",
        "THEN [p EXCEPT !.content[Head(p.lru)] = None, !.free = <<Head(p.lru)>>, !.lru = Tail(@)] ELSE p",
    ),
    Fault(
        "second copy not findable",
        "I3",
        "duplicates",
        "(node :> Append(carriers, b)) @@ @",
        "(node :> IF found = {} THEN <<b>> ELSE carriers) @@ @",
    ),
    Fault(
        "blocks taken before the hits are held",
        "I3",
        "prefixes",
        "taken == Take(Share(pool, hits), hits, new)",
        "taken == LET first == Take(pool, hits, new) IN <<Share(first[1], hits), first[2]>>",
    ),
    Fault(
        "orphans stay cached",
        "I4",
        "orphans",
        "{n \\in DOMAIN p.index : IsBelow(n, node)}",
        "{node}",
    ),
    Fault(
        "no copy on write",
        "I5",
        "copies",
        "Copies(q) == Dirty(q) /\\ pool.refs[Last(q.table)] > 1",
        "Copies(q) == FALSE",
    ),
    Fault(
        "published tail written in place",
        "I5",
        "orphans",
        "THEN Withdraw(pool, tail) ELSE pool",
        "THEN pool ELSE pool",
    ),
    Fault(
        "fork of reserved slots",
        "I5",
        "copies",
        "    /\\ seq[s].reserved = seq[s].computed\n",
        "",
    ),
    Fault(
        "published before it is written",
        "I6",
        "prefixes",
        "/\\ pool' = taken[1]\n",
        "/\\ pool' = Publish(taken[1], [ns |-> ns, tokens |-> tokens, computed |-> reserved, table |-> taken[2]],"
        " Len(hits) + 1, <<>>)[1]\n",
    ),
    Fault(
        "copy appended to the table",
        "I7",
        "copies",
        "IF Copies(q) THEN Front(q.table) ELSE q.table",
        "q.table",
    ),
    Fault(
        "truncated tokens stay computed",
        "I7",
        "orphans",
        "!.computed = Min(@, length)",
        "!.computed = @",
    ),
    Fault(
        "namespaces share",
        "I9",
        "namespaces",
        "node[1] = parent /\\",
        "(node[1] = parent \\/ i = 1) /\\",
        hash="Constant",
    ),
    Fault(
        "parked blocks stay parked",
        "I11",
        "flights",
        "pool' = Give([pool EXCEPT !.flights = Tail(@)], Head(pool.flights))",
        "pool' = [pool EXCEPT !.flights = Tail(@)]",
    ),
    Fault(
        "own published tail is copied",
        "I12",
        "orphans",
        "pool.refs[Last(q.table)] > 1",
        "(pool.refs[Last(q.table)] > 1 \\/ pool.content[Last(q.table)] # None)",
    ),
    Fault(
        "hash alone decides",
        "I13",
        "prefixes",
        "Candidate(node) /\\ node[1] = parent /\\ node[2] = Chunk(q, i)",
        "Candidate(node)",
        hash="Parity",
    ),
    Fault(
        "parent not verified",
        "I13",
        "prefixes",
        "node[1] = parent /\\ node[2]",
        "node[2]",
        hash="Constant",
    ),
    Fault(
        "tokens not verified",
        "I13",
        "prefixes",
        "node[1] = parent /\\ node[2] = Chunk(q, i)",
        "node[1] = parent",
        hash="Constant",
    ),
    Fault(
        "copy order forgotten",
        "I13",
        "copies",
        "mem[IF b \\in DOMAIN copies THEN copies[b] ELSE b]]",
        "mem[b]]",
    ),
    Fault(
        "copy of a block whose own copy is not made yet",
        "I13",
        "copies",
        "source == IF tail \\in DOMAIN copies THEN copies[tail] ELSE tail",
        "source == tail",
    ),
    Fault(
        "written before the copy is made",
        "Contract",
        "copies",
        "Slot(q, i)[1] \\notin DOMAIN copies \\union Range(copies)",
        "TRUE",
    ),
    Fault(
        "nothing left to compute",
        "Contract",
        "prefixes",
        "IF i * BlockSize < Len(q.tokens)",
        "IF i * BlockSize <= Len(q.tokens)",
    ),
    Fault(
        "release ignores the step in flight",
        "I14",
        "flights",
        "IF q.step = 0 THEN Give(p, blocks) ELSE [p EXCEPT !.flights[q.step] = @ \\o blocks]",
        "Give(p, blocks)",
    ),
    Fault(
        "merged block forgets the step in flight",
        "I14",
        "flights",
        "pool' = Drop(published[1], q, published[3])",
        "pool' = Give(published[1], published[3])",
    ),
)
