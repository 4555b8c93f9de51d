"""The explorer visits exactly the design's states, and notices what breaks them.

The recorded graphs are the model checker's, so these tests bind the code to the design where there is no Java.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest

from kvproof.fuzz.explore import HASHES, Exploration, Explorer, explore
from kvproof.fuzz.spec.code_faults import COUNTERPARTS, HUNTS, UNREACHED, Hunt
from kvproof.fuzz.spec.faults import FAULTS as DESIGN_FAULTS
from kvproof.fuzz.spec.scopes import Graph, scope_named

TINY = replace(scope_named("prefixes"), num_blocks=1, num_seqs=1, num_tokens=1, max_prompt=1, max_length=1)


@pytest.mark.parametrize(
    ("scope", "hash"),
    [
        ("orphans", "Constant"),
        ("flights", "Perfect"),
        ("pins", "Perfect"),
        ("namespaces", "Constant"),
        ("prefixes", "Parity"),
    ],
)
def test_the_code_has_the_graph_of_the_design(scope: str, hash: str) -> None:
    assert explore(scope_named(scope), HASHES[hash]) == Exploration(scope_named(scope).graph)


def test_every_edge_is_told_once_with_its_action() -> None:
    """One block, one sequence of one token: few enough to count by hand."""
    explorer = Explorer(TINY)
    edges = [(edge.source.seqs[0], str(edge.action), edge.target.seqs[0]) for edge in explorer.edges()]
    names = [action for _, action, _ in edges]
    # Admitted into an empty or a cached block, each released or committed, what is committed released.
    assert Counter(names) == {"Admit(0, n0, (0,), 1)": 2, "Commit(0, 1)": 1, "Release(0)": 2}
    assert [len(explorer.trace(state)) for state in explorer.reached_by] == [0, 1, 2, 3]


def test_a_search_tells_how_far_it_is_and_can_be_cut_short() -> None:
    scope, told = scope_named("orphans"), list[Graph]()
    found = explore(scope, max_transitions=2500, on_progress=told.append)
    assert [graph.transitions for graph in told] == [1000, 2000]
    assert found.graph.transitions == 2500
    assert told[0].states < told[1].states < found.graph.states < scope.graph.states


@pytest.mark.parametrize("hunt", [hunt for hunt in HUNTS if hunt.quick], ids=str)
def test_a_planted_fault_is_found(hunt: Hunt) -> None:
    found = hunt.run()
    assert found.violation is not None
    assert hunt.finds(found)


def test_code_that_does_not_run_is_no_find() -> None:
    hunt = HUNTS[0]
    assert not hunt.finds(Exploration(Graph(1, 0, 1), "TypeError: can only concatenate list"))
    assert hunt.finds(Exploration(Graph(1, 0, 1), "IndexError: list index out of range"))


def test_a_fault_that_only_loses_hits_shows_in_the_graph() -> None:
    hunt = next(hunt for hunt in HUNTS if hunt.fault.name == "head released before tail")
    found = hunt.run()
    assert (found.violation, hunt.finds(found)) == (None, True)


def test_a_violation_comes_with_a_shortest_way_there() -> None:
    hunt = next(hunt for hunt in HUNTS if hunt.fault.name == "cached hit left on the free list")
    found = hunt.run()
    assert found.violation == "InvariantViolation: I2: block 0 is listed as cached and is published"
    assert list(map(str, found.trace)) == [
        "Admit(0, n0, (0, 0), 5)",
        "Commit(0, 2)",
        "Release(0)",
        "Admit(0, n0, (0, 0, 0), 5)",
    ]


def test_every_fault_of_the_design_has_a_counterpart_that_is_found() -> None:
    hunted = {hunt.fault.name for hunt in HUNTS}
    assert hunted.isdisjoint(chain(*UNREACHED.values()))
    assert COUNTERPARTS.keys() == {fault.name for fault in DESIGN_FAULTS}
    assert set(COUNTERPARTS.values()) <= hunted
