"""Every fault that can be planted, by name, with what has to find it.

Each list of faults stands beside the machine that it belongs to; this is the list of the lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from kvproof.allocator import InvalidArgument
from kvproof.fuzz.spec.code_faults import HUNTS, Hunt
from kvproof.fuzz.targets import MACHINES
from kvproof.fuzz.world import World

CONFORMANCE = "conformance"
"""What finds the faults of attention backends: the check that each of them names."""

LISTS = (
    ("kvproof.fuzz.planted:FAULTS", "manager"),
    ("kvproof.fuzz.planted:POOL_FAULTS", "pool"),
    ("kvproof.fuzz.planted:INDEX_FAULTS", "index"),
    ("kvproof.fuzz.spec.code_faults:MORE_FAULTS", "manager"),
    ("kvproof.fuzz.machines.compat:COMPAT_FAULTS", "compat"),
    ("kvproof.fuzz.machines.engine_faults:REFUSED_PLANS", "engine"),
    ("kvproof.fuzz.machines.engine_faults:ENGINE_FAULTS", "engine"),
    ("kvproof.fuzz.conformance.faults:ATTENTION_FAULTS", CONFORMANCE),
)
"""Where the faults are, and what has to find those of each list: a machine, or the conformance checks."""

EXPLORER_ONLY = (World,)
"""Faults in these are in the explorer's own driver, which no machine uses."""


class Fault(Protocol):
    """What can be planted."""

    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str: ...

    def planted(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault, what finds it (a machine, or `CONFORMANCE`), and where the explorer does; None where one can't."""

    fault: Fault
    finder: str | None
    hunt: Hunt | None


def catalogue() -> dict[str, Planted]:
    """All faults by name, in the order of the lists; those that need torch only where it is installed.

    Raises `ValueError` if two share a name.
    """
    found: dict[str, Planted] = {}
    for planted in _all():
        if planted.fault.name in found:
            raise ValueError(f"two faults are called {planted.fault.name!r}")
        found[planted.fault.name] = planted
    return found


def fault_named(name: str) -> Planted:
    """Imports no list behind the one that has it: the last ones need torch. Raises `InvalidArgument`."""
    planted = next((planted for planted in _all() if planted.fault.name == name), None)
    if planted is None:
        raise InvalidArgument(f"no fault is called {name!r}; kvproof fuzz --planted all shows all there are")
    return planted


def _all() -> Iterator[Planted]:
    hunts = {hunt.fault.name: hunt for hunt in HUNTS}
    for path, finder in LISTS:
        if (finder == CONFORMANCE or MACHINES[finder].needs_torch) and find_spec("torch") is None:
            continue
        module, _, name = path.partition(":")
        faults: tuple[Any, ...] = getattr(import_module(module), name)
        for fault in faults:
            yield Planted(fault, None if fault.owner in EXPLORER_ONLY else finder, hunts.get(fault.name))
