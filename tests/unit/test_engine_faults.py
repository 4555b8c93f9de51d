"""What the engine machine notices: plans that are built wrong or read wrong, copies that are not made."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvproof.attention import InvalidBatch
from kvproof.fuzz.conformance.faults import MethodFault
from kvproof.fuzz.machines.engine import EngineMachine
from kvproof.fuzz.machines.engine_faults import ENGINE_FAULTS, MISREAD_PLANS, REFUSED_PLANS
from kvproof.fuzz.planted import Fault

pytestmark = pytest.mark.usefixtures("one_thread")


def run(examples: int) -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(settings.get_profile("hunt"), max_examples=examples, stateful_step_count=25),
    )


@pytest.mark.usefixtures("capsys")  # it tells every failure's steps
@pytest.mark.parametrize("fault", [*MISREAD_PLANS, *ENGINE_FAULTS], ids=str)
def test_a_fault_is_noticed(fault: Fault | MethodFault) -> None:
    with fault.planted(), pytest.raises(Exception) as noticed:
        run(3000)
    assert not isinstance(noticed.value, (NameError, AttributeError, TypeError))  # the fault itself does not run


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize("fault", REFUSED_PLANS, ids=str)
def test_a_wrong_plan_is_refused_before_it_can_do_harm(fault: Fault) -> None:
    with fault.planted(), pytest.raises(InvalidBatch):
        run(3000)


def test_without_a_fault_it_is_quiet() -> None:
    run(20)


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in (*ENGINE_FAULTS, *REFUSED_PLANS)}) == len(ENGINE_FAULTS) + len(REFUSED_PLANS)
