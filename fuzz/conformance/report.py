"""What a conformance run is made of: named checks, how hard they look, and the report of what they saw."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kvproof.attention import BackendUnavailable


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard a check looks. The same effort gives the same result again.

    examples  random cases of each check
    seed      where they come from
    shrink    whether a failing case is reduced to a small one before it is reported
    """

    examples: int = 100
    seed: int = 0
    shrink: bool = True

    @property
    def settings(self) -> settings:
        return settings(
            max_examples=self.examples,
            phases=(Phase.generate, Phase.shrink) if self.shrink else (Phase.generate,),
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            # Whoever asks for many examples of large batches, or on a slow device, shall have them.
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example),
        )


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a conforming implementation does. `check(effort)` raises if it does not.

    `body(effort, count)` does the work, and calls `count` once an example.
    """

    name: str
    body: Callable[[Effort, Callable[[], None]], None]

    def __str__(self) -> str:
        return self.name

    def __call__(self, effort: Effort) -> None:
        self.body(effort, lambda: None)

    def run(self, effort: Effort) -> Result:
        """Like calling it, with what was raised in the result."""
        examples, error, began = 0, None, time.perf_counter()

        def count() -> None:
            nonlocal examples
            examples += 1

        try:
            self.body(effort, count)
        except Exception as raised:
            error = raised
        return Result(self.name, examples, time.perf_counter() - began, error)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a check: `error` is what it raised, with the failing case in its notes."""

    name: str
    examples: int
    seconds: float
    error: Exception | None

    def __str__(self) -> str:
        told = f"{'ok  ' if self.error is None else 'FAIL'} {self.name}: {self.examples} examples, {self.seconds:.1f} s"
        if self.error is None:
            return told
        lines = f"{type(self.error).__name__}: {self.error}".splitlines() + getattr(self.error, "__notes__", [])
        return "\n     ".join([told, *"\n".join(lines).splitlines()])


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all checks of one target, in order. `str(report)` is for people."""

    target: str
    results: tuple[Result, ...]

    @property
    def failures(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.error is not None)

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        verdict = f"{self.target}: {len(self.results) - len(self.failures)} of {len(self.results)} checks passed"
        return "\n".join([*map(str, self.results), verdict])


def on_data(name: str, body: Callable[[st.DataObject], None]) -> Check:
    """A check of random cases, which `body` draws."""

    def run(effort: Effort, count: Callable[[], None]) -> None:
        @seed(effort.seed)
        @effort.settings
        @given(st.data())
        def test(data: st.DataObject) -> None:
            count()
            body(data)

        test()

    return Check(name, run)


def once(name: str, body: Callable[[], None]) -> Check:
    """A check that goes through all of its cases itself."""

    def run(_: Effort, count: Callable[[], None]) -> None:
        count()
        body()

    return Check(name, run)


def on_machine(name: str, machine: type[RuleBasedStateMachine]) -> Check:
    """A check that runs a state machine."""

    def run(effort: Effort, count: Callable[[], None]) -> None:
        class Counted(machine):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                count()
                super().__init__()

        run_state_machine_as_test(seed(effort.seed)(Counted), settings=effort.settings)

    return Check(name, run)


def as_pytest(
    checks: Iterable[Check], effort: Effort, probe: Callable[[], None] = lambda: None
) -> Callable[[Check], None]:
    """A test function with one case for each check; skipped where `probe` raises `BackendUnavailable`."""
    # Only who writes tests has pytest.
    import pytest

    cases: list[Any] = [pytest.param(check, id=check.name) for check in checks]

    @pytest.mark.parametrize("check", cases)
    def test(check: Check) -> None:
        try:
            probe()
        except BackendUnavailable as error:
            pytest.skip(str(error))
        check(effort)

    return test
