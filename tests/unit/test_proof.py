"""The inductive proof holds, and it notices what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("z3", reason="the proof needs z3-solver")

from kvproof.fuzz.spec.proof import PRIMITIVES, main, prove
from kvproof.fuzz.spec.proof_faults import FAULTS, Fault, broken_by, without
from kvproof.fuzz.spec.proof_invariants import INVARIANTS
from kvproof.fuzz.spec.proof_lemmas import LEMMAS
from kvproof.fuzz.spec.proof_runs import RUNS

PROOF_MD = Path(__file__).parents[2] / "allocator" / "spec" / "PROOF.md"


def test_every_obligation_is_proved() -> None:
    obligations = list(prove())
    assert [obligation for obligation in obligations if not obligation.proved] == []
    assert len(obligations) == len(INVARIANTS) * (1 + len(PRIMITIVES)) + len(LEMMAS) + len(RUNS)
    assert len({(obligation.subject, obligation.claim) for obligation in obligations}) == len(obligations)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_breaks_what_is_there_for_it_and_nothing_else(fault: Fault) -> None:
    assert broken_by(fault) == fault.breaks


def test_every_invariant_is_broken_by_some_fault() -> None:
    assert set().union(*(fault.breaks for fault in FAULTS)) == set(INVARIANTS)


def test_every_primitive_happens_in_a_run() -> None:
    assert {name for run in RUNS for name, _ in run.steps} == set(PRIMITIVES)


def test_what_can_not_happen_is_not_proved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that takes the same block twice, and the command that says so."""
    impossible = RUNS[0].__class__("impossible", 1, (RUNS[0].steps[1], RUNS[0].steps[1]))
    monkeypatch.setattr("kvproof.fuzz.spec.proof.RUNS", (impossible,))
    assert main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "not proved" in line] == ["impossible"]
    assert re.fullmatch(r"305 of 306 obligations proved in \d+\.\d s", lines[-1])


def test_a_guard_that_is_dropped_must_be_there() -> None:
    with pytest.raises(KeyError, match="no such part"):
        broken_by(Fault("nothing", "take", without("no such part"), frozenset()))


def test_the_table_of_operations_names_every_primitive_and_no_other() -> None:
    operations = PROOF_MD.read_text(encoding="utf-8").split("## What the operations are made of")[1].split("\n## ")[0]
    named = {name for row in re.findall(r"^\| .*$", operations, re.M) for name in re.findall(r"\*(\w+)\*", row)}
    assert named == set(PRIMITIVES)
