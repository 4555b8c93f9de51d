"""Every fault that can be planted, by name, with what has to find it.

Each list of faults stands beside the machine that it belongs to; this is the list of the lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module

from kvproof.allocator import InvalidArgument
from kvproof.fuzz.planted import Fault
from kvproof.fuzz.spec.code_faults import HUNTS, Hunt
from kvproof.fuzz.world import World

LISTS = (
    ("kvproof.fuzz.planted:FAULTS", "manager"),
    ("kvproof.fuzz.planted:POOL_FAULTS", "pool"),
    ("kvproof.fuzz.planted:INDEX_FAULTS", "index"),
    ("kvproof.fuzz.spec.code_faults:MORE_FAULTS", "manager"),
    ("kvproof.fuzz.machines.compat:COMPAT_FAULTS", "compat"),
)
"""Where the faults are, and the machine for which each list is."""

EXPLORER_ONLY = (World,)
"""Faults in these are in the explorer's own driver, which no machine uses."""


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault, the machine that finds it, and where the explorer does; None where the one or the other can't."""

    fault: Fault
    machine: str | None
    hunt: Hunt | None


@cache
def catalogue() -> dict[str, Planted]:
    """All faults by name, in the order of the lists. Raises `ValueError` if two share a name."""
    hunts = {hunt.fault.name: hunt for hunt in HUNTS}
    found: dict[str, Planted] = {}
    for path, machine in LISTS:
        module, _, name = path.partition(":")
        for fault in getattr(import_module(module), name):
            if fault.name in found:
                raise ValueError(f"two faults are called {fault.name!r}")
            driver = fault.owner in EXPLORER_ONLY
            found[fault.name] = Planted(fault, None if driver else machine, hunts.get(fault.name))
    return found


def fault_named(name: str) -> Planted:
    """Raises `InvalidArgument`."""
    known = catalogue()
    if name not in known:
        raise InvalidArgument(
            f"no fault is called {name!r}; kvproof fuzz --planted all lists the {len(known)} there are"
        )
    return known[name]
