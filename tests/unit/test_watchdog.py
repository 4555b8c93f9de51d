"""An example that never ends is told, and the next one runs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kvproof.fuzz import regression, watchdog
from kvproof.fuzz.counting import Tally, counted
from kvproof.fuzz.watchdog import NeverEnds

ONCE = settings(max_examples=1, phases=(Phase.generate,), database=None, deadline=None)


class InRule(RuleBasedStateMachine):
    @rule()
    def wait(self) -> None:
        while True:
            pass


class InTeardown(RuleBasedStateMachine):
    @rule()
    def nothing(self) -> None:
        pass

    def teardown(self) -> None:
        while True:
            pass


class InBoth(InRule):
    teardown = InTeardown.teardown


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such signals here")
@pytest.mark.parametrize("machine", [InRule, InTeardown, InBoth])
@pytest.mark.usefixtures("capsys")
def test_an_example_that_never_ends(
    machine: Callable[[], RuleBasedStateMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LIMIT", 0.2)
    monkeypatch.setattr(watchdog, "AGAIN", 0.1)
    tally = Tally()
    with pytest.raises(NeverEnds, match=r"^the example has not ended after 0.2 s"):
        run_state_machine_as_test(counted(machine, tally, None), settings=ONCE)  # type: ignore[arg-type]
    assert tally.failed
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_written_example_that_never_ends_counts_as_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "LONGEST", 3)
    (file := tmp_path / "test_endless.py").write_text("def test_endless() -> None:\n    while True:\n        pass\n")
    assert regression.fails(file, endless=True)
    assert not regression.fails(file)  # whatever it was that failed, it was not seen to
    file.write_text("def test_ends() -> None:\n    pass\n")
    assert not regression.fails(file)
