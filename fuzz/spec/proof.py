"""The inductive proof: the invariants hold in the initial state, every primitive transition keeps them, and what the
specification says follows. For any number of blocks, sequences, pins and steps and for any block size.

`python -m kvproof.fuzz.spec.proof` writes the verdict on every obligation; allocator/spec/PROOF.md explains them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import z3

from kvproof.fuzz.spec.proof_blocks import BLOCK_PRIMITIVES
from kvproof.fuzz.spec.proof_invariants import INVARIANTS, fails, holds
from kvproof.fuzz.spec.proof_lemmas import LEMMAS
from kvproof.fuzz.spec.proof_runs import RUNS, enough, guards
from kvproof.fuzz.spec.proof_state import Primitive, any_state, anything, initial_state
from kvproof.fuzz.spec.proof_steps import STEP_PRIMITIVES
from kvproof.fuzz.spec.proof_tables import TABLE_PRIMITIVES
from kvproof.fuzz.spec.proof_terms import Expr, axioms

PRIMITIVES: dict[str, Primitive] = {
    primitive.__name__: primitive for primitive in (*BLOCK_PRIMITIVES, *TABLE_PRIMITIVES, *STEP_PRIMITIVES)
}
TIMEOUT = 2.0
"""Seconds that one obligation may take; the slowest takes a tenth of a second."""


@dataclass(frozen=True, slots=True)
class Obligation:
    """`subject` (a primitive, the initial state, a lemma, a run) and what is to show of it. Proved or not: z3 giving up
    ("unknown", which is also what a wrong transition gives) is not proved."""

    subject: str
    claim: str
    verdict: str
    seconds: float

    @property
    def proved(self) -> bool:
        return self.verdict == "proved"


def prove() -> Iterator[Obligation]:
    """All obligations, each when it has been tried."""
    start = initial_state()
    for invariant in INVARIANTS:
        yield _obligation(_Prover([]), "initial state", invariant, [fails(start, start, invariant)])
    for name in PRIMITIVES:
        yield from prove_primitive(name)
    state = any_state()
    prover = _Prover(holds(state))
    for lemma in LEMMAS:
        given, conclusion = lemma.statement(state, anything())
        yield _obligation(prover, lemma.subject, lemma.claim, [given, z3.Not(conclusion)])
    for run in RUNS:
        yield _possible(run.name, guards(run, PRIMITIVES))


def prove_primitive(name: str, primitive: Primitive | None = None) -> Iterator[Obligation]:
    """The obligations of one primitive, or of `primitive` in its place."""
    state = any_state()
    prover = _Prover(holds(state))
    step = (primitive or PRIMITIVES[name])(state, anything())
    for invariant in INVARIANTS:
        negation = [*step.guard.values(), fails(step.after, state, invariant)]
        yield _obligation(prover, name, invariant, negation)


class _Prover:
    """Axioms and hypotheses, read once, under which several claims are refuted."""

    def __init__(self, hypotheses: list[Expr]) -> None:
        self._solver = z3.Solver()
        # Only the instances that the patterns ask for: z3 is done at once also where there is no proof.
        self._solver.set("auto_config", False)
        self._solver.set("smt.mbqi", False)
        self._solver.set("timeout", int(TIMEOUT * 1000))
        self._solver.add(*axioms(), *hypotheses)

    def refutes(self, negation: list[Expr]) -> bool:
        self._solver.push()
        self._solver.add(*negation)
        answer = self._solver.check()
        self._solver.pop()
        return bool(answer == z3.unsat)


def _obligation(prover: _Prover, subject: str, claim: str, negation: list[Expr]) -> Obligation:
    start = time.perf_counter()
    verdict = "proved" if prover.refutes(negation) else "not proved"
    return Obligation(subject, claim, verdict, time.perf_counter() - start)


def _possible(name: str, conditions: list[Expr]) -> Obligation:
    solver = z3.Solver()
    solver.set("timeout", int(TIMEOUT * 1000))
    solver.add(*axioms(), *enough(), *conditions)
    start = time.perf_counter()
    verdict = "proved" if solver.check() == z3.sat else "not proved"
    return Obligation(name, "can happen", verdict, time.perf_counter() - start)


def main() -> int:
    """Exits 1 when anything is not proved."""
    failed = total = 0
    start = time.perf_counter()
    for obligation in prove():
        total += 1
        failed += not obligation.proved
        line = f"{obligation.subject:<37} {obligation.claim:<44} {obligation.verdict:<10} {obligation.seconds:6.3f} s\n"
        sys.stdout.write(line)
    sys.stdout.write(f"{total - failed} of {total} obligations proved in {time.perf_counter() - start:.1f} s\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
