"""nano-vllm's interface under its state machine, the machine against planted faults, and the model by hand."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvproof.fuzz.machines.compat import COMPAT_FAULTS, CompatMachine
from kvproof.fuzz.nano import NanoModel, NanoSequence
from kvproof.fuzz.planted import Fault

TestCompatMachine = CompatMachine.TestCase

BUDGET = settings.get_profile("hunt")


@pytest.mark.usefixtures("capsys")  # it tells every failure's steps
@pytest.mark.parametrize("fault", COMPAT_FAULTS, ids=str)
def test_fault_is_noticed(fault: Fault) -> None:
    with fault.planted(), pytest.raises(Exception) as noticed:
        run_state_machine_as_test(CompatMachine, settings=BUDGET)
    # Faults break behaviour; these would mean that the replacement itself does not run.
    assert not isinstance(noticed.value, (NameError, AttributeError, TypeError))


def test_the_model_publishes_what_was_written_and_finds_it_short_of_the_last_token() -> None:
    model = NanoModel(num_blocks=6, block_size=2)
    first, same_step, later = (NanoSequence([1, 2, 3, 4], 2) for _ in range(3))
    model.allocate(first)
    model.allocate(same_step)
    assert (first.block_table, same_step.block_table, model.contents) == ([0, 1], [2, 3], {})
    first.append_token(5)
    assert model.can_allocate(later)
    model.allocate(later)
    assert model.contents == {0: (1, 2), 1: (1, 2, 3, 4)}
    assert (later.block_table, later.num_cached_tokens, model.refs) == ([0, 4], 2, [2, 1, 1, 1, 1, 0])


def test_the_model_frees_the_tail_first_and_takes_empty_blocks_before_cached_ones() -> None:
    model = NanoModel(num_blocks=4, block_size=1)
    computed, aborted = NanoSequence([1, 2], 1), NanoSequence([3], 1)
    model.allocate(computed)
    model.allocate(aborted)
    computed.append_token(3)
    model.deallocate(computed)
    model.deallocate(aborted)
    assert (model.empty, model.cached, model.contents) == ([3, 2], [1, 0], {0: (1,), 1: (1, 2)})
    assert [model.take() for _ in range(3)] == [2, 3, 1]
    assert model.contents == {0: (1,)}


def test_the_model_counts_slots_for_all_new_tokens_once() -> None:
    model = NanoModel(num_blocks=3, block_size=2)
    seq = NanoSequence([1], 2)
    model.allocate(seq)
    for token in (2, 3, 4, 5):
        seq.append_token(token)
    assert model.can_append(seq)
    model.may_append(seq)
    model.may_append(seq)
    assert (seq.block_table, model.contents) == ([0, 1, 2], {})
    seq.append_token(6)
    seq.append_token(7)
    assert not model.can_append(seq)
