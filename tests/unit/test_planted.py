"""Every planted fault is noticed by the machine that stands guard over it, within a stated number of examples."""

from __future__ import annotations

import contextlib
import inspect

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kvproof.allocator import BlockManager, PrefixIndex
from kvproof.fuzz.machines.index import IndexMachine
from kvproof.fuzz.machines.manager import ManagerMachine
from kvproof.fuzz.machines.pool import PoolMachine
from kvproof.fuzz.planted import FAULTS, INDEX_FAULTS, POOL_FAULTS, Fault

BUDGET = settings.get_profile("hunt")


ALL_FAULTS = [
    *((fault, ManagerMachine) for fault in FAULTS),
    *((fault, PoolMachine) for fault in POOL_FAULTS),
    *((fault, IndexMachine) for fault in INDEX_FAULTS),
]


@pytest.mark.usefixtures("capsys")  # it tells every failure's steps
@pytest.mark.parametrize(("fault", "machine"), ALL_FAULTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_fault_is_noticed(fault: Fault, machine: type[RuleBasedStateMachine]) -> None:
    with fault.planted(), pytest.raises(Exception) as noticed:
        run_state_machine_as_test(machine, settings=BUDGET)
    # Faults break behaviour; these would mean that the replacement itself does not run.
    assert not isinstance(noticed.value, (NameError, AttributeError, TypeError))


def test_the_same_run_without_a_fault_is_quiet() -> None:
    """As many examples as the best hidden fault needs, twice over."""
    run_state_machine_as_test(ManagerMachine, settings=settings(BUDGET, max_examples=200))


def test_a_fault_leaves_with_its_block() -> None:
    before = inspect.getattr_static(BlockManager, "reserve")
    fault = next(fault for fault in FAULTS if fault.function == "reserve")
    with contextlib.suppress(KeyError), fault.planted():
        assert inspect.getattr_static(BlockManager, "reserve") is not before
        raise KeyError
    assert inspect.getattr_static(BlockManager, "reserve") is before


@pytest.mark.parametrize(("old", "times"), [("no such text", 0), ("node", 4)])
def test_a_fault_that_no_longer_fits_the_source_says_so(old: str, times: int) -> None:
    """Else a fault would stay in the list, be planted nowhere and look as if it went unnoticed."""
    before = inspect.getattr_static(PrefixIndex, "find")
    fault = Fault("outdated", PrefixIndex, "find", old, "", "")
    with pytest.raises(ValueError, match=f"^outdated: '{old}' occurs {times} times in find$"), fault.planted():
        pass
    assert inspect.getattr_static(PrefixIndex, "find") is before


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault, _ in ALL_FAULTS}) == len(ALL_FAULTS)
