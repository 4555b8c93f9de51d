"""How many random examples a second the state machines do, beside a machine of Hypothesis's that does nothing.

An example is up to 30 rules. What the empty machine takes is Hypothesis's own, which no machine can do without.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from mode import QUICK
from pytest_benchmark.fixture import BenchmarkFixture

from kvproof.cli.bench_figures import Figures
from kvproof.fuzz.rounds import RoundJob, run_round

EXAMPLES = 50 if QUICK else 200
STEPS = 30
ROUNDS = 3


class Empty(RuleBasedStateMachine):
    """Two rules and an invariant, as small as a machine can be that draws something."""

    @rule(slot=st.integers(0, 3), tokens=st.lists(st.integers(0, 1), max_size=6))
    def one(self, slot: int, tokens: list[int]) -> None: ...

    @rule(slot=st.integers(0, 3))
    def other(self, slot: int) -> None: ...

    @invariant()
    def holds(self) -> None: ...


def empty_seconds() -> float:
    configured = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    started = perf_counter()
    run_state_machine_as_test(Empty, settings=configured)
    return perf_counter() - started


@pytest.mark.parametrize("machine", ["manager"] if QUICK else ["pool", "index", "manager", "compat"])
@pytest.mark.benchmark(group="random examples of up to 30 rules")
def test_examples(benchmark: BenchmarkFixture, machine: str) -> None:
    empty: list[float] = []
    mine: list[float] = []
    rounds: list[dict[str, Any]] = []

    def our_turn() -> None:
        rounds.append(run_round(RoundJob(machine, seed=len(rounds), examples=EXAMPLES, steps=STEPS)))
        mine.append(rounds[-1]["seconds"] / rounds[-1]["examples"])

    run_round(RoundJob(machine, examples=5, steps=STEPS))  # what is imported and built once
    benchmark.pedantic(our_turn, setup=lambda: empty.append(empty_seconds() / EXAMPLES), rounds=ROUNDS)
    assert {done["error"] for done in rounds} == {None}
    figures = Figures(benchmark)
    figures.over("an empty machine", mine, empty)
    rules = sum(sum(done["rules"].values()) for done in rounds)
    figures.note(
        examples_per_second=round(1 / min(mine), 1), rules_per_example=round(rules / (EXAMPLES * len(rounds)), 1),
        empty_machine_examples_per_second=round(1 / min(empty), 1), examples=EXAMPLES,
    )  # fmt: skip
    figures.show()
