"""The specification of sliding windows holds at a small scope, and its properties notice what they are there for.

`python -m kvproof.fuzz.spec --full` does the same at every scope, with every fault.
"""

import pytest

from kvproof.fuzz.spec.faults import Fault
from kvproof.fuzz.spec.tlc import Verdict
from kvproof.fuzz.spec.window import (
    FAULTS,
    INVARIANTS,
    PROPERTIES,
    SCOPES,
    check_window,
    find,
    read_window_design,
)


@pytest.mark.usefixtures("tlc")
def test_windows_are_safe_in_every_reachable_state() -> None:
    assert check_window(SCOPES[0]) == Verdict(SCOPES[0].graph, violated=None, trace=())


SOME_FAULTS = (
    "cut to where the window has moved on",
    "null block handed out",
    "everything kept",
)


@pytest.mark.usefixtures("tlc")
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in SOME_FAULTS], ids=str)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    verdict = find(fault)
    assert verdict.violated == fault.violates
    assert verdict.trace[0].startswith("State 1: <Initial predicate>")


def test_every_property_has_a_fault_and_every_fault_its_place() -> None:
    assert {fault.violates for fault in FAULTS} == {*INVARIANTS, *PROPERTIES}
    assert {fault.scope for fault in FAULTS} <= {scope.name for scope in SCOPES if not scope.slow}
    for fault in FAULTS:
        assert fault.plant(read_window_design()) != read_window_design()
