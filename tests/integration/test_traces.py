"""Recorded runs of the code at large scopes are runs of the design, and those of a broken code are not."""

from dataclasses import replace
from itertools import chain

import pytest

from kvproof.fuzz import planted
from kvproof.fuzz.explore import HASHES
from kvproof.fuzz.spec import faults
from kvproof.fuzz.spec.tlc import read_design
from kvproof.fuzz.spec.traces import Rejection, some_runs, validate
from kvproof.fuzz.trace import SCOPES, Event, Run, record


def edited(run: Run, place: int, event: Event) -> Run:
    """`run` up to `place`, where `event` happens instead."""
    return replace(run, events=(*run.events[:place], event))


def parting(fault: planted.Fault) -> tuple[Run, Run]:
    """A run of the code, and the same run with the fault, up to the first event in which one can tell them apart."""
    for scope in SCOPES:
        for seed, hash in enumerate([HASHES["Perfect"], HASHES["Constant"]] * 20):
            good = record(scope, seed, 60, hash)
            with fault.planted():
                try:
                    bad = record(scope, seed, 60, hash)
                except Exception:  # the fault is not silent here
                    continue
            for place, (event, other) in enumerate(zip(good.events, bad.events, strict=True)):
                if event != other:
                    return good, edited(bad, place, other)
    raise AssertionError(f"no run notices: {fault}")


def test_runs_are_reproducible_and_go_everywhere() -> None:
    runs = [run for scope in SCOPES for run in some_runs(scope, 8, 40)]
    assert runs == [run for scope in SCOPES for run in some_runs(scope, 8, 40)]
    events = list(chain.from_iterable(run.events for run in runs))
    names = {
        "Admit",
        "Extend",
        "Reserve",
        "Copy",
        "Commit",
        "Fork",
        "Truncate",
        "Release",
        "Pin",
        "Unpin",
        "Launch",
        "Retire",
    }
    assert {event.action.name for event in events if not event.refused} == names
    assert {event.action.name for event in events if event.refused} >= {"Admit", "Reserve", "Commit", "Fork"}
    steps = [(before.state, event) for run in runs for before, event in zip(run.events, run.events[1:], strict=False)]
    assert all(event.state == before for before, event in steps if event.refused)
    # What is rare: hits, evictions, merged duplicates, copies that wait, blocks that a step in flight holds.
    admitted = [event.state.seqs[event.action.args[0]] for _, event in steps if event.action.name == "Admit"]
    assert sum(seq is not None and seq.computed > 0 for seq in admitted) > 20
    assert any(event.action.name == "Reserve" and len(event.state.index) < len(before.index) for before, event in steps)
    assert any(
        event.action.name == "Commit"
        and [seq and seq.table for seq in before.seqs] != [seq and seq.table for seq in event.state.seqs]
        for before, event in steps
    )
    assert any(len(event.state.copies) > 1 for event in events)
    assert any(any(event.state.parked) for event in events)


@pytest.mark.usefixtures("tlc")
def test_the_design_follows_the_code() -> None:
    assert validate([run for scope in (SCOPES[0], SCOPES[3]) for run in some_runs(scope, 6, 40)]) is None


SILENT = (
    "most recently used first",
    "live duplicate lost",
    "orphans stay cached",
)


@pytest.mark.usefixtures("tlc")
@pytest.mark.parametrize("fault", [fault for fault in planted.FAULTS if fault.name in SILENT], ids=str)
def test_a_run_of_broken_code_is_rejected_where_it_goes_wrong(fault: planted.Fault) -> None:
    good, bad = parting(fault)
    rejection = validate([good, bad])
    assert rejection is not None
    assert (rejection.run, rejection.event) == (1, len(bad.events) - 1)
    assert ": design " in rejection.why


@pytest.mark.usefixtures("tlc")
def test_two_entries_of_the_free_list_exchanged_are_noticed() -> None:
    run = record(SCOPES[0], 1, 40)
    place = next(i for i, event in enumerate(run.events) if i > 10 and len(event.state.free) > 1)
    event = run.events[place]
    first, second, *others = event.state.free
    wrong = edited(run, place, event._replace(state=event.state._replace(free=(second, first, *others))))
    design, code = (", ".join(map(str, blocks)) for blocks in (event.state.free, (second, first, *others)))
    why = f"{event.action}: free: design <<{design}>>, code <<{code}>>"
    assert validate([run, wrong, run]) == Rejection(1, place, why)


@pytest.mark.usefixtures("tlc")
def test_a_refusal_that_the_design_does_not_share_is_noticed() -> None:
    run = record(SCOPES[0], 1, 40)
    place = next(i for i, event in enumerate(run.events) if i and event.action.name == "Admit" and not event.refused)
    action = run.events[place].action
    wrong = edited(run, place, Event(action, refused=True, state=run.events[place - 1].state))
    assert validate([wrong]) == Rejection(0, place, f"{action}: the design has this call")


@pytest.mark.usefixtures("tlc")
def test_a_call_that_only_the_design_refuses_is_noticed() -> None:
    run = record(SCOPES[0], 1, 40)
    place = next(i for i, event in enumerate(run.events) if event.refused)
    wrong = edited(run, place, run.events[place]._replace(refused=False))
    assert validate([wrong]) == Rejection(0, place, f"{run.events[place].action}: the design refuses this call")


@pytest.mark.usefixtures("tlc")
def test_invariants_are_checked_on_the_way() -> None:
    """The memory is the design's alone: no run of the code can contradict it, only an invariant."""
    fault = next(fault for fault in faults.FAULTS if fault.name == "copy order forgotten")
    runs = some_runs(SCOPES[0], 8, 40)
    rejection = validate(runs, design=fault.plant(read_design()))
    assert rejection is not None
    assert rejection.why == "Invariant I13 is violated"
    assert runs[rejection.run].events[rejection.event].action.name == "Copy"
