"""The parts of `python -m kvproof.fuzz.spec`, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from kvproof.fuzz.explore import HASHES, explore
from kvproof.fuzz.spec import code_faults, faults, traces, window
from kvproof.fuzz.spec.checks import Check, Part
from kvproof.fuzz.spec.proof import prove
from kvproof.fuzz.spec.scopes import SCOPES, Graph, Scope, scope_named
from kvproof.fuzz.spec.sets import compare
from kvproof.fuzz.spec.tlc import check


def model(full: bool) -> Iterator[Check]:
    for scope, hash in _selected(full):
        verdict = check(scope, hash=hash)
        yield _graph_check(scope, hash, verdict.graph, verdict.violated and f"{verdict.violated} is violated")


def graph(full: bool) -> Iterator[Check]:
    for scope, hash in _selected(full):
        found = explore(scope, HASHES[hash])
        trace = " ".join(map(str, found.trace))
        yield _graph_check(scope, hash, found.graph, found.violation and f"{found.violation} after {trace}")


def sets(full: bool) -> Iterator[Check]:
    for scope in SCOPES if full else (scope_named("pins"),):
        found = compare(scope)
        sizes = f"{found.num_states:,} states and {found.num_edges:,} labelled edges in both"
        one_sided = (
            f"design only: {len(found.states_in_design_only)} states, {len(found.edges_in_design_only)} edges; "
            f"code only: {len(found.states_in_code_only)} states, {len(found.edges_in_code_only)} edges"
        )
        yield Check(
            what=f"{scope}: {sizes}",
            right=found.equal,
            detail="" if found.equal else one_sided,
            states=found.num_states,
            transitions=found.num_edges,
        )


def proof(full: bool) -> Iterator[Check]:
    for subject, group in groupby(prove(), key=lambda obligation: obligation.subject):
        obligations = list(group)
        unproved = [obligation.claim for obligation in obligations if not obligation.proved]
        yield Check(
            what=f"{subject}: {len(obligations)} obligations",
            right=not unproved,
            detail=f"not proved: {', '.join(unproved)}",
            obligations=len(obligations),
        )


def faults_in_the_design(full: bool) -> Iterator[Check]:
    for fault in faults.FAULTS:
        yield faults.fault_check(f"{fault}, at {fault.scope}", fault, faults.find(fault))


def faults_in_the_code(full: bool) -> Iterator[Check]:
    for hunt in code_faults.HUNTS:
        found = hunt.run()
        how = f"{found.violation} in {len(found.trace)} steps" if found.violation else "another graph"
        yield Check(
            what=f"{hunt.fault}, at {hunt.scope}: {how}",
            right=hunt.finds(found),
            detail="neither a violation nor another graph",
            states=found.graph.states,
            transitions=found.graph.transitions,
        )


def _selected(full: bool) -> Iterator[tuple[Scope, str]]:
    for scope in SCOPES:
        if scope.slow and not full:
            continue
        yield scope, "Perfect"
        # A hash has nothing to mix up where all tokens are equal and so is the namespace.
        if scope.num_tokens * scope.num_namespaces > 1:
            yield scope, "Constant"
            if full:
                yield scope, "Parity"


def _graph_check(scope: Scope, hash: str, found: Graph, violation: str | None) -> Check:
    sizes = f"{found.states:,} states, {found.transitions:,} transitions, depth {found.depth}"
    return Check(
        what=f"{scope}, hash {hash.lower()}: {sizes}",
        right=violation is None and found == scope.graph,
        detail=violation or f"recorded are {', '.join(map(str, scope.graph))}",
        states=found.states,
        transitions=found.transitions,
    )


PARTS = (
    Part("model", "TLC visits every state of the design and finds every invariant to hold", model),
    Part("graph", "the code's graph of states has the size of the design's, and every invariant holds in it", graph),
    Part("sets", "the two graphs have the same states and the same labelled edges", sets),
    Part("window", "TLC visits every state of the design of sliding windows", window.checks),
    Part("traces", "the design follows recorded runs of the code at larger scopes", traces.checks),
    Part("proof", "the invariants are inductive, for any number of blocks and sequences", proof),
    Part(
        "design-faults",
        "faults planted in the design violate what is there for them",
        faults_in_the_design,
        full_only=True,
    ),
    Part(
        "code-faults",
        "faults planted in the code violate something or change its graph",
        faults_in_the_code,
        full_only=True,
    ),
)
