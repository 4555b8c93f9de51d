"""Counts what a state machine does, whatever machine it is, without the machine knowing.

`counted` makes a subclass whose rules and invariants are wrapped. Hypothesis keeps what makes a method a rule in an
attribute of the method, which the wrapper takes over. Its observability hooks would tell the same, at a fifth of the
speed.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from time import perf_counter
from typing import Any, cast

from hypothesis.errors import HypothesisException
from hypothesis.stateful import (
    INITIALIZE_RULE_MARKER,
    INVARIANT_MARKER,
    RULE_MARKER,
    RuleBasedStateMachine,
    StateMachineMeta,
)

from kvproof.fuzz import watchdog
from kvproof.fuzz.abstract import digest

NUM_SLOWEST = 5


@dataclass(slots=True)
class Tally:
    """What the examples of one round did, up to and with the first that failed: shrinking is not counted.

    `states` has the digest of each distinct abstract state, in the order in which they were reached.
    """

    rules: Counter[str] = field(default_factory=Counter)
    invariants: Counter[str] = field(default_factory=Counter)
    states: dict[int, None] = field(default_factory=dict)
    slowest: list[tuple[float, list[str]]] = field(default_factory=list)
    examples: int = 0
    failed: bool = False

    def add_time(self, seconds: float, steps: list[tuple[str, dict[str, Any]]]) -> None:
        """An example took `seconds`; its steps are written out only if it is among the slowest."""
        if len(self.slowest) < NUM_SLOWEST or seconds > self.slowest[-1][0]:
            program = [f"{name}({', '.join(f'{k}={v!r}' for k, v in kwargs.items())})" for name, kwargs in steps]
            self.slowest = sorted([*self.slowest, (seconds, program)], key=lambda slow: -slow[0])[:NUM_SLOWEST]


def counted(
    machine: type[RuleBasedStateMachine], tally: Tally, abstract: Callable[[Any], object] | None
) -> type[RuleBasedStateMachine]:
    """A machine that behaves as `machine` and adds to `tally`; `abstract` gives the state after a rule."""
    steps: list[tuple[str, dict[str, Any]]] = []
    started, in_rule = 0.0, False

    def start(self: Any) -> None:
        nonlocal started
        machine.__init__(self)
        tally.examples += not tally.failed
        steps.clear()
        started = perf_counter()
        watchdog.start()

    def finish(self: Any) -> None:
        try:
            machine.teardown(self)
        except HypothesisException:
            raise
        except Exception:
            tally.failed = True
            raise
        finally:
            watchdog.stop()
        if not tally.failed:
            tally.add_time(perf_counter() - started, steps)

    def wrapped(function: Callable[..., object], counter: Counter[str], *, is_rule: bool) -> Callable[..., object]:
        @wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> object:
            nonlocal in_rule
            if tally.failed or in_rule:  # a rule that another one calls is part of that
                return function(self, *args, **kwargs)
            counter[function.__name__] += 1
            if is_rule:
                steps.append((function.__name__, kwargs))
            in_rule = is_rule
            try:
                result = function(self, *args, **kwargs)
                if is_rule and abstract is not None:
                    tally.states[digest(abstract(self))] = None
            except HypothesisException:
                raise
            except Exception:
                tally.failed = True
                raise
            finally:
                in_rule = False
            return result

        return call

    namespace: dict[str, Any] = {
        "__module__": machine.__module__,
        "__qualname__": machine.__qualname__,
        "__doc__": machine.__doc__,
        "__init__": start,
        "teardown": finish,
    }
    for name, member in inspect.getmembers(machine):
        for marker in (RULE_MARKER, INITIALIZE_RULE_MARKER, INVARIANT_MARKER):
            if (marked := getattr(member, marker, None)) is not None:
                is_rule = marker != INVARIANT_MARKER
                function = wrapped(marked.function, tally.rules if is_rule else tally.invariants, is_rule=is_rule)
                setattr(function, marker, replace(marked, function=function))
                namespace[name] = function
    return cast(type[RuleBasedStateMachine], StateMachineMeta(machine.__name__, (machine,), namespace))
