"""Allocator and attention under one machine, batch metadata under another, and what each of them notices."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kvproof.attention import BatchPlan, InvalidBatch, plan
from kvproof.attention.reference import ReferenceAttention
from kvproof.fuzz.conformance.faults import METADATA_FAULTS, MethodFault
from kvproof.fuzz.machines.attention import AttentionMachine
from kvproof.fuzz.machines.batch import VIOLATIONS, BatchMachine
from kvproof.fuzz.planted import FAULTS, Fault

pytestmark = pytest.mark.usefixtures("one_thread")


class OnTheReference(AttentionMachine):
    backend = ReferenceAttention


def run(machine: type[RuleBasedStateMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(settings.get_profile("hunt"), max_examples=examples, stateful_step_count=25),
    )


@pytest.mark.parametrize(("machine", "examples"), [(AttentionMachine, 60), (OnTheReference, 20), (BatchMachine, 60)])
def test_the_machine_is_quiet(machine: type[RuleBasedStateMachine], examples: int) -> None:
    run(machine, examples)


OF_THE_ALLOCATOR = [
    fault
    for fault in FAULTS
    if fault.name
    in (
        "published before it is written",
        "namespaces share",
        "fork forgets the references",
        "shared tail written in place",
        "copy ordered the wrong way",
        "published tail written in place",
    )
]


@pytest.mark.usefixtures("capsys")  # it tells every failure's steps
@pytest.mark.parametrize("fault", [*METADATA_FAULTS, *OF_THE_ALLOCATOR], ids=str)
def test_a_fault_of_backend_or_allocator_is_noticed(fault: Fault | MethodFault) -> None:
    machine = (
        OnTheReference if isinstance(fault, MethodFault) and fault.owner is ReferenceAttention else AttentionMachine
    )
    with fault.planted(), pytest.raises(Exception) as noticed:
        run(machine, 3000)
    assert not isinstance(noticed.value, (NameError, AttributeError, TypeError))  # the fault itself does not run


# ---- batch metadata


def test_there_is_a_violation_for_every_rule_of_the_table() -> None:
    table = (plan.__doc__ or "").split("by these names:\n\n")[1].split("\n\n")[0]
    rules = re.findall(r"^    ([a-z-]+(?:, [a-z-]+)*)  +\S", table, re.MULTILINE)
    assert {name for names in rules for name in names.split(", ")} | {"dtype", "device", "contiguous"} == set(
        VIOLATIONS
    )


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_rule_that_is_not_enforced_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    validate = BatchPlan.validate

    def all_but_one(self: BatchPlan, *cache: Any) -> None:
        try:
            validate(self, *cache)
        except InvalidBatch as error:
            if error.rule != name:
                raise

    monkeypatch.setattr(BatchPlan, "validate", all_but_one)
    with pytest.raises(AssertionError, match=f"^a plan that breaks {name} is accepted"):
        run(BatchMachine, 3000)


@pytest.mark.usefixtures("capsys")
def test_a_plan_built_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that is valid: the second block of a row that is longer than it is said to be."""
    build = BatchPlan.build

    def shorter(tables: object, seq_lens: list[int], query_lens: list[int], size: int) -> BatchPlan:
        return build(
            tables, [max(query, seq - size) for seq, query in zip(seq_lens, query_lens, strict=True)], query_lens, size
        )

    monkeypatch.setattr(BatchPlan, "build", shorter)
    with pytest.raises(AssertionError, match=r"^\w+ is tensor"):
        run(BatchMachine, 100)
