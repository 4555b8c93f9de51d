"""The specification holds at small scopes, its invariants notice what they are there for, and the code is what it says.

`python -m kvproof.fuzz.spec --full` does the same at every scope, with every hash function and every fault.
"""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvproof.fuzz import planted
from kvproof.fuzz.canonical import SequenceState, State
from kvproof.fuzz.explore import Broken
from kvproof.fuzz.spec import __main__ as command
from kvproof.fuzz.spec.checks import Check, Part
from kvproof.fuzz.spec.faults import FAULTS, Fault, find
from kvproof.fuzz.spec.parts import PARTS
from kvproof.fuzz.spec.scopes import SCOPES, scope_named
from kvproof.fuzz.spec.sets import compare, read_dump
from kvproof.fuzz.spec.tlc import (
    INVARIANTS,
    PROPERTIES,
    TLCFailed,
    TLCUnavailable,
    Verdict,
    check,
    read_design,
)


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


# ---- the code beside the design

SMALL = replace(scope_named("orphans"), max_prompt=3, max_length=4)


@pytest.mark.usefixtures("tlc")
def test_the_code_has_the_states_and_labelled_edges_of_the_design() -> None:
    scope = scope_named("orphans")
    comparison = compare(scope)
    assert comparison.equal
    assert (comparison.num_states, comparison.num_edges) == (scope.graph.states, scope.graph.transitions)


@pytest.mark.usefixtures("tlc")
def test_code_that_is_right_but_not_as_designed_is_told_apart() -> None:
    """Blocks released head first break no invariant, and lie in another order on the free list."""
    fault = next(fault for fault in planted.FAULTS if fault.name == "head released before tail")
    with fault.planted():
        comparison = compare(SMALL)
    assert not comparison.equal
    assert "Release" in {name for _, name, _ in comparison.edges_in_code_only}
    # A root before its child among the cached blocks: it would be evicted first.
    unused = [state for state in comparison.states_in_code_only if state.seqs == (None,) and len(state.cached) == 2]
    assert any((("n0", (0, 0)), state.cached[:1]) in state.index for state in unused)


DUMP = r"""strict digraph DiskGraph {
3 [label="/\\ seq = (s0 :> None @@ s1 :> None)\n/\\ pins = (p0 :> <<>>)\n/\\ copies = << >>\n/\\ pool = [ flights |-> <<>>,\n  refs |-> (0 :> 0 @@ 1 :> 0),\n  free |-> <<1, 0>>,\n  lru |-> <<>>,\n  content |-> (0 :> None @@ 1 :> None),\n  index |-> << >> ]\n/\\ mem = (0 :> None @@ 1 :> None)",style = filled]
3 -> -4 [label="Admit",color="black",fontcolor="black"];
-4 [label="/\\ seq = ( s0 :>\n      [ table |-> <<1>>,\n        computed |-> 1,\n        ns |-> n0,\n        reserved |-> 2,\n        tokens |-> <<0, 1, 1>>,\n        step |-> 2 ] @@\n  s1 :> None )\n/\\ pins = (p0 :> <<1, 0>>)\n/\\ copies = <<0>>\n/\\ pool = [ flights |-> <<<<>>, <<0>>>>,\n  refs |-> (0 :> 2 @@ 1 :> 1),\n  free |-> <<>>,\n  lru |-> <<1>>,\n  content |-> (0 :> None @@ 1 :> <<n0, <<0, 1>>>>),\n  index |-> (<<<<n0, <<0, 1>>>>, <<1, 1>>>> :> <<1, 0>>) ]\n/\\ mem = (0 :> None @@ 1 :> None)"];
{rank = same; 3;}
}"""  # noqa: E501 - as TLC writes it


def test_a_dump_is_read_in_the_terms_of_the_code() -> None:
    states, edges = read_dump(DUMP)
    assert edges == {("3", "Admit", "-4")}
    assert states == {
        "3": State((None, None), (0, 0), (0, 1), (), frozenset(), (), ((),), ()),
        "-4": State(
            seqs=(SequenceState("n0", (0, 1, 1), computed=1, reserved=2, table=(1,), step=2), None),
            refs=(2, 1),
            free=(),
            cached=(1,),
            index=frozenset({(("n0", (0, 1, 1, 1)), (1, 0))}),
            parked=((), (0,)),
            pins=((1, 0),),
            copies=((1, 0),),
        ),
    }


def test_what_is_no_dump_is_refused() -> None:
    with pytest.raises(TLCFailed, match="no state in it"):
        read_dump("strict digraph DiskGraph {\n}")


# ---- the command


def good(full: bool) -> Iterator[Check]:
    yield Check(what=f"full is {full}", right=True, states=3, transitions=4, obligations=5)


def bad(full: bool) -> Iterator[Check]:
    yield Check(what="a graph", right=False, detail="too small", states=30)
    raise TLCUnavailable("TLC needs java, which is not on the path")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    some = Part("good", "is right", good), Part("bad", "is wrong", bad), Part("long", "takes long", good, True)
    monkeypatch.setattr(command, "PARTS", some)


@pytest.mark.usefixtures("parts")
def test_the_command_succeeds_when_all_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--part", "good"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "good: is right"
    assert told[1].startswith("  ok full is False (")
    assert told[2] == "1 checks, 0 failed: 3 states, 4 transitions, 5 obligations"


@pytest.mark.usefixtures("parts")
def test_the_command_fails_when_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """The rest is checked all the same."""
    assert command.main(["--full"]) == 1
    told = capsys.readouterr().out
    assert "NOT AS IT SHOULD BE a graph: too small" in told
    assert "NOT AS IT SHOULD BE bad: TLC needs java, which is not on the path" in told
    assert "long: takes long\n  ok full is True" in told


@pytest.mark.parametrize("error", [TLCFailed("no"), TimeoutError("no"), ValueError("no")], ids=repr)
def test_a_part_that_breaks_off_has_failed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks_off(full: bool) -> Iterator[Check]:
        yield from good(full)
        raise error

    monkeypatch.setattr(command, "PARTS", (Part("broken", "breaks off", breaks_off),))
    assert command.main([]) == 1


@pytest.mark.usefixtures("tlc")
def test_code_that_breaks_an_invariant_is_compared_no_further() -> None:
    fault = next(fault for fault in planted.FAULTS if fault.name == "second release accepted")
    with fault.planted(), pytest.raises(Broken, match="I10: a second time was accepted"):
        compare(SMALL)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(("arguments", "run"), [([], ["good", "bad", "bad"]), (["--part", "long"], ["long"])])
def test_the_command_reports_in_json(arguments: list[str], run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command.main([*arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [check["part"] for check in report["checks"]] == run
    assert report["right"] == ("bad" not in run)
    assert report["states"] == sum(check["states"] for check in report["checks"])


def test_every_part_has_a_name_of_its_own() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
