"""What `python -m kvproof.fuzz.spec` is made of: named parts, each a series of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check that has been made: `what` was checked, and whether all is `right` or not, with the reason in `detail`.

    The sizes say how much was gone through: states, transitions, proof obligations; 0 where there is no such thing.
    """

    what: str
    right: bool
    detail: str = ""
    states: int = 0
    transitions: int = 0
    obligations: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """`checks(full)` makes the checks one by one: a selection that takes a minute or so, or with `full` all there are.

    A part that is `full_only` runs when all is asked for, or when it is by name. A part ends, and counts as a failed
    check, with a `KvproofError`, a `TimeoutError`, or the `ValueError` of a fault that does not fit its source.
    """

    name: str
    about: str
    checks: Callable[[bool], Iterable[Check]]
    full_only: bool = False
