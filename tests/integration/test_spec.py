"""The specification holds at small scopes, and its invariants notice what they are there for.

`python -m kvproof.fuzz.spec` does the same at every scope, with every hash function and every fault.
"""

from dataclasses import replace

import pytest

from kvproof.fuzz.spec.faults import FAULTS, Fault, find
from kvproof.fuzz.spec.scopes import SCOPES, Scope
from kvproof.fuzz.spec.tlc import (
    INVARIANTS,
    PROPERTIES,
    TLCFailed,
    TLCUnavailable,
    Verdict,
    check,
    read_design,
    tlc_command,
)


@pytest.fixture(scope="module")
def tlc() -> None:
    try:
        tlc_command()
    except TLCUnavailable as error:
        pytest.skip(str(error))


def scope_named(name: str) -> Scope:
    return next(scope for scope in SCOPES if scope.name == name)


@pytest.mark.usefixtures("tlc")
@pytest.mark.parametrize("name", ["orphans", "pins", "flights"])
def test_the_design_keeps_contract_and_invariants_in_every_reachable_state(name: str) -> None:
    scope = scope_named(name)
    assert check(scope) == Verdict(scope.graph, violated=None, trace=())


@pytest.mark.usefixtures("tlc")
def test_a_hash_that_always_collides_changes_nothing() -> None:
    scope = scope_named("prefixes")
    assert check(scope, hash="Constant") == Verdict(scope.graph, violated=None, trace=())


@pytest.mark.usefixtures("tlc")
def test_what_lies_in_unused_slots_matters_nowhere() -> None:
    verdict = check(replace(scope_named("copies"), num_seqs=2), with_memory=True)
    assert (verdict.violated, verdict.graph.states) == (None, 4000)


SOME_FAULTS = (
    "merged block stays in the table",
    "parent not verified",
    "copy of a block whose own copy is not made yet",
    "release ignores the step in flight",
)


@pytest.mark.usefixtures("tlc")
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in SOME_FAULTS], ids=str)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    verdict = find(fault)
    assert verdict.violated == fault.violates
    assert verdict.trace[0].startswith("State 1: <Initial predicate>")


@pytest.mark.usefixtures("tlc")
def test_a_fault_that_needs_a_collision_is_unseen_without_one() -> None:
    scope = scope_named("prefixes")
    fault = next(fault for fault in FAULTS if fault.name == "hash alone decides")
    assert check(scope, design=fault.plant(read_design())).graph == scope.graph


@pytest.mark.usefixtures("tlc")
def test_a_design_that_does_not_parse_is_no_verdict() -> None:
    with pytest.raises(TLCFailed, match=r"exited with 1\d\d: .*Parse Error"):
        check(SCOPES[0], design=read_design().replace("Init ==", "Init =="[:-1]))


@pytest.mark.usefixtures("tlc")
def test_a_run_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(TimeoutError, match=r"scope everything within 0\.1 s"):
        check(scope_named("everything"), timeout=0.1)


def test_every_invariant_has_a_fault_and_every_fault_its_place() -> None:
    assert {fault.violates for fault in FAULTS} == {*INVARIANTS, *PROPERTIES}
    assert {fault.scope for fault in FAULTS} <= {scope.name for scope in SCOPES if not scope.slow}
    for fault in FAULTS:
        assert fault.plant(read_design()) != read_design()


def test_a_fault_without_its_place_is_refused() -> None:
    with pytest.raises(ValueError, match="occurs 0 times"):
        Fault("nothing", "I1", "prefixes", "no such text", "").plant(read_design())
